"""The store of baselines: one small file a measurement, made for code review.

Knows records, files and git; nothing of pytest, torch or statistics, and it decides nothing: a baseline that
does not exist is None, one that cannot be read is a BaselineError that names the file and the next step.

History of the format ("schema" in every file; a reader stays for every version that was ever released):

1   schema, test, created, commit, measurement = environment (key, must_match, recorded) and samples
    (step_seconds, rank_seconds, cpu_seconds, examples), as in `records`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from pytest_ddpperf.codec import CodecError, decode, dumps, encode
from pytest_ddpperf.errors import BaselineError
from pytest_ddpperf.records import Baseline, Environment, Plan, Samples, Scalar, TestId

SCHEMA = 1
_READERS = {1: lambda data: decode(Baseline, data)}

_CPU_KEY = ("cpu_model", "cores", "cores_per_rank", "pinned")
_ACCELERATOR_KEY = ("device_model", "device_memory_gib", "mig_profile")
_GROUP_KEY = ("device_type", "backend", "world_size", "nodes", "devices_per_node", "roles")
_KEY = {*_CPU_KEY, *_ACCELERATOR_KEY, *_GROUP_KEY}
_MUST_MATCH = (
    "batch_size", "warmup", "timing", "power_limit_watts", "clock_lock", "interconnect", "matmul_precision",
    "cudnn_benchmark", "deterministic",
)  # fmt: skip
_PHRASES = (
    "{device_type}", "{cpu_model}", "{cores} cores", "{share}", "{pinned}", "{device_model}",
    "{device_memory_gib}gib", "mig {mig_profile}", "{backend}", "ws{world_size}",
    "{nodes}x{devices_per_node}", "{roles}",
)  # fmt: skip

_SLUG_LENGTH = 100  # characters: well below the 255 bytes of a file name, and still read at a glance
_PLAIN_NAME = re.compile(r"([a-z0-9_]+(?:::[a-z0-9_]+)*)(?:\[([a-z0-9_.-]+)\])?")
_PLAIN_LABEL = re.compile(r"[a-z0-9_.-]*")
_TRADE_MARKS = re.compile(r"\((?:r|tm|c)\)", re.IGNORECASE)
_PLAIN_KEY = re.compile(r"[A-Za-z0-9 ._+@,=()-]*")  # what becomes "-" tells no two machines apart

_LOCK_WAIT_SECONDS = 60.0  # a save takes milliseconds; whoever holds the lock for a minute is stuck
_GIT_SECONDS = 10.0  # a cold cache on a network disk; beyond it the run goes on without the commit
_AGAIN = "restore it with git checkout, or delete it and run with --ddp-save-baseline"
_ELSEWHERE = "or name another folder with --ddp-baseline-dir"


def environment(facts: Mapping[str, Scalar], plan: Plan, *, batch_size: int | None, roles: str = "") -> Environment:
    """Sorts rank 0's flat facts, with what was asked, into the three classes.

    A fact that is None or "" could not be found out or does not apply: it is left out, so that the machine's
    being silent is the same in every class. Memory is rounded to whole GiB, since drivers differ in what they
    reserve. On a CPU the device's facts, on an accelerator the CPU's, are recorded only. Facts without `nodes`
    and `devices_per_node` are those of one host, with a device a rank.
    """
    asked: dict[str, Scalar] = {
        "device_type": plan.device,
        "backend": plan.backend,
        "world_size": plan.world_size,
        "roles": roles,
        "batch_size": batch_size,
        "warmup": plan.warmup,
        "timing": plan.timing,
    }
    one_host: dict[str, Scalar] = {"nodes": 1, "devices_per_node": plan.world_size}
    told = {**one_host, **facts, **asked}
    known = {name: value for name, value in told.items() if value is not None and value != ""}
    memory = known.get("device_memory_gib")
    if isinstance(memory, float):
        known["device_memory_gib"] = round(memory)
    key_names = (_CPU_KEY if plan.device == "cpu" else _ACCELERATOR_KEY) + _GROUP_KEY
    return Environment(
        key={name: known[name] for name in key_names if name in known},
        must_match={name: known[name] for name in _MUST_MATCH if name in known},
        recorded={name: value for name, value in known.items() if name not in key_names + _MUST_MATCH},
    )


def environment_name(environment: Environment) -> str:
    """The folder of an environment: its key as words, `cuda-nvidia-h200-140gib-nccl-ws8-1x8`."""
    key = environment.key
    said: dict[str, object] = dict(key)
    if "cores_per_rank" in key:
        said["share"] = f"{key['cores_per_rank']} per rank" if key["cores_per_rank"] else "shared"
    if "pinned" in key:
        said["pinned"] = "pinned" if key["pinned"] else "unpinned"
    words = []
    for phrase in _PHRASES:
        with suppress(KeyError):
            words.append(phrase.format_map(said))
    text = _TRADE_MARKS.sub("", " ".join(words))
    whole = bool(words) and key.keys() <= _KEY and _PLAIN_KEY.fullmatch(text) is not None
    return _slug(text, "" if whole else dumps(encode(key)))


def file_name(test: TestId) -> str:
    """The file of a test: `test_a[ws-x]` is `test_a-ws-x.json`, `::` a dot, a label `+label`.

    Function and class names hold neither "-", "." nor "+", and plain parameters and labels no "+": two plain
    names never share a file, without a hash. All others carry one.
    """
    plain = _PLAIN_NAME.fullmatch(test.name)
    label = f"+{test.label}" if test.label else ""
    if plain and _PLAIN_LABEL.fullmatch(test.label):
        name, parameters = plain.groups()
        text = name.replace("::", ".") + (f"-{parameters}" if parameters else "") + label
        if len(text) <= _SLUG_LENGTH:
            return text + ".json"
    exact = json.dumps([test.name, test.label])
    return _slug(test.name.replace("::", ".") + label, exact) + ".json"


def _slug(text: str, exact: str) -> str:
    """Lower-case ASCII of at most 100 characters; a hash of `exact` is appended where something was lost."""
    slug = re.sub(r"[^a-z0-9._+]+", "-", text.lower()).strip("-.")
    if not exact and len(slug) <= _SLUG_LENGTH:
        return slug
    digits = hashlib.sha256((exact or text).encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{slug[: _SLUG_LENGTH - 9].rstrip('-.')}-{digits}".lstrip("-")


def _module_folder(module: str) -> Path:
    """The module's own path; a part that could lead out of the store is replaced."""
    parts = module.split("/")
    unsafe = [part in ("", ".", "..") or "\0" in part for part in parts]
    return Path(*(_slug(part, f"module {module}") if bad else part for part, bad in zip(parts, unsafe, strict=True)))


