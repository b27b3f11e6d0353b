"""`rpc_benchmark` in whole pytest runs."""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import STEP, Run, last_line

ROLES = (
    STEP
    + """
import torch
import torch.distributed.rpc as rpc

table = {}

def look_up(row):
    return table["rows"][row]

def parameter_server(ctx):
    table["rows"] = torch.arange(10.0)

def trainer(ctx):
    from pytest_ddpperf.rank import rpc_meter
    clock = OwnClock(rpc_meter)
    def answered(future):
        clock.go_on()
        return future.value()
    def step():
        for server in ctx.workers["parameter_server"]:
            assert rpc.rpc_async(server, look_up, (ctx.rank,)).then(answered).wait() == ctx.rank
        return 3
    return step
"""
)


def test_what_takes_longer_and_what_sends_more_is_red(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        test_roles=ROLES
        + """
def test_look_up(rpc_benchmark):
    result = rpc_benchmark(trainer, parameter_server=parameter_server)
    assert (result.world_size, len(result.samples[0])) == (1, 1)

def take(rows):
    pass

def test_send(rpc_benchmark):
    def sender(ctx):
        clock = OwnClock()
        rows = torch.zeros(int(os.environ.get("ROWS", "10")))
        def step():
            rpc.rpc_sync("ps0", take, (rows,))
            clock.go_on(5)
        return step

    print(rpc_benchmark(sender).counters)
"""
    )
    asked = [
        "--ddp-trainers=1",
        "--ddp-parameter-servers=1",
        "--ddp-world-size=1,3",
        "--ddp-warmup=3",
        "-v",
    ]
    result = run(*asked, "--ddp-save-baseline", "--ddp-json=report.json", "-s")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["ddpperf: 1 trainer and 1 parameter server over gloo (auto: *"]
    )
    result.stdout.fnmatch_lines(
        [
            "*'rpc.calls': 1, 'rpc.bytes': 40,*",
            "  a step: rpc.calls 1, rpc.bytes 40, *",
        ]
    )
    measured, _ = json.loads((pytester.path / "report.json").read_text())[
        "measurements"
    ]
    assert (
        measured["plan"]["parameter_servers"],
        measured["plan"]["master"],
    ) == (
        1,
        False,
    )
    assert measured["measurement"]["samples"]["examples"][0][0][0] == 3

    monkeypatch.setenv("LASTS", "60")
    monkeypatch.setenv("ROWS", "11")
    result = run(*asked)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["REGRESSED: step time p50 *"])
    result.stdout.fnmatch_lines(
        ["why: *waiting for RPC +55.0 ms (the step: +55.0 ms)*"]
    )
    result.stdout.fnmatch_lines(
        ["REGRESSED: rpc.bytes 40 -> 44, +10 % (limit 0 %)"]
    )

    monkeypatch.delenv("LASTS")
    monkeypatch.setenv("ROWS", "9")
    result = run(*asked)
    assert (
        last_line(result)
        == "compared with baselines: 1 passed, 1 improved (2 of 2 compared)"
    )
    result.stdout.fnmatch_lines(
        [
            "*test_send * rpc.bytes -10 % *IMPROVED",
            "test_send: accept it with --ddp-save-baseline",
        ]
    )


def test_handlers_of_the_test_module_work_in_every_role(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.mkdir("folder")
    (pytester.path / "folder" / "test_roles.py").write_text(
        ROLES
        + """
def shout(text):
    return text.upper()

@pytest.mark.ddp(trainers=1, parameter_servers=1)
def test_all_ways(rpc_benchmark):
    def master(ctx):
        assert rpc.rpc_sync("ps0", shout, ("a",)) == "A"
        return rpc.remote("ps0", shout, ("b",))

    def trainer(ctx, shared):
        assert (ctx.world_size, len(ctx.workers["parameter_server"])) == (2, 3)
        assert shared.to_here() == "B"
        return lambda: rpc.rpc_sync("master", shout, ("c",))

    rpc_benchmark(trainer, master=master, trainers=2, parameter_servers=3)  # the call over the marker
"""
    )
    run("--import-mode=importlib", "--ddp-steps=2", "folder").assert_outcomes(
        passed=1
    )


def test_what_is_asked_amiss_and_a_server_that_dies_leave_the_next_test_alone(
    pytester: pytest.Pytester, run: Run
) -> None:
    pytester.makepyfile(
        ROLES
        + """
def test_mistakes(rpc_benchmark):
    with pytest.raises(TypeError, match="trainer must be a function, not NoneType: trainer"):
        rpc_benchmark(None)
    with pytest.raises(TypeError, match="master must be a function, not int"):
        rpc_benchmark(lambda ctx, shared: None, master=7)
    with pytest.raises(TypeError, match="master must be a function, not int"):
        rpc_benchmark(trainer, master=7)
    with pytest.raises(TypeError, match="trainer is called with ctx and shared, which trainer does not take: trainer"):
        rpc_benchmark(trainer, master=parameter_server)
    with pytest.raises(TypeError, match="parameter_server is called with ctx, which end does not take: parameter_ser"):
        rpc_benchmark(trainer, parameter_server=end)
    with pytest.raises(ValueError, match="parameter_servers=0: a whole number from 1"):
        rpc_benchmark(trainer, parameter_servers=0)
    with pytest.raises(ValueError, match="trainers=True"):
        rpc_benchmark(trainer, trainers=True, name="second")

def end():
    print("last words")
    os._exit(7)

def slow_to_tell(ctx):
    from pytest_ddpperf.rank import rpc as ours

    call_all = ours._call_all

    def tell_and_wait(*args):
        call_all(*args)
        time.sleep(60)  # it is called before it knows that all have heard of it

    ours._call_all = tell_and_wait

def test_dies(rpc_benchmark):
    rpc_benchmark(lambda ctx: lambda: rpc.rpc_sync("ps1", end), parameter_server=slow_to_tell)

def test_next(rpc_benchmark):
    rpc_benchmark(trainer, parameter_server=parameter_server)
"""
    )
    result = run("--ddp-steps=2")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "launch 1 of *: ps1 failed in serving: exited with status 7*",
            "*Captured stdout ps1*",
            "last words",
        ]
    )
    result = run("--ddp-parameter-servers=0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        "--ddp-parameter-servers: '0': a whole number from 1"
        in result.stderr.str()
    )
