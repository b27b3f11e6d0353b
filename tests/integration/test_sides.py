"""Code, data and libraries by which the baseline side could run what the current side runs, in
whole runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integration.conftest import FEW, SMALL, Run
from tests.integration.test_against import SECOND, STEP, Repository, repository
from tests.integration.test_confirm import CONFIRM, hashed

__all__ = ["repository"]

JSON = "--ddp-json=out/run.json"

# The editable install of setuptools: every interpreter of the environment finds the package in the
# working tree.
FINDER = """
import sys
from importlib.util import spec_from_file_location

class Finder:
    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, FILE) if name == "speed" else None

sys.meta_path.append(Finder)
"""

WORKER = """
def milliseconds():
    from speed import MILLISECONDS
    return MILLISECONDS

if __name__ == "__main__":
    print(milliseconds())
"""

# How long a step lasts, by the name of the test.
STEPS = (
    STEP
    + """
import ctypes, importlib, multiprocessing, pathlib, runpy, subprocess

HERE = pathlib.Path(speed.__file__).parent

def pooled(method):
    from speed.worker import milliseconds
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply(milliseconds)

def loaded():
    import torch
    path = str(pathlib.Path(OUT).with_name("src") / "speed/model.pt")
    return float(torch.jit.load(path).milliseconds)

def printed(command):
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)

def run_file(name):
    return runpy.run_path(str(pathlib.Path(OUT).with_name("src") / "speed" / name))["MILLISECONDS"]

def imported(*names, otherwise=None):
    for name in names:
        try:
            return importlib.import_module(name).MILLISECONDS
        except ImportError:
            pass
    return otherwise

HOW = {
    "spawn": lambda: pooled("spawn"),
    "forkserver": lambda: pooled("forkserver"),
    "command": lambda: printed([sys.executable, "-m", "speed.worker"]),
    "runpy": lambda: run_file("__init__.py"),
    "runpy same": lambda: run_file("same.py"),
    "isolated": lambda: printed([sys.executable, "-I", str(HERE / "worker.py")]),
    # Files, by an absolute path into the working tree, and what git ignores:
    "data": lambda: float(open(os.environ["SPEED_DATA"]).read()),
    "data same": lambda: float(pathlib.Path(os.environ["SPEED_DATA"]).with_name("same.txt").read_text()),
    "fixed": lambda: float((pathlib.Path(OUT).with_name("src") / "speed/data.txt").read_text()),
    "model": loaded,
    "tracked": lambda: float((HERE / "data.txt").read_text()),
    "ignored": lambda: float((HERE / "ignored.txt").read_text()),
    "exists": lambda: 5 if (HERE / "ignored.txt").exists() else 10,
    "built": lambda: imported("speed._fast", otherwise=speed.MILLISECONDS),
    # From elsewhere:
    "package": lambda: imported("slowkernels.b", "slowkernels.a", "slowkernels"),
    "outside": lambda: imported("tools"),
    "library": lambda: ctypes.CDLL(os.environ["SPEED_LIBRARY"]).milliseconds(),
    # The baseline's code, which is five times as fast where it is measured again:
    "unlike": lambda: 0.9 if "ddpperf-against" in speed.__file__ else 5,
}

# LASTS stands for the machine: it is read in a way that the plugin does not see. Rank 0 is the slowest,
# so that one rank starts children.
@pytest.mark.parametrize("how", HOWS)
def test_step(ddp_benchmark, how):
    milliseconds = lambda: HOW[how]() * float(os.environ._data.get(b"LASTS", 1))
    ddp_benchmark(lambda ctx: lasting(ctx, milliseconds() if ctx.rank == 0 else 0.1))