@dataclass(frozen=True, slots=True)
class Store:
    """Baselines below one folder: `<root>/<environment>/<test module>/<slug>.json`."""

    root: Path

    def path(self, environment: Environment, test: TestId) -> Path:
        """Where the baseline of a test in an environment is, whether it exists or not."""
        return self._path(environment_name(environment), test)

    def _path(self, name: str, test: TestId) -> Path:
        return self.root / name / _module_folder(test.module) / file_name(test)

    def read(self, environment: Environment, test: TestId) -> Baseline | None:
        """The baseline, or None where there is no file.

        Raises BaselineError for a file that cannot be read, is not whole, makes no sense, is of a newer
        schema, or belongs to another test or environment.
        """
        path = self.path(environment, test)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failure(path, "cannot be read", error) from error
        baseline = _parse(path, data)
        if baseline.test != test:
            remedy = 'if the test was renamed, correct "test" in the file; else ' + _AGAIN
            raise BaselineError(path, f"belongs to {baseline.test}, not to {test}", remedy)
        key = baseline.measurement.environment.key
        if key != environment.key:
            differing = sorted(
                name for name in key.keys() | environment.key.keys() if key.get(name) != environment.key.get(name)
            )
            facts = ", ".join(f"{n} {key.get(n)!r}, here {environment.key.get(n)!r}" for n in differing)
            raise BaselineError(path, f"belongs to another environment: {facts}", _AGAIN)
        return baseline

    def write(self, baseline: Baseline) -> Path:
        """Saves a baseline in place of the one before; on any failure that one stays as it was.

        Raises BaselineError for figures that `read` would refuse and for whatever the file system says.
        """
        path = self.path(baseline.measurement.environment, baseline.test)
        try:
            text = dumps({"schema": SCHEMA, **encode(baseline)})
            _parse(path, text.encode())
        except (CodecError, BaselineError) as error:
            problem = error.problem if isinstance(error, BaselineError) else str(error)
            remedy = "nothing was written; measure again"
            raise BaselineError(path, f"cannot be saved: {problem}", remedy) from error
        try:
            with _locked(self.root):
                path.parent.mkdir(parents=True, exist_ok=True)
                _replace(path, text)
        except OSError as error:
            raise _failure(path, "cannot be written", error) from error
        return path

    def others(self, test: TestId) -> tuple[str, ...]:
        """Names of the environments that have a baseline for this test; none where the root is unreadable."""
        try:
            names = sorted(folder.name for folder in self.root.iterdir())
            return tuple(name for name in names if self._path(name, test).is_file())
        except OSError:
            return ()


