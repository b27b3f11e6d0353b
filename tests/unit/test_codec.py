import json
from dataclasses import replace
from enum import IntEnum
from pathlib import PosixPath

import pytest

from pytest_ddpperf.records.codec import (
    CodecError,
    decode,
    dumps,
    encode,
    loads,
)
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import Limit, Plan
from pytest_ddpperf.records.reason import Reason
from pytest_ddpperf.records.samples import (
    Baseline,
    Comparison,
    Dropped,
    Environment,
    FactChange,
    Interval,
    LaunchCost,
    Measurement,
    RankError,
    Recording,
    Samples,
    Status,
    TestId,
    Verdict,
)

SAMPLES = Samples(
    step_seconds=((0.25, 0.5), (0.125, 1.0)),
    rank_seconds=(((0.25, 0.5), (0.2, 0.4)), ((0.125, 1.0), (0.1, 0.9))),
    cpu_seconds=(((0.2, 0.3), (0.0, 0.4)), ((0.1, 0.9), (0.1, 0.8))),
    examples=(((32, 32), (32, 31)), ((32, 32), (32, 32))),
)
MEASUREMENT = Measurement(
    samples=SAMPLES,
    environment=Environment(
        key={"device_type": "cpu", "world_size": 2, "pinned": True},
        must_match={
            "warmup": 5,
            "power_limit_watts": 700.5,
            "interconnect": None,
        },
        recorded={"env:NCCL_ALGO": "Ring", "torch": "2.13.0"},
    ),
)
VERDICT = Verdict(
    status=Status.REGRESSED,
    reason=Reason.BEYOND_LIMIT,
    comparisons=(
        Comparison(
            limit=Limit(metric="p50", value=0.05, unit="%"),
            status=Status.REGRESSED,
            reason=Reason.BEYOND_LIMIT,
            baseline_seconds=0.25,
            now_seconds=0.3,
            change=Interval(estimate=0.2, low=0.1, high=0.3),
            p_value=0.001,
            level=0.025,
            resolution=0.08,
            alarm_rate=0.001,
            settled=True,
            drift=0.05,
            fastest=0.02,
            launches_needed=12,
        ),
    ),
    dropped_limits=(
        Dropped(
            limit=Limit(metric="p95", value=0.1, unit="%"), why="too few steps"
        ),
    ),
    facts=(FactChange(name="torch", before="2.12", now="2.13"),),
    details=("rpc.bytes is unknown now",),
)
OUTCOME = Outcome(
    nodeid="tests/test_step.py::test_a[ws2]",
    test=TestId(module="tests/test_step", name="test_a", label="forward"),
    plan=Plan(
        world_size=2,
        backend="gloo",
        device="cpu",
        preload=("torch._dynamo", "mymodel"),
    ),
    launches=2,
    batch_size=None,
    verdict=VERDICT,
    fails=True,
    measurement=MEASUREMENT,
    costs=(LaunchCost(start=0.1), LaunchCost(setup=0.2)),
    notes=("marker world_size=2 over --ddp-world-size",),
)


