"""The shipped suite, as those run it who have it installed."""

from __future__ import annotations

import pytest

from pytest_ddpperf import Context
from pytest_ddpperf.suite.workloads import Need
from tests.integration.conftest import Run

SUITE = (
    "--pyargs",
    "pytest_ddpperf.suite",
    "--ddp-suite-size=tiny",
    "--ddp-confirm=never",
)
ONCE = ("--ddp-steps=1", "--ddp-warmup=1", "--ddp-launches=1")


def test_the_sweep_has_the_form_of_pytorchs_benchmark(run: Run) -> None:
    result = run(*SUITE, *ONCE, "-k", "sweep and resnet50", small=False)
    assert result.parseoutcomes()["passed"] == 3
    numbers = (
        "p50:  *.???s *[0-9]/s  p75:  *.???s *[0-9]/s  p90:  *.???s *[0-9]/s  p95:  *.???s "
        "*[0-9]/s"
    )
    result.stdout.fnmatch_lines(
        [
            "PyTorch distributed benchmark suite",
            "[*] Distributed backend: gloo",
            "[*] Maximum bucket size: 25MB",
            "Benchmark: resnet50 with batch size 2",
            f"   1 CPUs --   no ddp:  {numbers}",
            f"   1 CPUs --    1M/1G:  {numbers}       100%",
            f"   2 CPUs --    1M/2G:  {numbers}  *%",
        ]
    )


def test_what_does_not_fit_is_skipped_with_its_reason(run: Run) -> None:
    asked = (
        "test_variant and (Naive or Flat) and (mini or medium) or torchs and mini or 2-1mb or"
        " gloo-2-100mb"
    )
    result = run(
        *SUITE, "-k", asked, "--ddp-steps=3", "--ddp-launches=1", small=False
    )
    counts = result.parseoutcomes()
    assert (counts["passed"], counts["skipped"]) == (4, 5)
    result.stdout.fnmatch_lines(
        [
            "| Backend | Workers | Data Size | Time (s) *|",
            "| gloo    | 2       | 1MB       | *.?????? |",
            "Data parallel training of GPT mini on 2 ranks",
            "|  * | Naive  * | Flat  * | torch's DDP |",
            "| benchmark_steps   | 3 * | 3 * | 3 * |",
            "| comm_frac_avg * | *.* | *.* | *.* |",
            (
                "skipped: test_all_reduce_by_backend[[]gloo-2-100mb[]]: 100 MB is too large for"
                " --ddp-suite-size tiny"
            ),
            "skipped: test_all_reduce_by_backend[[]gloo-cuda-2-1mb*[]]: *cuda*",
            (
                "skipped: test_variant[[]Flat-medium, Naive-medium[]]: GPT medium is too large for"
                " --ddp-suite-size tiny"
            ),
        ]
    )
    # for its device where torch was built with NCCL
    result.stdout.fnmatch_lines(["skipped: *nccl-2-1mb[]]: *"])


def test_experiments_are_shown_in_their_forms_with_the_numbers_that_are_asked(
    run: Run,
) -> None:
    asked = (
        "test_rpc and not traffic or PowerSGD or round_robin and 3 or static_graph or rpc_traffic"
        " and 4-3 or uses or bucket_latency and gpt or never_ready or FSDP2 or wire and (all_reduce"
        " or reduce_scatter)"
    )
    options = (
        "--ddp-trainers=3",
        "--ddp-parameter-servers=2",
        "--ddp-steps=1",
        "--ddp-launches=1",
    )
    result = run(*SUITE, "-k", asked, *options, small=False)
    counts = result.parseoutcomes()
    assert (counts["passed"], counts["skipped"]) == (24, 2)
    result.stdout.fnmatch_lines_random(
        [
            "------------------  PyTorch Distributed Benchmark (DDP and RPC) ---------------------",
            (
                "    Trainer2:  p50:  *.???s *[0-9]/s  p75:  *.???s *[0-9]/s  p90:  *.???s *[0-9]/s"
                "  p95:  *.???s *[0-9]/s"
            ),
            "         All:  p50:  *.???s *[0-9]/s  p75:  *.???s *",
            "| parameter server * | *s (*) | * examples/s *|",
            "| agent, 2 observers * | *s (*) | * actions/s *|",
            "| pipeline, 4 parts, bubble *% of forward (ideal 20%) | *s (*) | * examples/s *|",
            "| sparse gradients, sparse by RPC, batched * | *s (*) | * examples/s *|",
            "Fastest bucket size, gloo, 2 ranks: * MB for gpt (8 MB of gradients)",
            "*test_hybrid  *3 trainers *",
            "*test_agent_and_observers  *1 trainer *",
            "*test_pipeline[[]4[]]  *3 trainers *",
            "| RPC by rpc_sync, used 3 times | 4     | forward  | 36,864 |",
            "| RPC by to_here, used 3 times  | 4     | backward | 36,864 |",
            "| all_reduce     | 2     | 2,000,000 | 4,000,000 | * x payload |",
            "| reduce_scatter | 2     | 2,000,000 | 2,000,000 | * x payload |",
            "Gradient compression, gloo, 2 ranks (p50 of an iteration; *)",
            "  *PowerSGD:  *.??????s (*.?????? to *.??????)    +0.0%",
        ]
    )