def _parse(path: Path, data: bytes) -> Baseline:
    if not data.strip():
        raise BaselineError(path, "the file is empty", _AGAIN)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BaselineError(path, f"is not JSON, or not all of it: {error}", _AGAIN) from error
    schema = content.pop("schema", None) if isinstance(content, dict) else None
    if type(schema) is not int or schema < 1:
        raise BaselineError(path, f"is not a baseline: its schema is {schema!r}, not a version number", _AGAIN)
    if schema not in _READERS:
        problem = f"has schema {schema}; this version of pytest-ddpperf reads up to {SCHEMA}"
        raise BaselineError(path, problem, "upgrade pytest-ddpperf, or " + _AGAIN)
    try:
        baseline = _READERS[schema](content)
    except CodecError as error:
        raise BaselineError(path, str(error), _AGAIN) from error
    if nonsense := _nonsense(baseline.measurement.samples):
        raise BaselineError(path, f"measurement.samples.{nonsense}", _AGAIN)
    return baseline


def _nonsense(samples: Samples) -> str:
    """What no measurement can have brought forth, with its place; "" where all is well.

    Only the group's step times must be positive. A rank's own may be 0 where it had nothing to do within the
    resolution of an accelerator's events, and so may the CPU time of one that waited.
    """
    launches, steps = len(samples.step_seconds), len(next(iter(samples.step_seconds), ()))
    if not steps:
        return "step_seconds: no steps"
    for launch, times in enumerate(samples.step_seconds):
        if len(times) != steps:
            return f"step_seconds[{launch}]: {len(times)} steps, but {steps} in the first launch"
        if min(times) <= 0:
            place = f"step_seconds[{launch}][{times.index(min(times))}]"
            return f"{place}: {min(times)!r} is not a positive duration"
    ranks = len(next(iter(samples.rank_seconds), ()))
    tables: dict[str, tuple[tuple[tuple[float, ...], ...], ...] | None] = {
        "rank_seconds": samples.rank_seconds,
        "cpu_seconds": samples.cpu_seconds,
        "examples": samples.examples,
    }
    for name, table in tables.items():
        if table is None:
            continue
        if len(table) != launches:
            return f"{name}: {len(table)} launches, but {launches} in step_seconds"
        for launch, rows in enumerate(table):
            if len(rows) != ranks or not ranks:
                return f"{name}[{launch}]: {len(rows)} ranks, but {ranks or 'at least one'} expected"
            for rank, row in enumerate(rows):
                if len(row) != steps:
                    return f"{name}[{launch}][{rank}]: {len(row)} steps, but {steps} in step_seconds"
                if min(row) < 0:
                    return f"{name}[{launch}][{rank}]: {min(row)!r} is negative"
    return ""


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Keeps other runs on this host from saving into `root`.

    The lock file is in the temporary folder, never below `root`, where git would see it. Folder and file are
    open to every user, as a checkout may be shared; the sticky bit keeps them from removing each other's.
    """
    from filelock import FileLock  # 10 ms to import, and only who saves needs it

    folder = Path(tempfile.gettempdir()) / "pytest-ddpperf-locks"
    with suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o1777)
    name = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]
    with FileLock(folder / f"baselines-{name}.lock", timeout=_LOCK_WAIT_SECONDS, mode=0o666):
        yield


def _replace(path: Path, text: str) -> None:
    """Puts `text` at `path`, whole or not at all; the temporary file is on the same file system."""
    temporary = path.with_name(f".{uuid4().hex}.tmp")
    try:
        with open(temporary, "x", encoding="ascii", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):  # gone after a replacement; else the first error counts
            temporary.unlink()


def _failure(path: Path, what: str, error: OSError) -> BaselineError:
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        blocking = next((parent for parent in path.parents if parent.is_file()), path)
        problem = f"{what}: {blocking} is a file, not a folder"
        return BaselineError(path, problem, f"move it away, {_ELSEWHERE}")
    if isinstance(error, IsADirectoryError):
        return BaselineError(path, f"{what}: it is a folder, not a file", "move it away")
    if isinstance(error, TimeoutError) and error.errno is None:  # filelock's
        remedy = "another run is saving here: wait for it to end, or end it"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = f"give this user permission, {_ELSEWHERE}"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"free some space, {_ELSEWHERE}"
    else:
        remedy = f"look after the disk, {_ELSEWHERE}"
    return BaselineError(path, f"{what}: {error}", remedy)


def commit_of(path: Path) -> str:
    """The commit checked out at `path`, with "-dirty" where tracked files differ; "" where git cannot say."""
    command: list[Any] = ["git", "--no-optional-locks", "-C", path, "describe", "--always", "--dirty"]
    command += ["--abbrev=64", "--exclude=*"]  # the whole hash, never a tag
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.decode("ascii", "replace").strip() if result.returncode == 0 else ""
