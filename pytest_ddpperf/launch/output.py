"""The output of ranks, read at the end (and cut in the middle if it is long) or streamed, and the
observer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_ddpperf.records.samples import LaunchSamples, Outputs, RankOutput
from pytest_ddpperf.wire.channels import Phase


class Observer:
    """Watches a launch. This one does nothing; that of a terminal shows progress."""

    streams = False  # whether `output` wants lines as they come

    def begin(self, launch: int, launches: int) -> None:
        """Called before a launch of a measurement, counted from 0, of so many until the next
        look."""

    def launched(self, samples: LaunchSamples) -> None:
        """Called with what a launch of a measurement has brought."""

    def waiting(self, resource: Path) -> None:
        """Called again and again while another process times its steps on `resource`."""

    def progress(
        self, phase: Phase, step: int, steps: int, marks_ns: Sequence[int]
    ) -> None:
        """Called about ten times a second with the place and the marks so far of rank 0; `steps`
        are those of its window, 0 until that is known."""

    def output(self, name: str, stream: str, line: str) -> None:
        """Called with each line of a process; `name` is `Plan.name`."""

    def wrote(self, output: Outputs) -> None:
        """Called with what the processes of a call wrote, if it succeeded."""


# of each end: enough for a log's beginning and for the traceback at its end
_KEEP_BYTES = 32_000


def read(folder: Path, names: Mapping[int, str]) -> Outputs:
    """Return the output of the ranks that have these names."""
    return tuple(
        RankOutput(
            rank=rank,
            name=name,
            stdout=_read(folder / f"rank{rank}.out"),
            stderr=_read(folder / f"rank{rank}.err"),
        )
        for rank, name in names.items()
    )


def _read(path: Path) -> str:
    """Return what a terminal would show in the end: of a progress bar its last state."""
    return "\n".join(
        line.rstrip("\r").rpartition("\r")[2]
        for line in _read_cut(path).split("\n")
    )


def _read_cut(path: Path) -> str:
    if not path.exists():
        return ""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= 2 * _KEEP_BYTES:
            return file.read().decode(errors="replace")
        head = file.read(_KEEP_BYTES)
        file.seek(size - _KEEP_BYTES)
        tail = file.read()
    missing = size - 2 * _KEEP_BYTES
    return (
        f"{head.decode(errors='replace')}\n... {missing:,} bytes cut"
        f" ...\n{tail.decode(errors='replace')}"
    )


class Stream:
    """Follows the ranks' files and passes on whole lines as they come."""

    def __init__(
        self, folder: Path, names: Mapping[int, str], observer: Observer
    ) -> None:
        self._observer = observer
        self._files = [
            (name, stream, folder / f"rank{rank}.{suffix}")
            for rank, name in names.items()
            for stream, suffix in (("stdout", "out"), ("stderr", "err"))
        ]
        self._read = dict.fromkeys((path for _, _, path in self._files), 0)

    def pump(self, *, last: bool = False) -> None:
        """Pass on new lines, if the observer wants them. An unfinished line waits for its end or
        for the `last` call."""
        if not self._observer.streams:
            return
        for name, stream, path in self._files:
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[path])
                data = file.read()
            whole = len(data) if last else data.rfind(b"\n") + 1
            self._read[path] += whole
            for line in data[:whole].decode(errors="replace").splitlines():
                self._observer.output(name, stream, line)
