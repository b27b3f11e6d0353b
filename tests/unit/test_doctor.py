"""What the doctor concludes, of machines that this one is not and of launches that never ran."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_ddpperf import options
from pytest_ddpperf.cli import doctor as command
from pytest_ddpperf.cli.main import main
from pytest_ddpperf.doctor import bench, findings, noise, visit
from pytest_ddpperf.doctor.bench import TimeIsUp, Within, take
from pytest_ddpperf.doctor.findings import LOAD, NUMA, SIBLINGS, trials
from pytest_ddpperf.records import LaunchSamples, Limit, RankError
from pytest_ddpperf.records.doctor import (
    Busy,
    CoreLoad,
    Cores,
    Diagnosis,
    Finding,
    Gpu,
    Load,
    Machine,
    Node,
    Noise,
    Resolved,
    Survey,
    Trial,
)
from pytest_ddpperf.records.errors import LaunchError, ServerError
from pytest_ddpperf.report import doctor as words
from pytest_ddpperf.report import progress
from tests.unit.test_launches import LAUNCH

LIMITS = tuple(Limit(metric=metric, value=0.1, unit="%", default=True) for metric in ("p10", "p50"))
FACTS = {"torch": "2.13.0", "host": "box", "device_type": "cpu", "device_count": 0, "backends": "gloo,mpi"}
QUIET = Survey(
    machine=Machine(usable=(0, 1, 2, 3), online=4),
    load=Load(seconds=1.0, cores=tuple(CoreLoad(core=core, busy=0.0, stolen=0.0) for core in range(4))),
    world_size=2,
    device="cpu",
    place="2 ranks over gloo (auto: no CUDA device), each pinned to 2 cores of 4",
    facts=FACTS,
)
STEADY = Noise(
    seconds=60.0,
    steps=150,
    step_seconds=0.005,
    limits=LIMITS,
    stored=(
        Resolved(launches=5, spread={"p10": 0.01, "p50": 0.01}, resolution={"p10": 0.09, "p50": 0.09}),
        Resolved(launches=10, spread={"p10": 0.01, "p50": 0.01}, resolution={"p10": 0.08, "p50": 0.08}),
    ),
    turns=(Resolved(launches=10, spread={"p10": 0.01, "p50": 0.01}, resolution={"p10": 0.01, "p50": 0.01}),),
    drift=0.025,
    during=Load(seconds=60.0),
)


def busy(**by_core: float) -> Load:
    """Of core N by `cN`."""
    cores = (CoreLoad(core=core, busy=by_core.get(f"c{core}", 0.0), stolen=0.0) for core in range(4))
    return Load(seconds=1.0, cores=tuple(cores), processes=(Busy(pid=12, name="make", cores=0.9),))


def on(machine: Machine, **changes: Any) -> Survey:
    return replace(QUIET, machine=machine, **changes)


def found(survey: Survey, measured: Noise | None = None) -> dict[str, Finding]:
    every = findings.findings(survey, measured)
    assert len({each.code for each in every}) == len(every)
    return {each.code: each for each in every}


# --- findings


def test_of_a_quiet_machine_nothing_is_found() -> None:
    assert found(QUIET, STEADY) == {}


@pytest.mark.parametrize(
    ("changes", "code", "problem", "remedy"),
    [
        ({"governors": ("powersave",)}, "governor", "(governor powersave)", "cpupower frequency-set -g performance"),
        ({"boost": True}, "boost", "beyond the base clock", "no_turbo"),
        ({"quota_cores": 1.5}, "quota", "the time of 1.5 cores, and ranks run on 4", "--cpuset-cpus"),
        ({"memory_bytes": 1000, "available_bytes": 50}, "memory", "5 % of the memory is left", "end what has it"),
        ({"siblings": ((0, 1), (2, 3))}, SIBLINGS, "2 cores are two hardware threads each", "switch SMT off"),
        (
            {"nodes": tuple(Node(number=n, cores=(2 * n, 2 * n + 1), memory_bytes=None) for n in range(2))},
            NUMA,
            "the cores are of 2 NUMA nodes",
            "the cores of one node",
        ),
        ({"gpus": (Gpu(index=0, name="H100"),)}, "gpu-unused", "there is 1 NVIDIA GPU, which this torch (2.13.0)", ""),
    ],
)
def test_what_a_machine_has_is_found(changes: dict[str, Any], code: str, problem: str, remedy: str) -> None:
    (one,) = findings.findings(on(replace(QUIET.machine, **changes)), STEADY)
    assert one.code == code
    assert problem in one.problem
    assert remedy in one.remedy
    assert not one.gain


@pytest.mark.parametrize(
    "changes",
    [
        {"governors": ("performance",)},
        {"boost": False},
        {"quota_cores": 4.0},
        {"memory_bytes": 1000, "available_bytes": 500},
        {"siblings": ((0,), (1,), (2,), (3,))},
        {"nodes": (Node(number=0, cores=(0, 1, 2, 3), memory_bytes=1), Node(number=1, cores=(), memory_bytes=1))},
        {"virtual": True, "swap_used_bytes": 100, "huge_pages": "always"},
    ],
)
def test_what_is_as_it_should_be_is_not(changes: dict[str, Any]) -> None:
    assert found(on(replace(QUIET.machine, **changes)), STEADY) == {}


@pytest.mark.parametrize(
    ("gpu", "code", "problem"),
    [
        ({"persistence": False}, "gpu-persistence", "persistence mode is off"),
        ({"busy": 0.93}, "gpu-load", "others use GPU 3: busy for 93 % of the last moment"),
        ({"slowed_by": ("power cap", "heat")}, "gpu-slowed", "held below its clocks now: GPU 3, by power cap, heat"),
        (
            {"power_limit_watts": 500.0, "default_power_watts": 700.0},
            "gpu-power",
            "GPU 3 may use 500 W of the usual 700 W",
        ),
    ],
)
def test_what_hinders_a_gpu_is_found(gpu: dict[str, Any], code: str, problem: str) -> None:
    survey = on(
        # Another that no rank runs on hinders nobody.
        replace(QUIET.machine, gpus=(Gpu(index=3, name="H100", **gpu), Gpu(index=4, name="H100", **gpu))),
        device="cuda",
        gpus=(2, 3),
        facts={**FACTS, "device_type": "cuda"},
    )
    (one,) = findings.findings(survey, STEADY)
    assert one.code == code
    assert problem in one.problem


def test_what_hinders_several_gpus_is_one_finding() -> None:
    gpus = tuple(Gpu(index=index, name="H100", persistence=False, busy=0.2 * index) for index in range(4))
    survey = on(replace(QUIET.machine, gpus=gpus), device="cuda", gpus=(0, 1, 2, 3), facts={"device_type": "cuda"})
    every = found(survey, STEADY)
    assert every["gpu-load"].problem == "others use GPU 1-3: busy for 20 % to 60 % of the last moment"
    assert "nobody uses GPU 0-3 (" in every["gpu-persistence"].problem


def test_other_load_is_told_with_the_processes_that_make_it() -> None:
    one = found(replace(QUIET, load=busy(c1=0.95, c2=0.05, c3=0.5)), STEADY)[LOAD]
    assert one.problem == "others use 1.4 of 4 cores (core 1,3): make (12) 0.9"
    elsewhere = replace(busy(c1=0.95), processes=())
    assert "no process that lasts and is seen from here" in found(replace(QUIET, load=elsewhere), STEADY)[LOAD].problem


@pytest.mark.parametrize(
    ("during", "code", "problem"),
    [
        (
            Load(seconds=9.0, cores=(CoreLoad(core=0, busy=1.0, stolen=0.03), CoreLoad(core=1, busy=1.0, stolen=0.01))),
            "stolen",
            "the hypervisor took 2 % of the cores' time",
        ),
        (Load(seconds=9.0, swapped_pages=12), "swap", "12 pages were swapped while it was measured"),
    ],
)
def test_what_happened_while_it_was_measured_is_told(during: Load, code: str, problem: str) -> None:
    assert problem in found(QUIET, replace(STEADY, during=during))[code].problem


def test_a_quota_that_was_used_up_is_told_however_large_it_is() -> None:
    survey = on(replace(QUIET.machine, quota_cores=4.0))
    throttled = replace(STEADY, during=Load(seconds=9.0, throttled=7, throttled_seconds=0.25))
    assert "it was used up 7 times while it was measured: 0.25 s lost" in found(survey, throttled)["quota"].problem


def test_ranks_that_share_cores_are_told_with_why() -> None:
    assert "4 threads a rank" in found(replace(QUIET, crowded=4), STEADY)["threads"].problem
    assert found(replace(QUIET, world_size=8), STEADY)["shared"].problem == "8 ranks share 4 cores"


def test_who_times_steps_here_is_told() -> None:
    told = found(replace(QUIET, timing=("cpu0, held by pid 12",)), STEADY)["timing"].problem
    assert told == "others time their steps here now: cpu0, held by pid 12"


def test_why_less_was_measured_is_told() -> None:
    nothing = Noise(seconds=1.0, problem="rank 0: killed by SIGSEGV")
    assert found(QUIET, nothing)["unmeasured"].problem == "nothing was measured: rank 0: killed by SIGSEGV"
    less = replace(STEADY, problem="there was time for 4 of 10 rounds")
    assert found(QUIET, less)["unmeasured"].problem == "less was measured: there was time for 4 of 10 rounds"
    broken = replace(QUIET, problem="the rank server did not start")
    assert "no rank can be started: the rank server" in found(broken)["no-ranks"].problem


def test_what_other_ways_to_measure_bring_is_told_by_what_was_measured() -> None:
    first, last = STEADY.stored
    noisy = replace(
        STEADY,
        stored=(
            replace(first, resolution={"p10": 0.3, "p50": 0.4}),
            replace(last, resolution={"p10": 0.09, "p50": 0.19}),
        ),
    )
    told = found(QUIET, noisy)
    assert (
        told["turns"].problem == "against a stored baseline of one session p50:10% is finer than what can be found here"
    )
    assert told["turns"].gain == "finds p50 +1 % instead of +19 %"
    assert (told["launches"].remedy, told["launches"].gain) == (
        "--ddp-launches 10",
        "finds p50 +19 % instead of +40 %",
    )
    assert "2.5 % is assumed" in told["sessions"].problem
    assert told["sessions"].gain == ""


def test_what_is_no_better_by_every_metric_is_not_advised() -> None:
    coarse = Resolved(launches=10, spread={}, resolution={"p10": 0.2, "p50": 0.5})
    mixed = Resolved(launches=5, spread={}, resolution={"p10": 0.3, "p50": 0.4})
    assert set(found(QUIET, replace(STEADY, stored=(mixed, coarse), turns=(replace(mixed, launches=10),)))) == {
        "sessions"
    }
    assert set(found(QUIET, replace(STEADY, stored=(coarse,), turns=()))) == {"sessions"}
    hopeless = replace(mixed, resolution={"p10": 0.9, "p50": 0.9})  # with any sensible number of launches
    assert set(found(QUIET, replace(STEADY, stored=(hopeless, coarse), turns=()))) == {"sessions"}


# --- what other cores would bring


def test_cores_that_would_mend_it_are_tried() -> None:
    machine = Machine(
        usable=(0, 1, 2, 3),
        online=4,
        siblings=((0, 1), (2, 3)),
        nodes=(
            Node(number=0, cores=(0, 1), memory_bytes=None),
            Node(number=1, cores=(2, 3), memory_bytes=None),
        ),
    )
    survey = on(machine, load=busy(c0=0.9))
    assert trials(survey) == ((LOAD, (1, 2, 3)), (SIBLINGS, (1, 2)), (NUMA, (2, 3)))
    assert trials(replace(survey, world_size=3)) == ((LOAD, (1, 2, 3)),)  # of which there are enough
    assert trials(replace(survey, device="cuda")) == ()
    assert trials(QUIET) == ()
    assert trials(replace(QUIET, load=busy(c0=0.9, c1=0.9, c2=0.9, c3=0.9))) == ()


@pytest.mark.parametrize(
    ("launches", "spread", "gain"),
    [
        (10, 0.01, "on core 1-3 10 launches spread by p10 1 % instead of 3 %"),
        (10, 0.02, "on core 1-3 10 launches spread by p10 2 % instead of 3 %: no more than chance may bring"),
        (5, 0.015, "on core 1-3 5 launches spread by p10 1.5 % instead of 3 %: no more than chance may bring"),
        (5, 0.01, "on core 1-3 5 launches spread by p10 1 % instead of 3 %"),
        (4, 0.001, "on core 1-3 4 launches spread by p10 0.1 % instead of 3 %: no more than chance may bring"),
    ],
)
def test_what_they_bring_is_what_was_measured(launches: int, spread: float, gain: str) -> None:
    def resolved(value: float) -> Resolved:
        return Resolved(launches=launches, spread={"p10": value}, resolution={"p10": value})

    trial = Trial(code=LOAD, cores=(1, 2, 3), here=resolved(spread), all_cores=resolved(0.03))
    one = found(replace(QUIET, load=busy(c0=0.9)), replace(STEADY, trials=(trial,)))[LOAD]
    assert one.remedy == "let nothing else run meanwhile, or `taskset -c 1-3 pytest ...`"
    assert one.gain == gain


def test_what_there_was_no_time_for_brings_nothing_known() -> None:
    unmeasured = replace(STEADY, trials=(Trial(code=LOAD, cores=(1, 2, 3)),))
    assert found(replace(QUIET, load=busy(c0=0.9)), unmeasured)[LOAD].gain == ""


# --- launches


class Bench:
    """Launches that take no time, of steps with a known spread; on some cores they spread a tenth as much."""

    def __init__(self, *, fails_after: int = 10**6) -> None:
        self.asked: list[Cores] = []
        self.pairs = 0
        self._left = fails_after
        self._random = random.Random(0)

    def alone(self, cores: Cores = ()) -> LaunchSamples:
        self._left -= 1
        if self._left < 0:
            raise LaunchError(
                RankError(rank=0, when=0.0, phase="setup", summary="no memory", traceback="Trace"), (), ()
            )
        self.asked.append(cores)
        return self._launch(0.005 if cores else 0.05)

    def pair(self) -> tuple[LaunchSamples, LaunchSamples]:
        self.pairs += 1
        return self._launch(0.002), self._launch(0.002)

    def _launch(self, spread: float) -> LaunchSamples:
        level = 0.005 * self._random.lognormvariate(0, spread)
        steps = tuple(level * self._random.lognormvariate(0, 0.01) for _ in range(40))
        return replace(LAUNCH, step_seconds=steps, rank_seconds=(steps,), stretches=(10,) * 4)


LATER = time.monotonic() + 1e6


def of(taken: bench.Taken, *trials: tuple[str, Cores]) -> Noise:
    return noise.of(taken, trials, LIMITS, in_stretches=True, seconds=3.0, during=Load(seconds=3.0))


def test_rounds_have_a_launch_of_each_kind() -> None:
    told: list[tuple[int, int]] = []
    launching = Bench()
    taken = take(launching, [(0,), (1, 2)], rounds=3, until=LATER, told=lambda *at: told.append(at))
    assert launching.asked == [(), (0,), (1, 2)] * 3
    assert (len(taken.alone), [len(on) for on in taken.on], len(taken.pairs)) == (3, [3, 3], 3)
    assert told == [(number, 12) for number in range(13)]
    assert taken.problem == ""


def test_no_round_is_begun_that_there_is_no_time_for() -> None:
    taken = take(Bench(), [], rounds=3, until=time.monotonic() - 1, told=lambda *at: None)
    assert (taken.alone, taken.problem) == ([], "there was time for 0 of 3 rounds")
    assert of(taken) == Noise(
        seconds=3.0,
        limits=LIMITS,
        in_stretches=True,
        during=Load(seconds=3.0),
        problem="there was time for 0 of 3 rounds",
    )


def test_what_was_taken_before_a_launch_failed_counts() -> None:
    taken = take(Bench(fails_after=7), [], rounds=10, until=LATER, told=lambda *at: None)
    assert (len(taken.alone), len(taken.pairs)) == (7, 7)
    measured = of(taken)
    assert measured.problem == "rank 0 failed in setup: no memory"
    assert [resolved.launches for resolved in measured.stored] == [5, 7]


def test_noise_is_told_at_the_first_look_and_of_all_launches() -> None:
    measured = of(take(Bench(), [(0,)], rounds=10, until=LATER, told=lambda *at: None), (LOAD, (0,)))
    assert [resolved.launches for resolved in (*measured.stored, *measured.turns)] == [5, 10, 5, 10]
    alone, turns = measured.stored[-1], measured.turns[-1]
    assert 0.02 < alone.spread["p50"] < 0.1
    assert turns.spread["p50"] < 0.01
    assert turns.resolution["p50"] < 0.05 < alone.resolution["p50"]
    (trial,) = measured.trials
    assert trial.here is not None
    assert trial.here.spread["p50"] < 0.02
    assert trial.all_cores == alone
    assert (measured.steps, measured.in_stretches) == (40, True)
    assert 0.02 < measured.drift < 0.1
    assert measured.step_seconds == pytest.approx(0.005, rel=0.2)


def test_launches_that_follow_one_another_are_compared_in_pairs_too() -> None:
    taken = take(Bench(), [], rounds=4, until=LATER, told=lambda *at: None)
    measured = noise.of(taken, (), LIMITS, in_stretches=False, seconds=3.0, during=Load(seconds=3.0))
    assert [resolved.launches for resolved in measured.turns] == [4]
    assert set(measured.turns[0].resolution) == {"p10", "p50"}


def test_why_no_server_starts_is_told_with_its_last_words() -> None:
    error = ServerError("did not start", "importing torch:\nTraceback\nModuleNotFoundError: No module named 'torch'\n")
    assert bench.briefly(error) == "the rank server did not start: ModuleNotFoundError: No module named 'torch'"
    assert bench.briefly(ServerError("does not answer", "")) == "the rank server does not answer"


def test_others_are_waited_for_while_there_is_time() -> None:
    waited: list[Path] = []

    class Watch(command.Watch):
        def waiting(self, resource: Path) -> None:
            waited.append(resource)

    Within(Watch(), LATER).waiting(Path("/sys/cpu0"))
    assert waited == [Path("/sys/cpu0")]
    with pytest.raises(TimeIsUp, match="others timed their steps on cpu0 for as long as there was time"):
        Within(Watch(), time.monotonic() - 1).waiting(Path("/sys/cpu0"))
    assert len(waited) == 1


# --- words


def told(survey: Survey, measured: Noise | None) -> str:
    diagnosis = Diagnosis(survey=survey, noise=measured, findings=findings.findings(survey, measured))
    return "\n".join([*words.about(survey), *words.rest(diagnosis)])


def test_a_quiet_machine_in_words() -> None:
    assert (
        told(QUIET, STEADY)
        == """\
