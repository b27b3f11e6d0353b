"""The command that makes a test's new figures its baseline: that of this run, for this test alone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from _pytest.config.findpaths import determine_setup

from pytest_ddpperf.led.arguments import of_other_tests, spelt_out
from pytest_ddpperf.plugin.items import invocation_path, named_tests
from pytest_ddpperf.plugin.outset import holds_secret, outset_of

# Options of a run that the command does without, beside those of a pytest that is led.
_NOT_REPEATED = ("--ddp-fail-on", "-n", "--numprocesses", "--maxprocesses", "--dist", "--tx")
_SINCE_PYTEST_9: dict[str, None] = {"override_ini": None} if pytest.version_tuple >= (9,) else {}


def command(item: pytest.Item) -> str:
    """Options of others too may say what is measured, and so may PYTEST_ADDOPTS, which another shell does not have."""
    config = item.config
    words = shlex.split(outset_of(config).environ.get("PYTEST_ADDOPTS", ""))
    words += map(str, config.invocation_params.args)
    kept = repeated(list(spelt_out(words, config.invocation_params.dir)), named_tests(config))
    kept += _place(item)
    if hasattr(config, "workerinput"):  # the ini file may ask for workers, and one process records
        kept += ["-n", "0"]
    return shlex.join(["pytest", invocation_path(config, item), *kept, "--ddp-save-baseline"])


def repeated(words: Sequence[str], tests: Collection[str]) -> list[str]:
    """Of the words of a command line that names `tests`, those that say how another test is measured, and no secret:
    reports show them."""
    names = {word.partition("=")[0] for word in words if word.startswith("--")}
    kept = of_other_tests(words, tests, _NOT_REPEATED, set(filter(holds_secret, names)))
    return [word for word in kept if not (word.startswith("-n") and word[2:])]  # -n2


def _place(item: pytest.Item) -> list[str]:
    """Options for this run's ini file and rootdir, where pytest would find others: it looks for them from the tests
    that are named."""
    config, folder = item.config, item.config.invocation_params.dir
    found = _found_alone(item)
    if found == (config.rootpath, config.inipath):
        return []
    words = []
    finds_none = found is not None and found[1] is None
    if not config.option.inifilename and not (config.inipath is None and finds_none):
        words += ["-c", os.path.relpath(config.inipath, folder) if config.inipath else os.devnull]  # an empty one
    if not config.option.rootdir:
        words += ["--rootdir", os.path.relpath(config.rootpath, folder)]
    return words


def _found_alone(item: pytest.Item) -> tuple[Path, Path | None] | None:
    """The rootdir and the ini file that pytest finds where this test alone is named; None if that cannot be told."""
    config = item.config
    try:
        rootdir, inipath, *_ = determine_setup(
            inifile=str(config.inipath) if config.option.inifilename else None,
            args=[str(item.path)],
            rootdir_cmd_arg=str(config.rootpath) if config.option.rootdir else None,
            invocation_dir=config.invocation_params.dir,
            **_SINCE_PYTEST_9,
        )
    except (Exception, pytest.fail.Exception):  # an ini file that nobody read by now is broken, or pytest has changed
        return None
    return rootdir, inipath
