"""The store of baselines: one small file a test and environment.

Knows files and locks; it decides nothing: a baseline that does not exist is None, one that cannot
be read is a BaselineError that names the file and the next step.
"""

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_ddpperf import files
from pytest_ddpperf.baseline import content
from pytest_ddpperf.records.codec import CodecError
from pytest_ddpperf.records.errors import BaselineError
from pytest_ddpperf.records.metric import MEMORY_COUNTERS
from pytest_ddpperf.records.plan import is_asked
from pytest_ddpperf.records.samples import (
    SESSIONS_KEPT,
    Baseline,
    Environment,
    Facts,
    FoundFacts,
    Measurement,
    Recording,
    TestId,
)

# a save takes milliseconds; whoever holds the lock for a minute is stuck
_LOCK_WAIT_SECONDS = 60.0
_ELSEWHERE = "or name another folder with --ddp-baseline-dir"


@dataclass(frozen=True, slots=True)
class Store:
    """Baselines below one folder: `<root>/<environment>/<test module>/<slug>.json`."""

    root: Path
    rootdir: Path = Path()  # pytest's, where the paths of test modules begin

    def path(self, environment: Environment, test: TestId) -> Path:
        """Where the baseline of a test in an environment is, whether it exists or not."""
        return self._path(content.environment_name(environment), test)

    def _path(self, name: str, test: TestId) -> Path:
        return (
            self.root
            / name
            / content.module_folder(test.module)
            / content.file_name(test)
        )

    def read(self, environment: Environment, test: TestId) -> Baseline | None:
        """The baseline, or None where there is no file.

        Raises BaselineError for a file that cannot be read, is not whole, makes no sense, is of a
        newer schema, or belongs to another test or environment.
        """
        path = self.path(environment, test)
        with _naming(path, "cannot be read"):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return None
        baseline = content.parse(path, data)
        if baseline.test != test:
            raise BaselineError(
                path,
                f"belongs to {baseline.test}, not to {test}",
                f'if the test was renamed, correct "test" in the file; else {content.AGAIN}',
            )
        differing = _differing(baseline.environment.key, environment.key)
        if differing:
            raise BaselineError(
                path,
                f"belongs to another environment: {differing}",
                content.AGAIN,
            )
        return baseline

    def write(self, baseline: Baseline, *, extend: bool = False) -> Path:
        """Save a baseline in place of the one before; on any failure that one stays as it was. With
        `extend` add its sessions to those stored, of which the latest ones are kept.

        Raises BaselineError for figures that `read` would refuse, for whatever the file system says
        and, with `extend`, as `read_alike`.
        """
        environment = baseline.environment
        path = self.path(environment, baseline.test)
        with _naming(path, "cannot be written"), _locked(path, self.root):
            if extend and (
                stored := self.read_alike(environment, baseline.test)
            ):
                sessions = (*stored.sessions, *baseline.sessions)
                baseline = replace(baseline, sessions=sessions[-SESSIONS_KEPT:])
            files.write(path, _text(path, baseline))
        return path

    def read_alike(
        self, environment: Environment, test: TestId
    ) -> Baseline | None:
        """As `read`; raises BaselineError also for one to which a session of `environment` could
        not be added."""
        stored = self.read(environment, test)
        if stored is None:
            return None
        before, now = stored.environment.must_match, environment.must_match
        if differing := _differing(before, now):
            raise BaselineError(
                self.path(environment, test),
                f"was measured under other conditions: {differing}",
                "measure as before, or replace it with --ddp-save-baseline",
            )
        return stored

    def files(self) -> tuple[Path, ...]:
        """All that are called like a baseline, sorted; raises BaselineError where the root cannot
        be read."""
        with _naming(self.root, "cannot be read"):
            next(self.root.iterdir(), None)
        return tuple(
            sorted(
                path for path in self.root.glob("*/**/*.json") if path.is_file()
            )
        )

    def read_file(self, path: Path) -> Baseline:
        """The baseline of whichever test; raises BaselineError."""
        with _naming(path, "cannot be read"):
            return content.parse(path, path.read_bytes())

    def others(self, test: TestId) -> tuple[str, ...]:
        """Names of the environments that have a baseline for this test; none where the root is
        unreadable."""
        try:
            names = sorted(folder.name for folder in self.root.iterdir())
            return tuple(
                name for name in names if self._path(name, test).is_file()
            )
        except OSError:
            return ()

    def nearby(self, environment: Environment, test: TestId) -> Path | None:
        """Return the file of a test of that name and module, in the same environment, by another
        path or below another rootdir; None if there is none."""
        name = content.file_name(test)
        own = content.environment_name(environment)
        module = self.rootdir / test.module
        found = [
            path
            for path in (self.root / own).rglob(name)
            if path.parent.name == module.name
        ]
        if self.root.is_relative_to(self.rootdir):
            within = self.root.relative_to(self.rootdir) / own
            found += [
                rootdir / within / module.relative_to(rootdir) / name
                for rootdir in module.parents
            ]
        return next(filter(Path.is_file, found), None)

    def read_counted(
        self, environment: Environment, test: TestId
    ) -> tuple[str, Measurement] | None:
        """Return the newest session of other machines' baselines that counts the same work, and the
        machine's name; None if there is none. Raises BaselineError."""
        asked = _same_work(environment)
        known: dict[str, Recording] = {}
        for name in self.others(test):
            found = self.read_file(self._path(name, test))
            last = found.sessions[-1]
            is_alike = _same_work(last.measurement.environment) == asked
            if found.test == test and is_alike:
                known[name] = last
        if not known:
            return None
        name = max(known, key=lambda each: known[each].created)
        there = known[name].measurement
        counters = {
            counter: count
            for counter, count in there.counters.items()
            if counter not in MEMORY_COUNTERS
        }
        return name, replace(there, counters=counters)


