"""What the built package says of itself: its links lead somewhere from a package index, too."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from tests.unit.test_docs import links

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REPOSITORY = "https://example.org/them/pytest-ddpperf"
SITE = "https://docs.example.org/ddpperf"
BUILD = """\
from setuptools import build_meta
print("built:", build_meta.prepare_metadata_for_build_wheel("built"))
"""


def built(folder: Path, urls: str) -> Message:
    """Return the metadata of a package that is built with this [project.urls]."""
    (folder / "pytest_ddpperf").mkdir()
    for name in (
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "setup.py",
        "pytest_ddpperf/__init__.py",
        "pytest_ddpperf/version.py",
    ):
        shutil.copy(ROOT / name, folder / name)
    project = folder / "pyproject.toml"
    text, replaced = re.subn(
        r"^\[project\.urls\]\n.*?\n(?=\n)",
        f"[project.urls]\n{urls}",
        project.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    assert replaced == 1
    project.write_text(text, encoding="utf-8")
    (folder / "built").mkdir()
    command = [sys.executable, "-c", BUILD]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (file,) = (folder / "built").glob("*.dist-info/METADATA")
    return message_from_string(file.read_text(encoding="utf-8"))


def test_the_readme_of_the_package_leads_to_the_repository_and_the_site(
    tmp_path: Path,
) -> None:
    found = built(
        tmp_path,
        f'Repository = "{REPOSITORY}/"\nDocumentation = "{SITE}"\n',
    )
    assert found.get_all("Project-URL") == [
        f"Repository, {REPOSITORY}/",
        f"Documentation, {SITE}",
    ]
    assert found["Description-Content-Type"] == "text/markdown"
    text = str(found.get_payload())
    assert links(text) == []
    targets = re.findall(r"\]\((https:[^()\s]+)\)", text)
    assert f"{SITE}/evidence.html" in targets
    assert f"{SITE}/reading-a-failure.html#phases" in targets
    assert f"{REPOSITORY}/blob/HEAD/CONTRIBUTING.md" in targets
    assert f"{REPOSITORY}/raw/HEAD/docs/pictures/red-gate.svg" in targets
    pages = re.sub(rf"{SITE}/([\w/-]+)\.html", r"docs/\1.md", text)
    again = re.sub(f"{REPOSITORY}/(blob|raw)/HEAD/", "", pages)
    assert again.rstrip() == README.rstrip()


def test_without_a_site_the_pages_are_those_in_the_repository(
    tmp_path: Path,
) -> None:
    text = str(built(tmp_path, f'Repository = "{REPOSITORY}"\n').get_payload())
    assert links(text) == []
    assert f"]({REPOSITORY}/blob/HEAD/docs/evidence.md)" in text


def test_without_an_address_the_links_stay_as_they_are(tmp_path: Path) -> None:
    found = built(tmp_path, "")
    assert found.get_all("Project-URL") is None
    assert str(found.get_payload()).rstrip() == README.rstrip()


def test_pytest_does_not_warn_where_this_package_was_imported_before_it(
    tmp_path: Path,
) -> None:
    """As in the process of another version. `-p` does what pytest does for an installed plugin; an
    editable install lists no modules."""
    code = """
import sys, pytest, pytest_ddpperf
sys.exit(pytest.main(["-Werror", "-p", "pytest_ddpperf"]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, ended.stderr
