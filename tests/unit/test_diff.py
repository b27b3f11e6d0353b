"""`ddpperf diff` on two reports of ours: the plugin's verdicts and words, and how the command
ends."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf.baseline import Store
from pytest_ddpperf.cli.main import main
from pytest_ddpperf.options import parse
from pytest_ddpperf.plugin.outcomes import Took, build_outcome
from pytest_ddpperf.records.guard import Kind, Loosened
from pytest_ddpperf.records.outcome import Outcome, RunInfo
from pytest_ddpperf.records.plan import Plan
from pytest_ddpperf.records.samples import (
    Environment,
    LaunchCost,
    Measurement,
    Samples,
    Status,
    TestId,
    Verdict,
)
from pytest_ddpperf.report import json_report
from tests.unit.test_benchmark import carried_out
from tests.unit.test_launches import LAUNCH
from tests.unit.test_reading import written
from tests.unit.test_report import FAILED

BASE = RunInfo(
    id="base",
    created="2026-01-02T03:04:05+00:00",
    version="0.1",
    commit="c0ffee" * 7,
    facts={"torch": "2.12.0"},
)
NOW = replace(
    BASE,
    id="now",
    created="2026-02-02T03:04:05+00:00",
    commit="decade" * 7 + "-dirty",
)
SAVED = Verdict(status=Status.NOT_GATED, reason="saving")
LIMITS = parse.limits("p10:10%,p50:10%")


def measured(
    level: float,
    *,
    launches: int = 5,
    spread: float = 0.002,
    seed: int = 0,
    **facts: Any,
) -> Measurement:
    """Launches whose levels are spread about one, of thirty steps by two ranks."""
    source = random.Random(seed)
    steps = []
    for _ in range(launches):
        own = level * (1 + source.gauss(0, spread))
        steps.append(
            tuple(own * (1 + abs(source.gauss(0, 0.01))) for _ in range(30))
        )
    ranks = tuple((launch, launch) for launch in steps)
    environment = {
        "must_match": {"batch_size": 32},
        "recorded": {"host": "a", "torch": "2.12.0"},
        **facts,
    }
    return Measurement(
        samples=Samples(
            step_seconds=tuple(steps), rank_seconds=ranks, cpu_seconds=ranks
        ),
        environment=Environment(
            key={"backend": "gloo", "world_size": 2}, **environment
        ),
    )


def outcome(
    seconds: float,
    name: str = "test_step",
    *,
    judged: Verdict = SAVED,
    label: str = "",
    **kwargs: Any,
) -> Outcome:
    how = {
        key: kwargs.pop(key)
        for key in ("launches", "spread", "seed", "must_match", "recorded")
        if key in kwargs
    }
    measurement = measured(seconds, **how)
    return Outcome(
        **{
            "nodeid": f"tests/test_a.py::{name}",
            "test": TestId(module="tests/test_a", name=name, label=label),
            "plan": Plan(
                world_size=2, backend="gloo", device="cpu", warmup=5, steps=30
            ),
            "launches": 5,
            "batch_size": 32,
            "verdict": judged,
            "fails": False,
            "measurement": measurement,
            "costs": (LaunchCost(),) * measurement.samples.launches,
            "limits": LIMITS,
            "level": 0.05,
            **kwargs,
        }
    )


def diff(
    folder: Path, base: Sequence[Outcome], now: Sequence[Outcome], *options: str
) -> int:
    paths = (
        written(folder / "base.json", *base, run=BASE),
        written(folder / "now.json", *now, run=NOW),
    )
    return main(["diff", *map(str, paths), *options])


def reread(path: Path, form: str = "markdown") -> str:
    """Return what another command writes of the JSON of a comparison."""
    out = path.parent / "again"
    assert main([form, str(path), "-o", str(out)]) == 0
    return out.read_text()


# --- verdicts


@pytest.mark.parametrize(
    ("now", "options", "status", "word"),
    [
        (0.1, "", 0, "PASS"),
        (0.12, "", 1, "REGRESSED"),
        (0.08, "", 0, "IMPROVED"),
        (0.08, "--fail-on=regressed", 0, "IMPROVED"),
        (0.08, "--fail-on=no-baseline,improved", 1, "IMPROVED"),
        (0.12, "--fail-on=no-baseline", 0, "REGRESSED"),
    ],
)
def test_the_exit_status_is_that_of_the_verdicts(
    now: float,
    options: str,
    status: int,
    word: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # the node id does not matter
    same = outcome(now, seed=1, nodeid="a/tests/test_a.py::test_step[ws2]")
    assert diff(tmp_path, [outcome(0.1)], [same], *options.split()) == status
    reported = capsys.readouterr().out.splitlines()
    (row,) = [
        line
        for line in reported
        if line.startswith("a/tests/test_a.py::test_step[ws2]  ")
    ]
    assert row.endswith(word)
    assert reported[-1].endswith(" (1 of 1 compared)")


def test_what_weakens_a_gate_is_about_a_run_and_not_about_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "--fail-on=loosened"
    assert diff(tmp_path, [outcome(0.1)], [outcome(0.1)], asked) == 4
    assert "'loosened': not one of regressed, " in capsys.readouterr().err


def test_each_verdict_that_fails_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = [outcome(0.1, spread=0.5, seed=seed) for seed in (1, 2)]
    assert diff(tmp_path, *([each] for each in noisy)) == 0
    why = "the smallest change it can detect is"
    assert why in " ".join(capsys.readouterr().out.split())
    asked = "--fail-on=inconclusive"
    assert diff(tmp_path, *([each] for each in noisy), asked) == 1
    assert why in " ".join(capsys.readouterr().out.split())


def test_what_the_guard_found_in_a_run_is_not_in_its_comparison_with_another(
    tmp_path: Path,
) -> None:
    found = Loosened(kind=Kind.FILE, since="main", name="conftest.py")
    now = replace(NOW, guard=(found,), too_weak="1 test is not compared")
    paths = (
        written(tmp_path / "base.json", outcome(0.1), run=BASE),
        written(tmp_path / "now.json", outcome(0.1), run=now),
    )
    assert "guard: " in reread(paths[1])
    compared = tmp_path / "compared.json"
    assert main(["diff", *map(str, paths), "--json", str(compared)]) == 0
    assert "guard: " not in reread(compared)


def test_what_is_slower_has_its_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diff(tmp_path, [outcome(0.1, spread=0)], [outcome(0.15, spread=0)])
    reported = capsys.readouterr().out.splitlines()
    assert reported[:3] == [
        f"base: {tmp_path}/base.json: 2026-01-02T03:04:05+00:00, commit c0ffeec, torch 2.12.0",
        (
            f"now:  {tmp_path}/now.json: 2026-02-02T03:04:05+00:00, commit decaded with uncommitted"
            " changes, torch 2.12.0"
        ),
        "",
    ]
    assert (
        " ".join(reported[3].split())
        == "ranks p50: before -> now change [range] verdict"
    )
    at = reported.index("tests/test_a.py::test_step:")
    assert reported[at + 1].startswith(
        "  REGRESSED: step time p50 101 -> 151 ms, +50 % ["
    )
    assert (
        reported[at + 2]
        == "  why: every rank computes longer: CPU time +50.4 ms (the step: +50.4 ms)"
    )
    assert (
        "  measured: 5 launches now, 5 in the baseline (2026-01-02, c0ffeec)"
        in reported
    )


def test_a_limit_of_the_command_line_holds_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [outcome(0.12, seed=1, limits=parse.limits("p50:5%"))]
    assert diff(tmp_path, [outcome(0.1)], now, "--threshold", "p50:30%") == 0
    reported = capsys.readouterr().out
    assert "p10" not in reported
    assert diff(tmp_path, [outcome(0.1)], now) == 1
    assert "(limit 5 %)" in capsys.readouterr().out
    assert (
        diff(tmp_path, [outcome(0.1)], now, "--threshold", "p99:5%,p50:30%")
        == 0
    )
    assert (
        "test_step: no limit is applied to p99:5%: needs at least 299 timed steps in all"
        in capsys.readouterr().out
    )
    misspelt = ("--threshold", "p50:30%,tsp:5%")
    assert diff(tmp_path, [outcome(0.1)], now, *misspelt) == 0
    assert (
        "there is a limit on tsp, and no test has such a figure: check the name\n"
        in capsys.readouterr().out
    )
    assert diff(tmp_path, [outcome(0.1)], now, "--threshold", "p99:5%") == 5
    assert (
        "test_step: its limits need more --ddp-steps or --ddp-launches"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("scale", [1.0, 1.04, 1.3, 0.7])
def test_the_verdict_is_the_plugins(scale: float, tmp_path: Path) -> None:
    """A comparison of the reports of two runs has the verdict that the gate of the second run had,
    which compared with the stored session of the first."""
    source = random.Random(7)

    def launch(level: float) -> Any:
        own = level * (1 + source.gauss(0, 0.004))
        steps = tuple(own * (1 + abs(source.gauss(0, 0.01))) for _ in range(30))
        ranks = tuple(steps for _ in LAUNCH.rank_seconds)
        return replace(
            LAUNCH,
            step_seconds=steps,
            rank_seconds=ranks,
            cpu_seconds=ranks,
            blocked_seconds=None,
        )

    store = Store(tmp_path / "baselines")
    saved = carried_out(
        lambda plan: launch(0.1), store, limits=LIMITS, save_baseline=True
    )
    store.write(saved.candidate)
    gated = carried_out(lambda plan: launch(0.1 * scale), store, limits=LIMITS)
    assert gated.verdict.status.compared
    path = tmp_path / "diff.json"
    before, after = (
        build_outcome(each, tmp_path, "", Took(12.3, 0.0))
        for each in (saved, gated)
    )
    diff(tmp_path, [before], [after], "--json", str(path))
    (again,) = json_report.read([path]).outcomes
    assert again.verdict is not None
    assert (again.verdict.status, again.verdict.reason) == (
        gated.verdict.status,
        gated.verdict.reason,
    )
    pairs = zip(
        again.verdict.comparisons, gated.verdict.comparisons, strict=True
    )
    for ours, theirs in pairs:
        assert ours.change.estimate == pytest.approx(
            theirs.change.estimate, abs=1e-6
        )
        assert (ours.status, ours.limit) == (theirs.status, theirs.limit)


@pytest.mark.parametrize("is_base", [False, True])
def test_a_run_that_says_little_of_steady_training_is_within_no_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_base: bool
) -> None:
    sides = [outcome(0.1, unfit=True), outcome(0.1, seed=1)]
    if not is_base:
        sides.reverse()
    assert diff(tmp_path, sides[:1], sides[1:]) == 0
    out = capsys.readouterr().out
    assert (
        "in one of the two runs, most launches say little of steady training"
        in out
    )
    assert "1 inconclusive (1 of 1 compared)" in out


def test_a_report_and_its_copy_do_not_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All launches count on both sides, also those that a suspicion asked for."""
    parts = (
        measured(0.1, spread=0.0005).samples,
        measured(0.12, seed=2, spread=0.0005).samples,
    )
    joined = Samples(
        step_seconds=parts[0].step_seconds + parts[1].step_seconds,
        rank_seconds=parts[0].rank_seconds + parts[1].rank_seconds,
    )
    now = outcome(0.1, costs=(LaunchCost(),) * 10)
    assert now.measurement is not None
    now = replace(now, measurement=replace(now.measurement, samples=joined))
    assert diff(tmp_path, [now], [now]) == 0
    assert re.search(
        r"test_step  2 gloo +(\S+) -> \1 ms  \+0\.0 % .* PASS\n",
        capsys.readouterr().out,
    )


