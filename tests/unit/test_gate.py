"""What a test's report shows of its launches."""

from __future__ import annotations

import pytest

from pytest_ddpperf.plugin.gate import once, repeated


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ([], ""),
        (["", ""], ""),
        (["a\n"], "a\n"),
        (["a\n", "b\n"], "a\nb\n"),
        (["a\n", "", "b\n", "a\n"], "a\n(the same in 2 launches)\nb\n"),
        (["a"] * 10, "a\n(the same in 10 launches)\n"),
    ],
)
def test_what_launches_wrote_the_same_is_shown_once(texts: list[str], told: str) -> None:
    assert once(texts) == told


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["perf", "--hidden", "64", "--ddp-world-size=2"], ["--hidden", "64", "--ddp-world-size=2"]),
        (["perf", "-x", "--ddp-json", "a.json", "--junitxml=b.xml", "-c", "my.ini"], ["-c", "my.ini"]),
        (["perf", "-n", "2", "-n2", "-nauto", "--dist=load", "-v"], ["-v"]),
        (["perf", "--ddp-fail-on", "improved", "--ddp-extend-baseline"], []),
        (["perf", "--slack-token", "xoxb", "--rp-api-key=1", "--PASSWORD=2", "-q"], ["-q"]),
    ],
)
def test_what_says_how_a_test_is_measured_is_repeated_and_no_secret(words: list[str], kept: list[str]) -> None:
    assert repeated(words, ["perf"]) == kept
