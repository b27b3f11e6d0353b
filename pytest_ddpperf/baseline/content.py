"""What a baseline's file holds, and its name. Reads and writes no files."""

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_ddpperf.records.codec import (
    CodecError,
    decode,
    dumps,
    encode,
    loads,
)
from pytest_ddpperf.records.errors import BaselineError
from pytest_ddpperf.records.plan import OF_TEST, Plan
from pytest_ddpperf.records.samples import (
    Baseline,
    Environment,
    FactChange,
    Facts,
    FoundFacts,
    Samples,
    Scalar,
    TestId,
)
from pytest_ddpperf.wire.variables import READ

_CPU_KEY = ("cpu_model", "cores", "cores_per_rank", "pinned")
_ACCELERATOR_KEY = ("device_model", "device_memory_gib", "mig_profile")
_GROUP_KEY = (
    "device_type backend world_size nodes devices_per_node roles".split()
)
_KEY = {*_CPU_KEY, *_ACCELERATOR_KEY, *_GROUP_KEY}
_MUST_MATCH = """
    batch_size warmup timing power_limit_watts interconnect network implementation
    matmul_precision cudnn_benchmark cudnn_deterministic deterministic traced collective program
""".split()
_PHRASES = (
    "{device_type}",
    "{cpu_model}",
    "{cores} cores",
    "{share}",
    "{pinned}",
    "{device_model}",
    "{device_memory_gib}gib",
    "mig {mig_profile}",
    "{backend}",
    "ws{world_size}",
    "{nodes}x{devices_per_node}",
    "{roles}",
)

# characters: well below the 255 bytes of a file name, and still easy to read
_SLUG_LENGTH = 100
_PLAIN_NAME = re.compile(
    r"([a-z0-9_]+(?:::[a-z0-9_]+)*)(?:\[([a-z0-9_.-]+)\])?"
)
_PLAIN_LABEL = re.compile(r"[a-z0-9_.-]*")
_TRADE_MARKS = re.compile(r"\((?:r|tm|c)\)", re.IGNORECASE)
# names that differ only in other characters get a hash
_PLAIN_KEY = re.compile(r"[A-Za-z0-9 ._+@,=()-]*")


def environment(
    facts: Facts, plan: Plan, *, batch_size: int | None
) -> Environment:
    """Sort rank 0's flat facts, with what was asked, into the three classes.

    A fact that is None or "" could not be found out or does not apply: it is left out, so that an
    unknown fact looks the same in every class. Memory is rounded to whole GiB, since drivers
    differ in what they reserve. On a CPU the device's facts, on an accelerator the CPU's, are
    recorded only. Facts without `nodes` and `devices_per_node` are those of one host, with a device
    a rank.
    """
    asked: FoundFacts = {
        "device_type": plan.device,
        "backend": plan.backend,
        "visible_devices": "one a rank" if plan.sees_one_device else "",
        "world_size": plan.world_size,
        "roles": plan.roles,
        "batch_size": batch_size,
        "warmup": plan.warmup,
        "steps": plan.steps,
        "timing": plan.timing,
        "collective": str(plan.collective or ""),
        "program": plan.program,
        **{OF_TEST + name: value for name, value in plan.facts.items()},
    }
    one_host: FoundFacts = {"nodes": 1, "devices_per_node": plan.world_size}
    if plan.command:  # its ranks and its steps are its own
        one_host = {}
        for name in ("world_size", "warmup", "steps", "timing"):
            del asked[name]
    reported = {**one_host, **facts, **asked}
    known = {
        name: fact for name, fact in reported.items() if fact not in (None, "")
    }
    memory = known.get("device_memory_gib")
    if isinstance(memory, float):
        known["device_memory_gib"] = round(memory)

    def taken(*names: str) -> FoundFacts:
        return {name: known.pop(name) for name in names if name in known}

    of_device = _CPU_KEY if plan.device == "cpu" else _ACCELERATOR_KEY
    return Environment(
        key=taken(*of_device, *_GROUP_KEY),
        must_match=taken(
            *_MUST_MATCH, *(OF_TEST + name for name in plan.facts)
        ),
        recorded=known,
    )


# What an accelerator measures differs between any two launches: it comes last, and only if it may
# explain a slowdown.
_CHANGING = ("slowdown", "clock_mhz", "temperature_c")
# A clock of at least this share of the baseline's is a step or two of the governor away.
_SAME_CLOCK = 0.98


