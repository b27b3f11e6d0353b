"""Whose code a session measured, by installed distributions that hold nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_ddpperf.compare.packages import distributions
from pytest_ddpperf.records.samples import Distribution
from tests.unit.test_launches import LAUNCH


def imported(*modules: str) -> dict[str, Distribution]:
    """The distributions of a launch that imported these modules."""
    return distributions((replace(LAUNCH, others=modules),))


def install(
    site: Path, name: str, version: str, record: str | None, top_level: str = ""
) -> None:
    """As an installer leaves a distribution: what it says of itself."""
    folder = site / f"{name.lower()}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    if record is not None:
        (folder / "RECORD").write_text(record)
    if top_level:
        (folder / "top_level.txt").write_text(top_level)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


RECORD = """fastnet/__init__.py,sha256=abc,10
fastnet/kernels.cpython-311-x86_64-linux-gnu.so,sha256=def,100
"""


def test_all_distributions_of_a_namespace_are_listed(site: Path) -> None:
    for name in ("one", "two"):
        install(
            site,
            name,
            "1",
            f"shared_by_us/{name}/__init__.py,sha256={name},10\n",
        )
    assert sorted(imported("shared_by_us")) == ["one", "two"]


@pytest.mark.parametrize(
    ("record", "same"),
    [
        ("".join(reversed(RECORD.splitlines(keepends=True))), True),
        (RECORD.replace("\n", "\r\n"), True),
        (RECORD + "fastnet/__pycache__/__init__.cpython-311.pyc,,\n", True),
        (
            RECORD
            + "../../../bin/fastnet,sha256=of-the-path-of-an-interpreter,200\n",
            True,
        ),
        (
            RECORD
            + "fast_net-1.dist-info/INSTALLER,sha256=uv,2\nfast_net-1.dist-info/RECORD,,\n",
            True,
        ),
        (RECORD.replace("def", "fed"), False),
        (RECORD + "fastnet/more.py,sha256=abc,10\n", False),
    ],
    ids=[
        "order",
        "line ends",
        "compiled",
        "script",
        "installer",
        "another kernel",
        "another file",
    ],
)
def test_a_digest_is_of_what_a_distribution_brought_whoever_installed_it(
    tmp_path: Path, record: str, same: bool
) -> None:
    found = []
    for number, text in enumerate((RECORD, record)):
        site = tmp_path / str(number)
        install(site, "fastnet", "1", text)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(site))
            found.append(imported("fastnet")["fastnet"].digest)
    assert (found[0] == found[1]) is same
    assert len(found[0]) == 16


def test_what_a_broken_installation_left_is_no_distribution(site: Path) -> None:
    install(site, "left", "1", "left/__init__.py,sha256=abc,10\n")
    (site / "left-1.dist-info" / "METADATA").unlink()
    assert imported("left") == {}


def test_a_module_of_no_distribution_or_of_an_edited_one_has_no_digest(
    site: Path,
) -> None:
    install(site, "edited", "1", "edited.py,sha256=abc,10\n")
    (site / "edited-1.dist-info" / "direct_url.json").write_text(
        '{"dir_info":{"editable":true}}'
    )
    install(
        site,
        "led_to",
        "1",
        "__editable__.led_to.pth,sha256=abc,10\n",
        top_level="led_to\n",
    )
    unknown = Distribution(version="", digest="")
    assert imported("edited", "led_to", "json") == dict.fromkeys(
        ("edited", "led_to", "json"), unknown
    )
    assert (
        imported(
            "_sysconfigdata__linux", "sitecustomize", "__editable___x_finder"
        )
        == {}
    )
