"""What is weaker now, in words: at most one line a kind."""

from collections.abc import Iterable, Iterator, Sequence

from pytest_ddpperf import text
from pytest_ddpperf.records.guard import BASELINE, Kind, Loosened
from pytest_ddpperf.records.outcome import RunInfo
from pytest_ddpperf.report.summary import escaped

_SHOWN = 3


def lines(run: RunInfo) -> Iterator[str]:
    """Yield a line for each kind, with its first tests, and why the run is red; the JSON has
    all."""
    by_kind: dict[tuple[Kind, str], list[Loosened]] = {}
    for each in run.guard:
        by_kind.setdefault((each.kind, each.since), []).append(each)
    for (kind, since), alike in by_kind.items():
        yield f"guard: {_sentence(kind, since, alike)}"
    if run.too_weak:
        yield f"guard: the run fails: {run.too_weak}"


def annotated(run: RunInfo) -> Iterator[str]:
    """Yield a workflow command of GitHub's with all lines."""
    level = "error" if run.too_weak else "warning"
    if run.guard:
        yield f"::{level} title=guard::" + escaped("\n".join(lines(run)))


def _sentence(kind: Kind, since: str, alike: Sequence[Loosened]) -> str:
    tests = _some(_short(each.test) for each in alike)
    names = _some(each.name for each in alike)
    changes = _some(map(_change, alike))
    reasons = _some(f"{_short(each.test)} ({each.now})" for each in alike)
    saved = since == BASELINE
    match kind:
        case Kind.NOT_COMPARED if saved:
            return f"tests that have baselines are not compared now: {reasons}"
        case Kind.NOT_COMPARED:
            number = text.several(len(alike), "test")
            are = "is" if len(alike) == 1 else "are"
            return f"{number} that {since} compared {are} not compared now: {reasons}"
        case Kind.LIMIT:
            when = " since its baseline was saved" if saved else ""
            return f"limit of {tests} raised{when}: {changes}"
        case Kind.MEASURED_LESS:
            return f"{tests} measured otherwise than {'for' if saved else 'in'} {since}: {changes}"
        case Kind.FIXTURE:
            return f"a fixture of {tests} is not the plugin's now: {names}"
        case Kind.NOT_RED:
            return f"a run of {since} is red if {names}, this one is not"
        case Kind.RENAMED:
            pairs = _some(
                f"{_short(each.test)} -> {_short(each.now)}" for each in alike
            )
            return f"renamed since {since}: {pairs}"
        case Kind.FILE:
            if len(alike) == 1:
                return f"{names} differs from {since}'s; both sides ran the current one"
            return f"{names} differ from {since}'s; both sides ran the current ones"
        case Kind.NOT_COLLECTED:
            return (
                f"what {since}'s own tests are judged by is unknown, because they cannot be"
                f" collected: {_some(map(_error, alike))}"
            )


def _change(found: Loosened) -> str:
    source = f" ({found.source})" if found.source else ""
    return f"{found.name} {found.before} -> {found.now}{source}"


def _short(nodeid: str) -> str:
    """Return a test without its folders."""
    file, colons, name = nodeid.partition("::")
    return file.rpartition("/")[2] + colons + name


def _error(found: Loosened) -> str:
    """Return the last line of an error, with its file if that is known."""
    *_, last = found.now.splitlines() or [""]
    error = last.removeprefix("E ").strip()
    return f"{found.name}: {error}" if found.name else error


def _some(items: Iterable[str]) -> str:
    return text.some([*dict.fromkeys(items)], _SHOWN)
