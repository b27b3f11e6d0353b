"""Which variables count as read by the user's code."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pytest_ddpperf.launch.request import read_by, recorded
from pytest_ddpperf.remote.worktree import Checkout
from pytest_ddpperf.wire import variables
from tests.unit.test_machine import settings


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OURS_SET", "1")
    monkeypatch.setattr(variables, "_read", {})
    monkeypatch.setattr(variables, "_bulk", set())
    variables.watch()
    yield
    os.environ.__class__ = os._Environ


def test_only_the_first_reading_looks_at_its_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes longer, the longer the reader's code is."""
    assert os.environ.get("OURS_UNSET", "x") == "x"
    with monkeypatch.context() as patch:  # pytest reads others after the test
        patch.setattr(variables, "_reader", lambda: pytest.fail("again"))
        assert os.environ.get("OURS_UNSET", "x") == "x"


def test_compiled_code_may_read_variables() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        scale = os.environ.get("OURS_SET", "0") + os.getenv("OURS_UNSET", "0")
        return x * float(scale)

    assert step(torch.ones(())) == 10


def test_each_way_to_read_a_variable_is_noted_with_its_first_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert os.environ["OURS_SET"] == os.getenv("OURS_SET") == "1"
    assert os.environ.get("OURS_UNSET", "x") == "x"
    assert "OURS_ASKED" not in os.environ
    with pytest.raises(KeyError):
        os.environ["OURS_MISSING"]
    os.environ["OURS_SET"] = "2"
    assert os.environ.get("OURS_SET") == "2"
    assert variables.read_so_far() == {
        "OURS_SET": variables.digest("1"),
        "OURS_UNSET": "unset",
        "OURS_ASKED": "unset",
        "OURS_MISSING": "unset",
    }


def test_a_copy_of_all_variables_reads_none() -> None:
    copies = [
        dict(os.environ),
        os.environ.copy(),
        {**os.environ},
        dict(os.environ.items()),
    ]
    assert all(copy["OURS_SET"] == "1" for copy in copies)
    assert variables.read_so_far() == {}
    assert {
        name: os.environ[name]
        for name in os.environ
        if name.startswith("OURS_")
    } == {"OURS_SET": "1"}
    assert variables.read_so_far() == {"OURS_SET": variables.digest("1")}


def test_what_the_standard_library_reads_does_not_count() -> None:
    os.path.expanduser("~")
    tempfile.gettempdir()
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert variables.read_so_far() == {}


def test_what_is_recorded_or_differs_by_process_is_left_out() -> None:
    read = {
        "OURS": "unset",
        "NCCL_ALGO": "digest 1",
        "RANK": "digest 2",
        "PYTEST_CURRENT_TEST": "digest 3",
    }
    read["CI"] = "unset"
    assert read_by([read, {"OURS": "digest 4", "THEIRS": "unset"}]) == {
        "read:OURS": "unset",
        "read:THEIRS": "unset",
    }


SECRET = variables.digest("abc")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("TORCH_API_KEY", SECRET),
        ("NCCL_AUTH", SECRET),
        ("TRITON_HUB_TOKEN", SECRET),
        ("PYTORCH_PASSWORD", SECRET),
        ("--credentials", SECRET),
        ("--client-secret", SECRET),
        ("SLACK_WEBHOOK", SECRET),
        ("--max-tokens", "abc"),
        ("NCCL_ALGO", "abc"),
        ("--keyboard", "abc"),
    ],
)
def test_a_secret_is_known_by_its_name_and_shown_as_a_digest(
    name: str, shown: str
) -> None:
    assert variables.concealed(name, "abc") == shown
    assert variables.concealed(name, "") == ""


def test_the_user_of_a_url_is_a_secret() -> None:
    user = variables.digest("me:abc")
    assert (
        variables.concealed("DATA", "s3://me:abc@host/a,http://b/c@d")
        == f"s3://{user}@host/a,http://b/c@d"
    )


def test_the_secrets_of_a_command_line_are_digests() -> None:
    words = "--token abc --lr 1 --api-key=abc --password -v abc A_KEY=abc"
    shown = (
        *("--token", SECRET, "--lr", "1", f"--api-key={SECRET}"),
        *("--password", "-v", "abc", f"A_KEY={SECRET}"),
    )
    assert variables.concealed_words(words.split()) == shown


def test_secrets_within_a_word_are_digests() -> None:
    quoted = variables.digest("'a b'")
    escaped, lines = '"a\\"b"', '"a\\\nb"'
    words = [
        "--export=ALL,HF_TOKEN=abc",
        "-c",
        "N=2 HF_TOKEN=abc 'A_KEY=abc' B_KEY='a b' run",
        'N=2 C_KEY="a\\"b" D_KEY="a\\\nb" run',
    ]
    assert variables.concealed_words(words) == (
        f"--export=ALL,HF_TOKEN={SECRET}",
        "-c",
        f"N=2 HF_TOKEN={SECRET} 'A_KEY={SECRET}' B_KEY={quoted} run",
        f"N=2 C_KEY={variables.digest(escaped)} D_KEY={variables.digest(lines)} run",
    )


def test_allowed_variables_and_the_other_version_show_no_secret(
    tmp_path: Path,
) -> None:
    assert recorded({"TORCH_KEY": "abc", "NCCL_ALGO": "Ring"}) == {
        "env:TORCH_KEY": SECRET,
        "env:NCCL_ALGO": "Ring",
    }
    asked = settings(
        against_env=("MY_TOKEN=abc", "A=1"),
        against_option=("--my-password", "abc"),
    )
    checkout = Checkout(asked, tmp_path, ())
    assert "abc" not in repr(checkout.version)
    assert str(checkout.version).count(SECRET) == 2
    assert checkout.assignments == {"MY_TOKEN": "abc", "A": "1"}