"""
)


@pytest.fixture
def editable(
    repository: Repository, run: Run, pytester: pytest.Pytester, tmp_path: Path
) -> Run:
    """Return a `Run` by the interpreter of an environment in which `speed` is installed to be
    edited."""
    repository.write("pytest.ini", "[pytest]\naddopts = -p no:cacheprovider\n")
    repository.write("src/speed/worker.py", WORKER)
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "shared.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in shared)
    )
    file = repository.root / "src/speed/__init__.py"
    (packages / "__editable___speed_finder.py").write_text(
        FINDER.replace("FILE", repr(str(file)))
    )
    (packages / "__editable__.speed.pth").write_text(
        "import __editable___speed_finder\n"
    )
    url = json.dumps(
        {"dir_info": {"editable": True}, "url": repository.root.as_uri()}
    )
    install(packages, "speed", {}, {"direct_url.json": url})
    command = [
        str(environment / "bin/python"),
        "-m",
        "pytest",
        "-p",
        "no:randomly",
        "-p",
        "no:benchmark",
        *SMALL,
        *FEW,
    ]

    def run_there(*args: str) -> pytest.RunResult:
        return pytester.run(*command, *args, timeout=600)

    return run_there


def install(
    folder: Path,
    name: str,
    files: Mapping[str, str],
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Add a distribution to a folder of packages, as pip does from a wheel."""
    info = f"{name}-1.0.dist-info"
    described = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        **(metadata or {}),
    }
    files = {
        **files,
        **{f"{info}/{file}": text for file, text in described.items()},
    }
    record = "".join(f"{file},{hashed(text)}\n" for file, text in files.items())
    return write(folder, {**files, f"{info}/RECORD": record})


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


def write_test(repository: Repository, *hows: str) -> None:
    """Write and commit a test of steps whose time comes by these ways."""
    repository.write("tests/test_step.py", STEPS.replace("HOWS", repr(hows)))
    repository.commit()


def write_data(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, ignored: str
) -> None:
    """Write a data file that a variable names by its absolute path, and let git ignore other
    files."""
    monkeypatch.setenv(
        "SPEED_DATA", str(repository.root / "src/speed/data.txt")
    )
    repository.write("src/speed/data.txt", "5")
    (repository.top / ".gitignore").write_text(f"__pycache__\nout\n{ignored}\n")


class Model(nn.Module):
    """A model whose result is the time that a step is to take."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.milliseconds = milliseconds

    def forward(self) -> float:
        return self.milliseconds


def write_model(repository: Repository, milliseconds: float) -> None:
    """Write a model that torch's native code reads."""
    path = repository.root / "src/speed/model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of TorchScript
        torch.jit.save(torch.jit.script(Model(milliseconds)), path)


def statuses(repository: Repository) -> list[str]:
    """Return the verdicts of the last run."""
    measured = json.loads((repository.root / "out/run.json").read_text())[
        "measurements"
    ]
    return [str(each["verdict"]["status"]) for each in measured]