def _is_worth_showing(name: str, now: Facts, base: Facts) -> bool:
    """Whether a fact that differs may be a cause: a variable that both sides read may, and a lower
    clock; a temperature only if it slows the device."""
    if name.startswith(READ):
        return name in now and name in base
    if name == "clock_mhz":
        after, before = now.get(name), base.get(name)
        # else unknown, or a text because the devices of ranks differ
        return (
            isinstance(after, int | float)
            and isinstance(before, int | float)
            and after < _SAME_CLOCK * before
        )
    return name not in _CHANGING or bool(now.get("slowdown"))


def fact_changes(now: Facts, base: Facts) -> tuple[FactChange, ...]:
    """Return the facts that differ."""
    changes = []
    for name in sorted(
        {*now, *base}, key=lambda name: (name in _CHANGING, name)
    ):
        before, after = _text(base.get(name)), _text(now.get(name))
        if before != after and _is_worth_showing(name, now, base):
            shown = (
                name.removeprefix("env:")
                .removeprefix(READ)
                .removeprefix(OF_TEST)
            )
            changes.append(FactChange(name=shown, before=before, now=after))
    return tuple(changes)


def _text(value: Scalar) -> str:
    return "unset" if value in (None, "") else str(value)


def environment_name(environment: Environment) -> str:
    """The folder of an environment: its key as words, `cuda-nvidia-h200-140gib-nccl-ws8-1x8`."""
    key = environment.key
    said: dict[str, object] = dict(key)
    if "cores_per_rank" in key:
        share = key["cores_per_rank"]
        said["share"] = f"{share} per rank" if share else "shared"
    if "pinned" in key:
        said["pinned"] = "pinned" if key["pinned"] else "unpinned"
    words = []
    for phrase in _PHRASES:
        with suppress(KeyError):
            words.append(phrase.format_map(said))
    text = _TRADE_MARKS.sub("", " ".join(words))
    is_whole = words and key.keys() <= _KEY and _PLAIN_KEY.fullmatch(text)
    return _slug(text, "" if is_whole else dumps(encode(key)))


def file_name(test: TestId) -> str:
    """The file of a test: `test_a[ws-x]` is `test_a-ws-x.json`, `::` a dot, a label `+label`.

    Function and class names hold neither "-", "." nor "+", and plain parameters and labels no "+":
    two plain names never share a file, without a hash. All others carry one.
    """
    plain = _PLAIN_NAME.fullmatch(test.name)
    label = f"+{test.label}" if test.label else ""
    if plain and _PLAIN_LABEL.fullmatch(test.label):
        name, parameters = plain.groups()
        own = f"-{parameters}" if parameters else ""
        text = name.replace("::", ".") + own + label
        if len(text) <= _SLUG_LENGTH:
            return text + ".json"
    exact = json.dumps([test.name, test.label])
    return _slug(test.name.replace("::", ".") + label, exact) + ".json"


def _slug(text: str, exact: str) -> str:
    """Lower-case ASCII of at most 100 characters; a hash of `exact` is appended where something was
    lost."""
    slug = re.sub(r"[^a-z0-9._+]+", "-", text.lower()).strip("-.")
    if not exact and len(slug) <= _SLUG_LENGTH:
        return slug
    digits = hashlib.sha256(
        (exact or text).encode("utf-8", "surrogatepass")
    ).hexdigest()[:8]
    return f"{slug[: _SLUG_LENGTH - 9].rstrip('-.')}-{digits}".lstrip("-")


def module_folder(module: str) -> Path:
    """The module's own path; a part that could lead out of the store is replaced."""
    parts = (
        _slug(part, f"module {module}")
        if part in ("", ".", "..") or "\0" in part
        else part
        for part in module.split("/")
    )
    return Path(*parts)


SCHEMA = 1
AGAIN = "restore it with git checkout, or delete it and run with --ddp-save-baseline"


def text(baseline: Baseline) -> str:
    """Return the file of a baseline; raises CodecError."""
    content = encode(baseline)
    return dumps(
        {"schema": SCHEMA, "checksum": checksum(content["sessions"]), **content}
    )


def checksum(sessions: object) -> str:
    """Return a checksum of the sessions in a file, as plain values of JSON. It shows that somebody
    edited them, and is no protection from a person who computes it anew."""
    return hashlib.sha256(dumps(sessions).encode()).hexdigest()[:16]


