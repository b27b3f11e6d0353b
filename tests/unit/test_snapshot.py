"""How a run began, and what the user's own conftests added to it."""

from __future__ import annotations

import os
import sys

import pytest

from pytest_ddpperf.plugin.remote import _invocation
from pytest_ddpperf.plugin.snapshot import SNAPSHOT, own_options
from pytest_ddpperf.plugin.state import RUN
from pytest_ddpperf.wire.variables import is_secret

CORES = tuple(getattr(os, "sched_getaffinity", lambda pid: ())(0))
CONFTEST = """
import os, pathlib, sys
os.environ["SET_BY_A_CONFTEST"] = "1"
sys.path.insert(0, "/added/by/a/conftest")
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

def pytest_addoption(parser):
    parser.addoption("--hidden", type=int, default=1024)
    parser.addoption("--layer-kind", default=None)
    parser.addoption("--scales", type=float, nargs="+", default=[1.0, 2.0])
    parser.addoption("--hub-token", default="hf_123")
    parser.addoption("--max-tokens", type=int, default=64)
    parser.addoption("--out", default="/tmp/out")
    parser.addoption("--root", type=pathlib.Path, default=pathlib.Path("here"))
    parser.addoption("--essay", default="x" * 300)
    parser.addini("unrelated", "")
"""


@pytest.fixture
def config(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> pytest.Config:
    monkeypatch.delenv("SET_BY_A_CONFTEST", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    pytester.makeconftest(CONFTEST)
    try:
        config = pytester.parseconfigure(
            "-p", "no:randomly", "--hidden=2048", "-q", "--ddp-steps=5"
        )
    finally:
        if CORES:
            os.sched_setaffinity(0, CORES)
    os.environ.pop("SET_BY_A_CONFTEST")
    return config


def test_own_options_are_those_of_conftests_that_are_plain_and_no_secret(
    config: pytest.Config,
) -> None:
    config.option.loadgroup = False  # as xdist does in its workers
    assert own_options(config) == {
        "--hidden": "2048",
        "--layer-kind": "None",
        "--max-tokens": "64",
        "--scales": "[1.0, 2.0]",
    }


def test_a_run_began_before_its_conftests(config: pytest.Config) -> None:
    snapshot = config.stash[SNAPSHOT]
    invocation = _invocation(config, ())
    assert (*snapshot.cores,) == (*invocation.cores,) == CORES
    assert "SET_BY_A_CONFTEST" not in snapshot.environ
    assert "/added/by/a/conftest" not in snapshot.sys_path


REFUSED = "not supported with coverage in ranks: add --no-cov, or run pytest without coverage"


@pytest.mark.parametrize(
    "variable",
    ["COVERAGE_PROCESS_CONFIG", "COV_CORE_DATAFILE", "COVERAGE_PROCESS_START"],
)
def test_ranks_that_are_traced_are_not_compared_with_those_of_another_version(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """By pytest-cov, of which a remote pytest does not know, or by pytest under coverage, which may
    trace one side."""
    monkeypatch.setenv(variable, "")
    configured = pytester.parseconfigure("-p", "no:randomly").stash[RUN]
    assert callable(configured.role.confirms(configured))
    pytester.makeconftest(f"import os; os.environ[{variable!r}] = 'traced'")
    with pytest.raises(pytest.UsageError, match=f"--ddp-against is {REFUSED}"):
        pytester.parseconfigure("-p", "no:randomly", "--ddp-against=HEAD")
    assert configured.role.confirms(configured) == REFUSED
    monkeypatch.setenv(variable, "traced before pytest")
    with pytest.raises(pytest.UsageError, match=f"--ddp-against is {REFUSED}"):
        pytester.parseconfigure("-p", "no:randomly", "--ddp-against=HEAD")


SECRETS = (
    "hub_token token --api-key apikey db_password auth db-pass secret_access_key accesstoken"
    " --hub-tokens api-keys --credentials-json auth_header token-value"
)
PLAIN = (
    "max_tokens --max-new-tokens --tokens --eos-token-id tokenizer --fast-tokenizer passes author"
    " bypass"
)


def test_secrets_are_known_by_their_names() -> None:
    assert [
        name for name in f"{SECRETS} {PLAIN}".split() if is_secret(name)
    ] == SECRETS.split()
