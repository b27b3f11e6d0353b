"""`make package`: build what a package index gets, and use it as somebody who has nothing else.

The wheel is built from the sdist, and installed into an environment of its own, which takes from
this one only torch and what it requires: gigabytes, that are here already. There `ddpperf init` and
the first test of the README run. From the unpacked sdist run the tests that read its other files.
Writes below build/package only.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from contextlib import suppress
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "package"
PROJECT = BUILD / "project"
# Tests that read the files outside of the package.
OF_FILES = ("tests/unit/test_docs.py", "tests/unit/test_package.py")

PYTEST_INI = """\
[pytest]
pythonpath = .
addopts = -p no:cacheprovider
ddp_world_size = 2
ddp_warmup = 2
ddp_steps = 10
ddp_min_time = 0
ddp_launches = 2
ddp_max_launches = 4
ddp_threshold = p50:400%
"""
# Whatever else runs on the machine, the pause is more than the limit.
NET = """\
import time, torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(128, 128)

    def forward(self, x):
        time.sleep(PAUSE)
        return super().forward(x)
"""


def run(*command: str | Path, folder: Path, status: int = 0) -> None:
    """Run a command, which must end with this status; else show what it wrote, and end."""
    words = list(map(str, command))
    print("$", shlex.join(words), flush=True)
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTEST_ADDOPTS", "CI")
    }
    ended = subprocess.run(
        words,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ended.returncode != status:
        sys.exit(
            f"{ended.stdout}\nexit status {ended.returncode}, not {status}"
        )


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return the unpacked sdist and the wheel."""
    command = (sys.executable, "-m", "build", "--no-isolation")
    run(*command, "--outdir", BUILD, ROOT, folder=ROOT)
    (archive,) = BUILD.glob("*.tar.gz")
    (wheel,) = BUILD.glob("*.whl")
    shutil.unpack_archive(archive, BUILD)
    return BUILD / archive.name.removesuffix(".tar.gz"), wheel


def install(wheel: Path) -> Path:
    """Install the wheel into an environment that has torch; return the folder of its commands."""
    place = BUILD / "environment"
    venv.create(place)
    (packages,) = place.glob("lib/python*/site-packages")
    here = Path(sysconfig.get_path("purelib"))
    for name in sorted(required_by("torch")):
        for top in tops_of(name):
            if not (packages / top).exists():
                (packages / top).symlink_to(here / top)
    commands = place / "bin"
    pip = (sys.executable, "-m", "pip", "--python", commands / "python")
    run(*pip, "install", "--quiet", wheel, folder=BUILD)
    return commands


def required_by(name: str) -> set[str]:
    """Return a distribution and all that it requires here."""
    found: set[str] = set()
    open_names = [name]
    while open_names:
        name = open_names.pop().lower()
        if name in found:
            continue
        with suppress(metadata.PackageNotFoundError):
            required = metadata.requires(name) or ()
            found.add(name)
            for each in required:
                if "extra ==" not in each:
                    open_names += re.findall(r"^[\w.-]+", each)
    return found


def tops_of(name: str) -> set[str]:
    """Return the names of a distribution in the folder of packages. Its commands are elsewhere."""
    files = metadata.files(name) or ()
    return {file.parts[0] for file in files} - {"..", "__pycache__"}


def first_test() -> str:
    """Return the first test of the README."""
    readme = (ROOT / "README.md").read_text("utf-8")
    (code,) = re.findall(
        r"```python\n(# tests/perf/test_train_step\.py\n.*?)```",
        readme,
        re.DOTALL,
    )
    return str(code)


def use(commands: Path) -> None:
    """Do what the README begins with: a first test, a baseline, a slower commit."""
    PROJECT.mkdir()
    run(commands / "ddpperf", "init", "--ci", "github", folder=PROJECT)
    test = PROJECT / "tests" / "perf" / "test_train_step.py"
    test.write_text(first_test())
    package = PROJECT / "mypackage.py"
    package.write_text(NET.replace("PAUSE", "0.005"))
    (PROJECT / "pytest.ini").write_text(PYTEST_INI)
    (PROJECT / ".gitignore").write_text("__pycache__/\n")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org")
    run("git", "init", "--quiet", folder=PROJECT)
    run("git", "add", ".", folder=PROJECT)
    run(*git, "commit", "--quiet", "--message=A test", folder=PROJECT)
    pytest = (commands / "pytest", "tests/perf")
    run(*pytest, "--ddp-save-baseline", folder=PROJECT)
    run(*pytest, "--ddp-json=same.json", folder=PROJECT)
    expect("same.json", "compared")
    package.write_text(NET.replace("PAUSE", "0.1"))
    # An editable install hides a warning of pytest's on packages that it did not import.
    against = (
        "--ddp-against=HEAD",
        "--ddp-json=slower.json",
        "-Werror::pytest.PytestAssertRewriteWarning",
    )
    run(*pytest, *against, folder=PROJECT, status=1)
    expect("slower.json", "regressed")


def expect(report: str, name: str) -> None:
    """Check that a report counts one measurement under this name."""
    summary = json.loads((PROJECT / report).read_text())["summary"]
    if summary[name] != 1:
        sys.exit(f"{report}: {summary}")


def main() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    sdist, wheel = build()
    use(install(wheel))
    run(sys.executable, "-m", "pytest", "-q", *OF_FILES, folder=sdist)


if __name__ == "__main__":
    main()