box: what it has
  torch    2.13.0, with gloo, mpi
  devices  no accelerator
  cores    4 cores
  cgroup   no limit on CPU time or memory
  clocks   no governor is told
  now      idle
  a run    2 ranks over gloo (auto: no CUDA device), each pinned to 2 cores of 4

how steady it is: a small DDP step on 2 ranks, 5.00ms, 150 a launch; 60 s
                                        launches            spread  smallest slowdown that is found
  against a stored baseline                    5  p10 1 %, p50 1 %  p10 +9 %, p50 +9 %
                                              10  p10 1 %, p50 1 %  p10 +8 %, p50 +8 %
  in turns, one launch after the other        10  p10 1 %, p50 1 %  p10 +1 %, p50 +1 %
  launches are a side's, the spread is one standard deviation; slowdowns as large as told are found four times
  out of five. The stored baseline has one session, and 2.5 % of drift between sessions is assumed

what to change: nothing was found"""
    )


def test_a_busy_server_in_words() -> None:
    machine = Machine(
        usable=(0, 1, 2, 3),
        online=8,
        siblings=((0, 1), (2, 3)),
        packages=2,
        nodes=(Node(number=0, cores=(0, 1, 2, 3), memory_bytes=None),),
        governors=("schedutil",),
        boost=False,
        virtual=True,
        memory_bytes=64_000_000_000,
        available_bytes=32_000_000_000,
        swap_used_bytes=500_000_000,
        huge_pages="always",
        quota_cores=2.5,
        memory_limit_bytes=16_000_000_000,
    )
    survey = on(machine, load=busy(c1=0.5), facts={**FACTS, "cuda": "13.0", "cpu_model": "Xeon"})
    lines = told(survey, None).splitlines()
    for line in (
        "  torch    2.13.0, CUDA 13.0, with gloo, mpi",
        "  cores    4 hardware threads of 2 cores, 2 packages, Xeon, virtual machine",
        "  NUMA     node 0: 4 cores",
        "  memory   64 GB, 32 GB available, 0.5 GB swapped, huge pages: always",
        "  cgroup   the time of 2.5 cores, 16 GB of memory",
        "  clocks   governor schedutil, boost off",
        "  now      busy with others: core 1 50 %",
        "  1. others use 0.5 of 4 cores (core 1): make (12) 0.9",
        "     -> let nothing else run meanwhile (not measured)",
    ):
        assert line in lines


def test_gpus_and_their_links_in_words() -> None:
    gpus = (Gpu(index=0, name="H100", power_limit_watts=700.0, clock_mhz=1980.0, most_clock_mhz=1980.0),)
    facts = {**FACTS, "device_type": "cuda", "device_count": 1, "device_model": "H100", "topology": "GPU0\nGPU0 X"}
    lines = list(words.about(on(replace(QUIET.machine, gpus=gpus), device="cuda", facts=facts)))
    assert "  devices  1 x H100; GPU 0: 700 W, 1980 of 1980 MHz" in lines
    assert lines[-2:] == ["    GPU0", "    GPU0 X"]


def test_a_machine_without_ranks_in_words() -> None:
    survey = replace(QUIET, facts={}, device="", place="", problem="the rank server did not start")
    assert (
        told(survey, None)
        == """\