def parse(path: Path, data: bytes) -> Baseline:
    """Return the baseline in a file; raises BaselineError, which names `path` and the place in the
    file."""
    if not data.strip():
        raise BaselineError(path, "the file is empty", AGAIN)
    try:
        content = loads(data)
    except (ValueError, RecursionError) as error:
        raise BaselineError(
            path, f"is not JSON, or not all of it: {error}", AGAIN
        ) from error
    schema = content.pop("schema", None) if isinstance(content, dict) else None
    if type(schema) is not int or schema < 1:
        raise BaselineError(
            path,
            f"is not a baseline: its schema is {schema!r}, not a version number",
            AGAIN,
        )
    if schema > SCHEMA:
        raise BaselineError(
            path,
            f"has schema {schema}; this version of pytest-ddpperf reads schema {SCHEMA}",
            f"upgrade pytest-ddpperf, or {AGAIN}",
        )
    try:
        baseline = decode(Baseline, content)
    except CodecError as error:
        raise BaselineError(path, str(error), AGAIN) from error
    problem = _problem(baseline)
    # files from before there was one have none
    stored = content.get("checksum")
    if not problem and stored not in (None, checksum(content["sessions"])):
        problem = "sessions: were edited after they were measured"
    if problem:
        raise BaselineError(path, problem, AGAIN)
    return baseline


def _problem(baseline: Baseline) -> str:
    """Return what is wrong, with its place; "" if nothing is."""
    if not baseline.sessions:
        return "sessions: none"
    first = baseline.environment
    for number, measurement in enumerate(baseline.measurements):
        place = f"sessions[{number}].measurement"
        if measurement.samples.launches == 1:
            return (
                f"{place}.samples.step_seconds: a single launch, with which nothing can be "
                "compared"
            )
        if wrong := nonsense(measurement.samples):
            return f"{place}.samples.{wrong}"
        own = measurement.environment
        if own.key != first.key or own.must_match != first.must_match:
            return f"{place}.environment: is not that of the first session"
    return ""


# Tables of `Samples` with a figure of each rank: launch x rank x step, and launch x rank.
_OF_STEPS = "rank_seconds cpu_seconds examples blocked_seconds".split()
_OF_LAUNCHES = """
    device_seconds busy_seconds exposed_seconds page_faults collector_seconds
""".split()


def nonsense(samples: Samples) -> str:
    """Return what no measurement can have produced, with its place; "" if nothing is wrong.

    Only the group's step times must be positive. A rank's own may be 0 where it had nothing to do
    within the resolution of an accelerator's events, and so may the CPU time of one that waited.
    """
    launches = samples.launches
    steps = len(next(iter(samples.step_seconds), ()))
    ranks = len(next(iter(samples.rank_seconds), ()))
    if any(samples.rank_seconds):  # a command has no ranks of ours
        ranks = max(ranks, 1)
    if not steps:
        return "step_seconds: no steps"
    group = [("launches", launches), ("steps", steps)]
    own = [("launches", launches), ("ranks", ranks), ("steps", steps)]
    shapes = {
        "step_seconds": group,
        **dict.fromkeys(_OF_STEPS, own),
        **dict.fromkeys(_OF_LAUNCHES, own[:2]),
    }
    for name, shape in shapes.items():
        table = getattr(samples, name)
        if table is None:
            continue
        if wrong := _wrong(table, shape, is_positive=shape is group):
            return name + wrong
    for name, figure in samples.figures.items():
        if len(figure.values) != launches:
            return (
                f"figures.{name}: {len(figure.values)} launches, not {launches}"
            )
    return ""


def _wrong(
    rows: Sequence[Any], shape: Sequence[tuple[str, int]], *, is_positive: bool
) -> str:
    """Return the place in nested rows that has another shape, or a figure that is negative, or 0 if
    `is_positive`."""
    (unit, count), *inner = shape
    if len(rows) != count:
        return f": {len(rows)} {unit}, not {count}"
    for number, row in enumerate(rows):
        wrong = ""
        if inner:
            wrong = _wrong(row, inner, is_positive=is_positive)
        elif is_positive and row <= 0:
            wrong = f": {row!r} is not a positive duration"
        elif row < 0:
            wrong = f": {row!r} is negative"
        if wrong:
            return f"[{number}]{wrong}"
    return ""