@pytest.mark.parametrize(
    "record",
    [
        SAMPLES,
        replace(SAMPLES, cpu_seconds=None, examples=None),
        MEASUREMENT,
        VERDICT,
        OUTCOME,
        replace(
            OUTCOME,
            verdict=None,
            measurement=None,
            error="rank 1 failed",
            batch_size=32,
        ),
        Baseline(
            test=OUTCOME.test,
            sessions=(Recording(measurement=MEASUREMENT, commit="0" * 40),),
        ),
        Plan(
            world_size=1,
            backend="nccl",
            device="cuda",
            timing="free",
            timeout_seconds=1e-9,
            seed=2**40,
        ),
        RankError(
            rank=1,
            when=12.5,
            phase="setup",
            summary="é \ud800 \x00",
            lost_connection=True,
        ),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_comes_back_equal_through_json_text(record):
    assert (
        decode(
            type(record),
            json.loads(json.dumps(encode(record), allow_nan=False)),
        )
        == record
    )


def test_encoding_leaves_only_the_plain_types():
    class Text(str):
        pass

    class Number(float):
        pass

    class Level(IntEnum):
        HIGH = 3

    def types(data):
        if type(data) is dict:
            return {str, dict}.union(
                *map(types, data.values()), map(type, data)
            )
        if type(data) in (list, tuple):
            return {type(data)}.union(*map(types, data))
        return {type(data)}

    encoded = encode((OUTCOME, {"key": Text("value")}, Number(1.5), Level.HIGH))
    assert types(encoded) == {dict, tuple, str, int, float, bool, type(None)}
    assert encoded[0]["verdict"]["status"] == "REGRESSED"
    assert encoded[1:] == ({"key": "value"}, 1.5, 3)


def test_a_value_without_a_form_in_json_is_refused():
    with pytest.raises(CodecError, match=r"^PosixPath has no form in JSON$"):
        encode(Environment(recorded={"where": PosixPath("/")}))


def edited(record, *path, to):
    """The encoded record with the value at `path` replaced."""
    data = json.loads(json.dumps(encode(record)))
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = to
    return data


BASELINE = Baseline(
    test=OUTCOME.test, sessions=(Recording(measurement=MEASUREMENT),)
)
MEASUREMENT_PATH = ("sessions", 0, "measurement")
SAMPLES_PATH = (*MEASUREMENT_PATH, "samples")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            (*SAMPLES_PATH, "step_seconds", 0, 1),
            "x",
            "sessions[0].measurement.samples.step_seconds[0][1]: expected `float`, got `str`",
        ),
        (
            (*SAMPLES_PATH, "step_seconds", 0, 1),
            True,
            "sessions[0].measurement.samples.step_seconds[0][1]: expected `float`, got `bool`",
        ),
        (
            (*SAMPLES_PATH, "examples", 1, 0, 1),
            1.5,
            "sessions[0].measurement.samples.examples[1][0][1]: expected `int`, got `float`",
        ),
        (
            (*MEASUREMENT_PATH, "environment", "key"),
            ["cpu"],
            "sessions[0].measurement.environment.key: expected `object`, got `array`",
        ),
        (
            MEASUREMENT_PATH,
            3,
            "sessions[0].measurement: expected `object`, got `int`",
        ),
    ],
)
def test_data_of_the_wrong_kind_is_named_with_its_path(path, value, message):
    with pytest.raises(CodecError) as caught:
        decode(
            Baseline, json.loads(json.dumps(edited(BASELINE, *path, to=value)))
        )
    assert str(caught.value) == message


def test_nan_and_infinity_are_refused_in_both_directions():
    for value in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(CodecError, match="a number is not finite"):
            dumps({"step_seconds": [0.1, value]})
        with pytest.raises(ValueError, match="is not a number"):
            loads(json.dumps([value]).encode())


def test_text_is_made_for_review():
    data = {
        "b": {
            "step_seconds": [[0.1 + 0.2, 1.0], [2e-10, 5]],
            "empty": [],
            "none": {},
        },
        "a": ["x", True, None],
        "flags": [True, False],
        "share": 0.1 + 0.2,
        "phase_seconds": {"start": 0.12345678949},
        "least_seconds": 4e-12,
    }
    assert dumps(data) == (
        """\
{
  "a": [
    "x",
    true,
    null
  ],
  "b": {
    "empty": [],
    "none": {},
    "step_seconds": [
      [0.3, 1.0],
      [0.0, 5]
    ]
  },
  "flags": [
    true,
    false
  ],
  "least_seconds": 4e-12,
  "phase_seconds": {
    "start": 0.123456789
  },
  "share": 0.30000000000000004
}
"""
    )


def test_figures_of_users_are_not_rounded_whatever_they_are_called():
    values = {"token_seconds": {"values": [[[3.214e-8]]]}}
    data = {"figures": values, "recorded": {"op_seconds": [[[3.214e-8]]]}}
    assert loads(dumps(data).encode()) == data


def test_text_of_a_record_reads_back_to_the_nanosecond():
    samples = replace(
        SAMPLES, step_seconds=((0.1234567894999, 0.5), (0.125, 1.0))
    )
    back = decode(Samples, loads(dumps(encode(samples)).encode()))
    assert back == replace(
        samples, step_seconds=((0.123456789, 0.5), (0.125, 1.0))
    )
