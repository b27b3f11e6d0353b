"""How a test is named in baselines, whatever rootdir and environment it is collected in."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pytest_ddpperf.plugin.item_settings import settings_of
from pytest_ddpperf.plugin.items import (
    accept_command,
    module_of,
    moved_rootdir,
    name_of,
    nodeid_of,
)

TEST = "def test_step(ddp_benchmark): ..."


def collected(pytester: pytest.Pytester, *arguments: str) -> pytest.Item:
    (item,), _ = pytester.inline_genitems("-p", "no:randomly", *arguments)
    return item


def write(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(TEST if file.stem.startswith("test") else "")


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
@pytest.mark.parametrize(
    "project",
    ["", "project"],
    ids=["in an environment below rootdir", "in one elsewhere"],
)
@pytest.mark.parametrize(
    "packages",
    [".venv/lib/python3.11/site-packages", "lib/python3/dist-packages"],
)
def test_what_is_installed_has_its_import_name(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    packages: str,
    project: str,
    mode: str,
) -> None:
    installed = pytester.path / packages
    write(
        installed / "shipped/__init__.py",
        installed / "shipped/test_shipped.py",
        pytester.path / project / "tox.ini",
    )
    monkeypatch.syspath_prepend(installed)
    monkeypatch.chdir(pytester.path / project)
    item = collected(
        pytester, "--pyargs", "shipped", "--rootdir=.", f"--import-mode={mode}"
    )
    assert module_of(item.config, item) == "shipped.test_shipped"


def test_the_marker_of_a_class_wins_over_those_of_its_bases(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile("""
        import pytest
        @pytest.mark.ddp(threshold="p50:50%", launches=7)
        class Steps:
            def test_step(self, ddp_benchmark): ...
        @pytest.mark.ddp(threshold="p50:5%", world_size=4)
        class TestLarge(Steps): ...
    """)
    settings = settings_of(collected(pytester))
    assert [str(limit) for limit in settings.limits] == ["p50:5%"]
    assert (settings.world_sizes, settings.launches) == ((4,), 7)


def test_a_test_is_named_as_it_was_collected_whatever_a_conftest_makes_of_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest("""
        def pytest_collection_modifyitems(items):
            for item in items:
                item.name = f"{item.name}@cpu"
    """)
    pytester.makepyfile(
        test_a=(
            "import pytest\n@pytest.mark.parametrize('size', ['a'])\ndef test_b(ddp_run, size): ..."
        )
    )
    (_, item), _ = pytester.inline_genitems(
        "-p", "no:randomly", "--ddp-world-size=1,2"
    )
    assert (item.name.endswith("@cpu"), nodeid_of(item)) == (
        True,
        "test_a.py::test_b[a-ws2]",
    )
    assert name_of(item) == "test_b[a]"
    command = accept_command(item, settings_of(item))
    assert (
        command
        == "pytest 'test_a.py::test_b[a-ws2]' --ddp-world-size=1,2 --ddp-save-baseline"
    )


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ([], ""),
        (["--ddp-steps=50", "--ddp-json=a.json", "-x", "-v"], ""),
        (
            ["--ddp-backend", "gloo", "--ddp-warmup=9", "--ddp-steps=50"],
            " --ddp-backend=gloo --ddp-warmup=9",
        ),
        (
            ["--ddp-baseline-dir", "my baselines"],
            " '--ddp-baseline-dir=my baselines'",
        ),
        # else each later run would be measured less than its baseline
        (
            ["--ddp-launches=3", "--ddp-threshold=p50:20%, mean:1ms"],
            " --ddp-launches=3 '--ddp-threshold=p50:20%, mean:1ms'",
        ),
        (
            ["--ddp-launches=30", "--ddp-max-launches=40"],
            " --ddp-launches=30 --ddp-max-launches=40",
        ),
        # a baseline needs two
        (["--ddp-launches=1"], ""),
        (["-o", "ddp_warmup=9"], " -o ddp_warmup=9"),
    ],
)
def test_the_command_that_accepts_has_the_options_that_choose_the_baseline(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[str],
    kept: str,
) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    write(pytester.path / "perf/test_step.py")
    item = collected(pytester, "perf", *asked)
    settings = settings_of(item)
    assert (
        accept_command(item, settings)
        == f"pytest perf/test_step.py::test_step{kept} --ddp-save-baseline"
    )
    item.config.workerinput = {}  # type: ignore[attr-defined]
    assert accept_command(item, settings).endswith(
        f"{kept} -n 0 --ddp-save-baseline"
    )


@pytest.mark.parametrize(
    ("files", "asked", "more"),
    [
        (["pytest.ini"], ["a", "b"], ""),
        ([], ["a", "b"], ""),
        (["my.ini"], ["a", "-c", "my.ini"], " -c my.ini --rootdir ."),
        ([], ["a", "--rootdir=."], " -c /dev/null --rootdir ."),
    ],
)
def test_the_command_that_accepts_has_the_runs_rootdir_and_ini_file(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    asked: list[str],
    more: str,
) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    write(pytester.path / "a/test_a.py", pytester.path / "b/test_b.py")
    for file in files:
        (pytester.path / file).write_text(
            "[pytest]\n" if file.endswith(".ini") else ""
        )
    items, _ = pytester.inline_genitems("-p", "no:randomly", *asked)
    command = accept_command(items[0], settings_of(items[0]))
    assert command == f"pytest a/test_a.py::test_step{more} --ddp-save-baseline"
    alone = pytester.parseconfig("-p", "no:randomly", *shlex.split(command)[1:])
    assert alone.rootpath == items[0].config.rootpath
    assert alone.inipath == items[0].config.inipath or "/dev/null" in command


@pytest.mark.parametrize(
    ("asked", "moved"),
    [
        (["--ddp-baseline-dir", "../base"], True),
        (["tests", "--ddp-steps=5", "--ddp-baseline-dir", "../base"], True),
        (["--ddp-json", "../run.json"], True),
        (["--ddp-baseline-dir=../base"], False),
        (["--ddp-baseline-dir", "../new"], False),
        (["--rootdir=..", "--ddp-baseline-dir", "../base"], False),
        (["-c", "my.ini", "--ddp-baseline-dir", "../base"], False),
        (["--ddp-disable", "../tests"], False),
    ],
)
def test_an_option_whose_value_moves_the_rootdir_is_named_with_what_to_write(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[str],
    moved: bool,
) -> None:
    write(
        *(
            pytester.path / file
            for file in (
                "project/tests/test_a.py",
                "tests/test_b.py",
                "base/x",
                "run.json",
            )
        )
    )
    (pytester.path / "project/my.ini").write_text("[pytest]\n")
    monkeypatch.chdir(pytester.path / "project")
    config = pytester.parseconfig("-p", "no:randomly", *asked)
    expected = ""
    if moved:
        option, value = asked[-2:]
        expected = (
            f"pytest takes {value} for a path of tests, and its rootdir is {pytester.path}: write"
            f" {option}={value}, or set it in an ini file"
        )
    assert moved_rootdir(config) == expected


def test_the_command_that_accepts_is_not_for_the_workers_that_the_ini_file_asks_for(
    pytester: pytest.Pytester,
) -> None:
    write(pytester.path / "test_step.py")
    pytester.makeini("[pytest]\naddopts = -n 2")
    item = collected(pytester, "-n", "0")
    assert (
        accept_command(item, settings_of(item))
        == "pytest test_step.py::test_step -n 0 --ddp-save-baseline"
    )


def test_the_command_that_accepts_a_test_outside_rootdir_names_that(
    pytester: pytest.Pytester, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """pytest would look for a rootdir where the test is: the suite may be anywhere."""
    folder = tmp_path_factory.mktemp("site-packages")
    write(folder / "test_step.py")
    pytester.makeini(f"[pytest]\ntestpaths = {folder}")
    items, _ = pytester.inline_genitems("-p", "no:randomly")
    command = accept_command(items[0], settings_of(items[0]))
    assert " -c tox.ini --rootdir . " in command
    alone = pytester.parseconfig("-p", "no:randomly", *shlex.split(command)[1:])
    assert alone.rootpath == items[0].config.rootpath