def test_the_other_version_runs_its_own_code_and_files_or_has_no_baseline_and_what_is_the_same_passes(
    repository: Repository, editable: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(repository, monkeypatch, "_fast.py\nignored.txt")
    for file, text in (
        ("same.py", "MILLISECONDS = 5\n"),
        ("same.txt", "5"),
        ("ignored.txt", "5"),
    ):
        repository.write(f"src/speed/{file}", text)
    proved, unproved = (
        ("forkserver", "command", "data"),
        ("runpy", "isolated", "fixed", "model", "built"),
    )
    write_model(repository, 5.0)
    same = ("runpy same", "data same", "ignored")
    write_test(repository, *proved, *unproved, *same)
    repository.write("src/speed/__init__.py", SECOND)
    repository.write("src/speed/data.txt", "60")
    write_model(repository, 60.0)
    repository.write("src/speed/unread.cfg", "")
    # the other version lacks this file, so it takes 5
    repository.write("src/speed/_fast.py", "MILLISECONDS = 4\n")
    with repository.untouched():
        result = editable(
            "--ddp-against=HEAD", "--ddp-baseline-missing=fail", JSON
        )
    assert result.ret == 1
    expected = (
        ["REGRESSED"] * len(proved)
        + ["NO BASELINE"] * len(unproved)
        + ["PASS"] * len(same)
    )
    assert statuses(repository) == expected
    result.stdout.fnmatch_lines(
        [
            "read from the working tree, *: python code/src/speed/__init__.py",
            "*run code of the working tree: start it with *",
            "read from the working tree, *: python code/src/speed/data.txt",
            "read from the working tree, *: python code/src/speed/model.pt",
            "it lacks python code/src/speed/_fast.py, which git ignores: ddp_against_setup *",
            "no rank is known to have read what differs in python code/src/speed/unread.cfg",
        ]
    )


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_both_sides_share_is_red_and_named_if_it_changed_since_the_baseline_was_saved(
    repository: Repository,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A package that is no longer the installed one, a module, data, a library; and the code of a
    child."""
    library = tmp_path / "libspeedy.so"

    def build(milliseconds: int) -> None:
        source = f"int milliseconds(void) {{ return {milliseconds}; }}\n"
        library.unlink(missing_ok=True)
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", library, "-x", "c", "-"],
            input=source,
            text=True,
            check=True,
        )

    def lasts(milliseconds: int) -> None:
        build(milliseconds)
        for file in ("data.txt", "ignored.txt"):
            repository.write(f"src/speed/{file}", str(milliseconds))

    monkeypatch.setenv("SPEED_LIBRARY", str(library))
    write_data(repository, monkeypatch, "ignored.txt")
    packages = install(
        tmp_path / "packages",
        "slowkernels",
        {"slowkernels/a.py": "MILLISECONDS = 5\n"},
    )
    write(packages, {"tools.py": "MILLISECONDS = 5\n"})
    repository.write("src/speed/worker.py", WORKER)
    lasts(5)
    write_test(
        repository,
        "spawn",
        "tracked",
        "package",
        "outside",
        "fixed",
        "ignored",
        "library",
    )
    with monkeypatch.context() as patched:
        patched.syspath_prepend(packages)
        assert run("--ddp-save-baseline", *FEW).ret == 0
    repository.commit()

    lasts(60)
    checkout = write(
        tmp_path / "checkout",
        dict.fromkeys(("slowkernels/b.py", "tools.py"), "MILLISECONDS = 60\n"),
    )
    repository.write("src/speed/__init__.py", SECOND)
    repository.commit()
    with monkeypatch.context() as patched:
        patched.syspath_prepend(packages)
        patched.syspath_prepend(checkout)
        result = run(CONFIRM, JSON, *FEW)
    assert (result.ret, {*statuses(repository)}) == (1, {"REGRESSED"})
    printed = " ".join(result.stdout.str().split())
    for words in (
        "; changed: python code/src/speed/__init__.py ",  # the code of a child
        "; changed: python code/src/speed/__init__.py, python code/src/speed/data.txt",
        "; what else differs: tools (its files are not known)",
        "; what else differs: slowkernels 1.0 -> an unknown version",
        (
            "read from the working tree, not from the version to compare with: python"
            " code/src/speed/data.txt"
        ),
        "; what else differs: python code/src/speed/ignored.txt (changed, and in no commit)",
        "; what else differs: library libspeedy.so (changed, and in no commit)",
    ):
        assert words in printed


LIMIT = "--ddp-threshold=p50:60%"
# Twice as slow is within it, and suspicious.
WIDE = """
@pytest.mark.ddp(threshold="p50:250%")
def test_wide(ddp_benchmark):
    ddp_benchmark(lambda ctx: lasting(ctx, HOW["unlike"]() * float(os.environ._data.get(b"LASTS", 1))))
"""


def test_a_slower_machine_is_acquitted_with_the_same_ignored_files_and_by_code_that_does_what_it_did(
    repository: Repository, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository.top / ".gitignore").write_text(
        "__pycache__\nout\nignored.txt\n"
    )
    repository.write("src/speed/ignored.txt", "5")
    repository.write("src/speed/config.json", "{}")
    repository.write(
        "tests/test_step.py",
        STEPS.replace("HOWS", "['ignored', 'exists', 'unlike']"),
        WIDE,
    )
    assert run("--ddp-save-baseline", *FEW).ret == 0
    repository.commit()
    monkeypatch.setenv("LASTS", "2")
    repository.write("src/speed/config.json", "[]")
    with repository.untouched():
        result = run(CONFIRM, LIMIT, JSON, *FEW)
    assert statuses(repository) == [
        "INCONCLUSIVE",
        "INCONCLUSIVE",
        "REGRESSED",
        "PASS",
    ]
    measured = json.loads((repository.root / "out/run.json").read_text())[
        "measurements"
    ]
    assert [each["verdict"]["reason"] for each in measured[:2]] == [
        "machine-slower"
    ] * 2
    assert "confirmed" not in {each["verdict"]["reason"] for each in measured}
    result.stdout.fnmatch_lines(
        [
            "note: *not confirmed *: it now takes 0.36x its recorded time, which is more than *",
            "*: the machine is slower: *not checked: *",
            "*: these files changed, and did not make it slower: python code/src/speed/config.json",
        ]
    )