def test_what_does_not_fit_into_memory_by_its_first_step_is_skipped(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where parameters alone may not fit, a step is tried once for each number of ranks, whatever
    the variant."""
    asked = (
        *SUITE,
        "-k",
        "(Naive or Flat) and mini",
        "--ddp-disable",
        "--ddp-world-size=1,2",
        "-v",
    )
    monkeypatch.setattr(
        "pytest_ddpperf.suite.workloads.free_memory", lambda: 0.0
    )
    # as they do fit
    assert run(*asked, small=False).parseoutcomes()["passed"] == 4
    tried = pytester.path / "tried"

    def first_step(ctx: Context, *_: object) -> Need | None:
        with tried.open("a") as file:
            file.write(f"{ctx.rank} of {ctx.world_size}\n")
        return None if ctx.rank else Need(2.0**30, ctx.world_size, 1.5 * 2**30)

    monkeypatch.setattr("pytest_ddpperf.suite.workloads.first_step", first_step)
    result = run(*asked, small=False)
    assert "test_variant[Naive-mini-ws1] PASSED" in result.stdout.str()
    reason = "needs about 1.0 GiB on each of 2 ranks, 1.5 GiB are free"
    result.stdout.fnmatch_lines(
        [f"skipped: test_variant[[]Flat-mini-ws2, Naive-mini-ws2[]]: {reason}"]
    )
    assert sorted(tried.read_text().splitlines()) == [
        "0 of 1",
        "0 of 2",
        "1 of 2",
    ]


def test_it_runs_disabled_and_rows_have_their_own_numbers_of_ranks(
    run: Run,
) -> None:
    asked = "Naive-mini or ddp_traffic and 1-SGD or gloo-2-1mb"
    result = run(
        *SUITE,
        "-k",
        asked,
        "--ddp-disable",
        "--ddp-world-size=1,2",
        "-v",
        small=False,
    )
    assert result.ret == 0
    text = result.stdout.str()
    # once, whatever the sizes
    assert "test_all_reduce_by_backend[gloo-2-1mb] PASSED" in text
    assert "test_variant[Naive-mini-ws1] PASSED" in text
    result.stdout.fnmatch_lines(["*all_reduce.bytes could not be counted*"])


def test_figures_are_drawn_and_named(
    pytester: pytest.Pytester, run: Run
) -> None:
    asked = "breakdown and gpt or sync_every and (1 or 8)"
    result = run(
        *SUITE, "-k", asked, "--ddp-suite-plots=figures", *ONCE, small=False
    )
    assert result.parseoutcomes()["passed"] == 5
    result.stdout.fnmatch_lines_random(
        [
            "  *overlapped *s *s *s *s *s",
            "  overlap [sc]* *% of a step (the paper, ResNet-50: 38 % over NCCL, 27 % over Gloo)",
            "Synchronisation every n iterations, gloo, 2 ranks (p50 *)",
            "  *every 8:  *s (* to *) *%*",
            "drawn: */figures/latency-breakdown-gpt-gloo-2-ranks.png",
        ]
    )
    assert sorted(
        path.stem for path in (pytester.path / "figures").iterdir()
    ) == [
        "latency-breakdown-gpt-gloo-2-ranks",
        "synchronisation-every-n-iterations-gloo-2-ranks",
    ]


def test_figures_that_cannot_be_are_refused_before_anything_is_measured(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pytester.path / "file").touch()
    monkeypatch.setattr(
        "pytest_ddpperf.suite.conftest.find_spec", lambda name: None
    )
    for arguments, reported in (
        (
            (*SUITE, "--ddp-suite-plots=file"),
            "*--ddp-suite-plots: '*/file': is a file: name a folder*",
        ),
        (
            (*SUITE, "--ddp-suite-plots=new"),
            "*needs matplotlib: pip install 'pytest-ddpperf[[]plots[]]'*",
        ),
        (
            (*SUITE, "--ddp-suite-plots=new", "-n2"),
            "*--ddp-suite-plots is not supported under xdist: add -n 0*",
        ),
    ):
        result = run(*arguments, small=False)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([reported])


def test_figures_that_cannot_be_written_are_red(
    pytester: pytest.Pytester, run: Run
) -> None:
    (pytester.path / "file").touch()
    result = run(
        *SUITE,
        *ONCE,
        "-k",
        "sync_every and 8",
        "--ddp-suite-plots=file/below",
        small=False,
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["--ddp-suite-plots: *Not a directory: *"])


def test_figures_of_a_suite_that_is_not_there_are_a_usage_error(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile("def test_plain(): pass")
    result = run("--ddp-suite-plots=here", small=False)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "*--ddp-suite-plots: the suite is not among the tests: --pyargs pytest_ddpperf.suite"
        ]
    )