this machine: what it has
  torch   no rank can be started
  cores   4 cores
  cgroup  no limit on CPU time or memory
  clocks  no governor is told
  now     idle

what to change for steadier results
  1. no rank can be started: the rank server did not start
     -> `python -c 'import torch'` must work with this Python"""
    )


def test_what_was_measured_stands_below_what_to_change() -> None:
    diagnosis = Diagnosis(
        survey=QUIET,
        noise=None,
        findings=(Finding(code="load", problem="others", remedy="end them", gain="2 % instead of 3 %"),),
    )
    assert list(words.rest(diagnosis))[-3:] == [
        "  1. others",
        "     -> end them",
        "        measured: 2 % instead of 3 %",
    ]


def test_the_bar_is_as_long_as_what_is_done() -> None:
    assert progress.bar(0, 0, 0.4) == "measuring [                    ] 0/0, 0 s"
    assert progress.bar(5, 20, 12.3) == "measuring [#####               ] 5/20, 12 s"
    assert progress.bar(20, 20, 60.0) == "measuring [####################] 20/20, 60 s"


# --- the command


class Visited:
    """A visit to a machine that is told of."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def __enter__(self) -> Visited:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def survey(self) -> Survey:
        return replace(QUIET, load=busy(c1=0.95), world_size=self.settings.world_sizes[0])

    def measure(self, survey: Survey, watch: command.Watch, told: Callable[[int, int], None]) -> Noise:
        told(1, 20)
        watch.progress(None, 0, 0, ())
        return STEADY


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "Visit", Visited)