def test_counters_are_compared_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_bytes(count: int) -> Outcome:
        of = outcome(
            0.1,
            plan=Plan(
                world_size=2, backend="gloo", device="cpu", parameter_servers=1
            ),
        )
        assert of.measurement is not None
        return replace(
            of,
            measurement=replace(of.measurement, counters={"rpc.bytes": count}),
        )

    assert diff(tmp_path, [with_bytes(1000)], [with_bytes(1100)]) == 1
    reported = capsys.readouterr().out
    assert "REGRESSED: rpc.bytes 1,000 -> 1,100, +10 % (limit 0 %)" in reported


def test_what_is_faster_has_its_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_buckets(seconds: float, buckets: int) -> Outcome:
        made = outcome(seconds)
        return replace(
            made,
            measurement=replace(made.measured, counters={"buckets": buckets}),
        )

    assert diff(tmp_path, [with_buckets(0.2, 10)], [with_buckets(0.1, 1)]) == 0
    assert (
        "\ntests/test_a.py::test_step: buckets 10 -> 1\n"
        in capsys.readouterr().out
    )


def test_lines_fit_into_the_terminal(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "test_step_of_a_model[with-many-parameters]"
    assert diff(tmp_path, [outcome(0.1, name)], [outcome(0.15, name)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines)
    assert [line for line in lines if line.endswith("  REGRESSED")]


def test_a_terminal_without_columns_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    assert diff(tmp_path, [outcome(0.1)], [outcome(0.15)]) == 1


# --- names


def test_names_on_one_side_only_are_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [outcome(0.1, "a"), outcome(0.1, "gone")]
    assert diff(tmp_path, base, [outcome(0.1, "a"), outcome(0.1, "new")]) == 0
    reported = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("tests/test_a.py::new ")
        and line.endswith("  NO BASELINE")
        for line in reported
    )
    assert "tests/test_a.py::gone (2 gloo): only in the base" in reported
    assert "new: only in the later run" in reported
    assert (
        reported[-1]
        == "compared with the base: 1 passed, 1 without baseline, 1 only in the base (1 of 2"
        " compared)"
    )


@pytest.mark.parametrize(
    "other",
    [
        outcome(0.1, label="forward"),
        outcome(0.1, "test_other"),
        outcome(0.1, test=TestId(module="tests/test_b", name="test_step")),
        outcome(0.1, plan=Plan(world_size=4, backend="gloo", device="cpu")),
        outcome(
            0.1,
            plan=Plan(
                world_size=2, backend="gloo", device="cpu", parameter_servers=1
            ),
        ),
    ],
    ids=["label", "name", "module", "ranks", "roles"],
)
def test_nothing_in_common_ends_with_5(
    other: Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(tmp_path, [outcome(0.1)], [other]) == 5
    said = capsys.readouterr()
    assert (
        said.out.splitlines()[-1]
        == "1 without baseline, 1 only in the base (0 of 1 compared)"
    )
    assert said.err == "ddpperf: nothing was compared\n"


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("BF16", ["step_bf16"]),
        ("test_*::step_fp", ["step_fp32"]),
        ("forward", ["other_step"]),
    ],
)
def test_k_chooses_by_a_part_of_the_name_or_a_glob(
    pattern: str,
    chosen: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = [
        outcome(0.1, "step_bf16"),
        outcome(0.1, "step_fp32"),
        outcome(0.1, "other_step", label="forward"),
    ]
    assert diff(tmp_path, both, both, "-k", pattern) == 0
    reported = capsys.readouterr().out
    assert [
        name
        for name in ("step_bf16", "step_fp32", "other_step")
        if f"::{name} " in reported
    ] == chosen


# --- what cannot be compared


def slow(**kwargs: Any) -> Outcome:
    return outcome(0.2, **kwargs)


@pytest.mark.parametrize(
    ("base", "now", "reported"),
    [
        (
            outcome(0.1),
            slow(must_match={"batch_size": 16}),
            "batch_size 32 -> 16\n",
        ),
        (
            outcome(0.1),
            replace(
                slow(),
                measurement=replace(
                    measured(0.2),
                    environment=Environment(key={"backend": "nccl"}),
                ),
            ),
            "backend gloo -> nccl, world_size 2 -> unset\n",
        ),
        (
            outcome(0.1, launches=1),
            slow(),
            "the baseline is too small: 1 launch, and a comparison needs 2 a side",
        ),
        (
            outcome(0.1),
            slow(judged=Verdict(status=Status.NOT_GATED, reason="gate-off")),
            "gate=False\n",
        ),
        (
            outcome(
                0.1,
                judged=Verdict(
                    status=Status.NOT_GATED, reason="debugging-variable"
                ),
            ),
            slow(),
            "a debugging variable",
        ),
        (
            outcome(0.1),
            slow(judged=Verdict(status=Status.NOT_GATED, reason="disabled")),
            "--ddp-disable\n",
        ),
        (
            outcome(0.1),
            slow(launches=1),
            "its limits need more --ddp-steps or --ddp-launches\n",
        ),
        (
            replace(FAILED, test=outcome(0.1).test),
            slow(),
            "not measured in the earlier run: launch 1 of 2: rank 1",
        ),
    ],
)
def test_what_cannot_be_compared_says_why(
    base: Outcome,
    now: Outcome,
    reported: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert diff(tmp_path, [base], [now]) == 5
    assert f"\ntest_step: {reported}" in capsys.readouterr().out


@pytest.mark.parametrize("is_expected", [False, True])
def test_a_measurement_that_failed_now_fails_unless_that_was_expected(
    is_expected: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = ("expected to fail",) if is_expected else ()
    failed = replace(
        FAILED, test=outcome(0.1).test, fails=not is_expected, notes=notes
    )
    path = tmp_path / "diff.json"
    base, now = [outcome(0.1, "a"), outcome(0.1)], [outcome(0.1, "a"), failed]
    assert diff(tmp_path, base, now, "--json", str(path)) == (not is_expected)
    reported = capsys.readouterr().out
    assert "launch 1 of 2: rank 1 failed in setup" in reported
    assert ("\ntest_step: expected to fail\n" in reported) == is_expected
    again = json_report.read([path]).outcomes[1]
    assert (again.fails, again.notes) == (not is_expected, notes)


def test_what_differs_and_what_was_assumed_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"host": "b", "torch": "2.13.0"}
    now = [
        outcome(0.1, "a", recorded=other),
        outcome(0.1, "b", recorded=other),
        outcome(0.1, "c"),
    ]
    path = tmp_path / "diff.json"
    diff(
        tmp_path,
        [outcome(0.1, name) for name in "abc"],
        now,
        "--json",
        str(path),
    )
    for reported in (capsys.readouterr().out, reread(path)):
        for words in (
            (
                "differs from the base's environment (2 of 3 measurements): host a -> b, torch"
                " 2.12.0 -> 2.13.0"
            ),
            "two runs drift apart by an assumed ",
            " %: pytest --ddp-against measures both sides in one run",
        ):
            assert reported.count(words) == 1
        # advice for stored baselines
        assert "--ddp-extend-baseline" not in reported


# --- files


def test_all_reports_of_a_comparison_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="pages are drawn by matplotlib")
    run = replace(
        BASE, skipped=4, other_failures=4, messages=("not in this clone",)
    )
    base = written(
        tmp_path / "base.json", outcome(0.1), outcome(0.1, "gone"), run=run
    )
    run = replace(
        NOW,
        skipped=1,
        never_measured=2,
        other_failures=3,
        problem="nothing differs",
        messages=("of now",),
    )
    now = [
        written(tmp_path / f"{name}.json", outcome(0.2, name), run=run)
        for name in ("test_step", "b")
    ]
    assert main(["diff", str(base), str(base), "--json", str(tmp_path)]) == 4
    assert (
        f"{tmp_path}: cannot be written: Is a directory\n"
        in capsys.readouterr().err
    )
    report = tmp_path / "new" / "diff.json"
    assert (
        main(
            [
                "diff",
                str(base),
                *map(str, now),
                "--fail-on",
                "no-baseline",
                "--json",
                str(report),
            ]
        )
        == 1
    )
    said = capsys.readouterr().out
    line = (
        "compared with the base: 1 regressed, 1 without baseline, 1 only in the base (1 of 2"
        " compared)"
    )
    # nothing that the runs say about themselves
    assert said.splitlines()[-1] == line
    counts = json.loads(report.read_text())["summary"]
    assert [
        counts[name] for name in ("other_failures", "skipped", "never_measured")
    ] == [0, 0, 0]
    reported = reread(report)
    for words in (
        "| **NO BASELINE** `there is nothing to compare with` | `tests/test_a.py::b on 2 gloo` |",
        "| REGRESSED `p50 +100 % (limit 10 %): every rank",
        "- `base: 2026-01-02T03:04:05+00:00, commit c0ffeec",
    ):
        assert words in reported
    assert f"## {line}\n" in reported
    assert (
        "| only in the base | `tests/test_a.py::gone on 2 gloo` | |\n"
        in reported
    )
    page = reread(report, "html")
    assert f"<h1>{line}</h1>" in page
    row = (
        '<b class="badge">only in the base</b></td><th scope="row">tests/test_a.py::gone</th><td>2'
        " gloo</td>"
    )
    assert row in page
    assert "<li>base: 2026-01-02T03:04:05+00:00, commit c0ffeec" in page
    for words in ("nothing differs", "of now", "not in this clone"):
        assert words not in said + reported + page


# --- the rest


HOSTILE = (
    "test_\x1b[31m<script>alert(1)</script>\"'\r\n\x1b]0;title\x07\u202e\r\n\ud800"
    + "x" * 10_000
)