# What a step sends depends on these facts, and on those that a test asks for; not on the machine.
_SAME_WORK = ("backend", "world_size", "roles")


def _same_work(environment: Environment) -> FoundFacts:
    facts = {**environment.key, **environment.must_match}
    return {
        name: fact
        for name, fact in facts.items()
        if name in _SAME_WORK or (is_asked(name) and name != "timing")
    }


def _differing(stored: Facts, here: Facts) -> str:
    """Facts that differ: "world_size 2, here 4"."""
    names = sorted(
        name for name in {*stored, *here} if stored.get(name) != here.get(name)
    )
    return ", ".join(
        f"{name} {stored.get(name)!r}, here {here.get(name)!r}"
        for name in names
    )


def _text(path: Path, baseline: Baseline) -> str:
    try:
        text = content.text(baseline)
        content.parse(path, text.encode())
    except (CodecError, BaselineError) as error:
        raise BaselineError(
            path,
            f"cannot be saved: {error.problem}",
            "nothing was written; measure again",
        ) from error
    return text


@contextmanager
def _locked(path: Path, root: Path) -> Iterator[None]:
    """Keeps other runs of this user from saving into `root`; raises BaselineError, about `path`,
    without a lock.

    The lock file is in the temporary folder, never below `root`, where git would see it.
    """
    # 10 ms to import, and only who saves needs it
    from filelock import FileLock, Timeout

    name = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]
    try:
        lock = FileLock(
            _lock_folder() / f"baselines-{name}.lock",
            timeout=_LOCK_WAIT_SECONDS,
        )
        lock.acquire()
    except OSError as error:
        remedy = f"remove {error.filename} as its owner, or set TMPDIR to another folder"
        if isinstance(error, Timeout):
            remedy = "another run is saving here: wait until it ends"
        raise BaselineError(
            path, f"cannot be written: {error}", remedy
        ) from error
    try:
        yield
    finally:
        lock.release()


def _lock_folder() -> Path:
    """The folder for this user's locks; raises FileExistsError if it is somebody else's."""
    folder = (
        Path(tempfile.gettempdir()) / f"pytest-ddpperf-locks-{os.geteuid()}"
    )
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise FileExistsError(
            errno.EEXIST,
            "belongs to another user or is not a folder",
            str(folder),
        )
    return folder


@contextmanager
def _naming(path: Path, what: str) -> Iterator[None]:
    """Raise a BaselineError, which names `path` and the next step, for an OSError."""
    try:
        yield
    except OSError as error:
        remedy = f"make that possible, {_ELSEWHERE}"
        if error.errno == errno.ENOENT:
            remedy = (
                f"save baselines with pytest --ddp-save-baseline, {_ELSEWHERE}"
            )
        raise BaselineError(path, f"{what}: {error}", remedy) from error