@pytest.mark.usefixtures("visited")
def test_findings_are_no_errors_and_the_json_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--world-size", "3", "--json", str(tmp_path / "doctor.json")]) == 0
    said = capsys.readouterr()
    assert "a small DDP step on 3 ranks" in said.out
    assert "1. others use 0.9 of 4 cores" in said.out
    assert said.err == ""  # there is no terminal to draw a bar on
    data = json.loads((tmp_path / "doctor.json").read_text())
    assert (data["schema"], data["survey"]["world_size"], data["findings"][0]["code"]) == (1, 3, "load")
    assert data["noise"]["turns"][0]["resolution"] == {"p10": 0.01, "p50": 0.01}


@pytest.mark.usefixtures("visited")
def test_a_terminal_has_a_bar_that_goes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().err
    assert re.match(r"\rmeasuring \[#                   \] 1/20, \d+ s", said)
    assert said.endswith("\r\x1b[K")


def test_where_there_is_no_terminal_a_long_wait_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = command.Watch()
    watch.waiting(Path("/sys/cpu0"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(command, "_TOLD_SECONDS", 0.0)
    watch.waiting(Path("/sys/cpu0"))
    assert capsys.readouterr().err.startswith("ddpperf: waiting for cpu0, held by another process, ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--world-size", "0"], "argument --world-size: '0': a whole number from 1"),
        (["--quick"], "unrecognized arguments: --quick"),
    ],
)
def test_what_it_cannot_be_asked_ends_with_4(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 4
    assert told in capsys.readouterr().err


def test_settings_without_pytest_are_the_plugins_own() -> None:
    settings = options.without_pytest(world_sizes="4", backend="gloo")
    assert (settings.world_sizes, settings.backend, settings.launches) == ((4,), "gloo", 5)
    assert settings.limits == LIMITS
    assert (settings.sources["backend"], settings.sources["launches"]) == ("command line", "default")
    assert settings.baseline_dir == Path("baselines").absolute()
