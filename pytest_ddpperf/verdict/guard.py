"""What is weaker now: two versions of the tests are compared by what they are judged by. Nothing
here is measured or read."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from pytest_ddpperf import text
from pytest_ddpperf.records.guard import (
    BASELINE,
    EVERY_SIZE,
    UNSURE,
    Judged,
    JudgedTest,
    Kind,
    Loosened,
)
from pytest_ddpperf.records.metric import DEVICE, WALL
from pytest_ddpperf.records.outcome import Outcome
from pytest_ddpperf.records.plan import (
    COMMAND_LIMITS,
    COUNTER_LIMITS,
    OWN_LIMIT,
    Limit,
    Limits,
)
from pytest_ddpperf.records.record import record

REMOVED = "removed"
DESELECTED = "deselected"
GATE_OFF = "gate=False"
HAS_REFERENCE = "it has a reference"
LOOSENED = "--ddp-fail-on loosened"
Change = tuple[str, str, str]  # of what, before and now


@record
class Guard:
    """The comparison of how tests are judged `now` with how the other version's own tests would be,
    `before`."""

    before: Judged
    now: Judged
    since: str
    # files of tests, conftests and ini files that differ, from the top
    files: Collection[str]
    # by node id: tests that ended and did not fail; by label, whether there was a gate
    measured: Mapping[str, Mapping[str, bool]]
    # node ids and labels of those that are compared with a reference instead
    references: Collection[tuple[str, str]] = ()
    # node ids of tests whose marker asks for more than this machine has
    lacking: Collection[str] = ()
    # node ids of what failed: tests, and modules that could not be collected
    failed: Collection[str] = ()
    # whether the call itself selected some tests, of which the other version has others
    selects: bool = False
    has_device: bool = True  # whether any was measured on an accelerator

    def find(self) -> Iterator[Loosened]:
        """Yield all that is weaker, then what else differs."""
        current = {test.nodeid: test for test in self.now.tests}
        renamed = _pair_renamed(self.before.tests, self.now.tests)
        for test in self.before.tests:
            if test.why_not:
                continue
            now = current.get(test.nodeid)
            if now is None and test.nodeid in renamed and not self.selects:
                now = renamed[test.nodeid]
                yield self._found(Kind.RENAMED, test.nodeid, now=now.nodeid)
            if now is None:
                why = REMOVED
                if test.nodeid.partition("::")[0] in self.failed:
                    why = "its module could not be collected"
                elif self.selects:
                    continue
                yield self._found(Kind.NOT_COMPARED, test.nodeid, now=why)
                continue
            for label, why in self._lost(test, now):
                name = _measurement(test, label)
                yield self._found(Kind.NOT_COMPARED, name, now=why)
            if not now.why_not:
                yield from self._weaker(test, now)
        for name in sorted({*self.before.red} - {*self.now.red}):
            yield self._found(Kind.NOT_RED, name=name)
        for file in self.files:
            yield self._found(Kind.FILE, name=file)
        for file, error in self.before.file_errors.items():
            yield self._found(Kind.NOT_COLLECTED, name=file, now=error)

    def _found(self, kind: Kind, test: str = "", **fields: str) -> Loosened:
        return Loosened(kind=kind, since=self.since, test=test, **fields)

    def _lost(
        self, before: JudgedTest, now: JudgedTest
    ) -> Iterator[tuple[str, str]]:
        """Yield labels of measurements that are not compared any more, "" also for the whole test,
        and why. What a function does that is the same in both versions does not count."""
        if now.why_not:
            # Plugins that divide tests among jobs deselect, too: others, if there are more tests.
            # So do --lf and --sw.
            others = not self.selects and {*self.files} - {now.file}
            if now.why_not != DESELECTED or before.marks != now.marks or others:
                yield "", now.why_not
            return
        measured = self.measured.get(now.nodeid)
        nothing, gone = "measures nothing", REMOVED
        if measured is None and before.labels and now.labels is not None:
            # it did not run, or it failed
            measured = dict.fromkeys(now.labels, True)
            nothing = "no gate is left"
            gone = nothing
        is_same = before.body == now.body
        if now.nodeid in self.lacking:
            is_same = _needs(before) == _needs(now)
        if measured is None or is_same:
            return
        if not measured:
            yield "", nothing
            return
        for label in before.labels or ():
            if (now.nodeid, label) in self.references:
                yield label, HAS_REFERENCE
                continue
            gates = [
                has_gate
                for name, has_gate in measured.items()
                if name == label
                or (label.endswith(EVERY_SIZE) and name.startswith(label[:-1]))
            ]
            if not any(gates):
                name = "" if label == EVERY_SIZE else label
                yield name, GATE_OFF if gates else gone

    def _weaker(
        self, before: JudgedTest, now: JudgedTest
    ) -> Iterator[Loosened]:
        for name, old, new in raised_limits(before.limits, now.limits):
            if name == DEVICE and not self.has_device:
                continue
            yield self._found(
                Kind.LIMIT,
                now.nodeid,
                name=name,
                before=old,
                now=new,
                source=now.limits_from,
            )
        # another backend may be less, too
        for name, asked in before.settings.items():
            given = now.settings.get(name, asked)
            if isinstance(asked, str) or isinstance(given, str):
                is_less = asked != given
            else:
                is_less = given < asked
            if is_less:
                yield self._found(
                    Kind.MEASURED_LESS,
                    now.nodeid,
                    name=name,
                    before=str(asked),
                    now=str(given),
                )
        for fixture in now.overridden:
            if fixture not in before.overridden:
                yield self._found(Kind.FIXTURE, now.nodeid, name=fixture)

    def why_red(self, found: Sequence[Loosened], *, compared: int) -> str:
        """Return why the run is red, with so many measurements that were compared; "" if it is
        not. What the other version's settings say holds, too."""
        red = {*self.before.red, *self.now.red}
        if why := why_loosened(found, red):
            return why
        asked = [test for test in self.before.tests if not test.why_not]
        lost = {each.test for each in found if each.kind is Kind.NOT_COMPARED}

        def is_lost(test: JudgedTest) -> bool:
            labels = test.labels or ()
            named = {_measurement(test, label) for label in labels}
            return test.nodeid in lost or set() < named <= lost

        is_any_left = compared or not all(map(is_lost, asked))
        if asked and not is_any_left and "no-baseline" in red:
            return "nothing is compared any more"
        return ""


def _measurement(test: JudgedTest, label: str) -> str:
    return f"{test.nodeid} ({label})" if label else test.nodeid


def _needs(test: JudgedTest) -> list[object]:
    """Return what a machine must have for a test."""
    asked = test.settings
    return [test.nodes, asked.get("ranks"), asked.get("backend")]


def why_loosened(found: Sequence[Loosened], red: Collection[str]) -> str:
    """Return why a run is red in which something is weaker, if `red` names that; "" if it is
    not."""
    is_weaker = any(each.kind not in UNSURE for each in found)
    return LOOSENED if is_weaker and "loosened" in red else ""


def _pair_renamed(
    before: Sequence[JudgedTest], now: Sequence[JudgedTest]
) -> dict[str, JudgedTest]:
    """Return by its former node id each test that has another one now, with the same function and
    parameters."""
    known = {test.nodeid for test in before}
    new = {_key(test): test for test in now if test.nodeid not in known}
    renamed: dict[str, JudgedTest] = {}
    left = {test.nodeid for test in now}
    for test in before:
        if test.body and test.nodeid not in left and _key(test) in new:
            # one of them, if several had the same function
            renamed[test.nodeid] = new.pop(_key(test))
    return renamed


def _key(test: JudgedTest) -> tuple[object, ...]:
    # an id has the number of ranks where the test has several
    parameters = re.sub(r"\bws\d+|[-\]]", "", test.nodeid.partition("[")[2])
    return test.body, parameters, test.settings.get("ranks")


def raised_limits(
    before: Limits, now: Limits, *, all_known: bool = False
) -> Iterator[Change]:
    """Yield the limits that are not as strict any more, by metric. Limits in another unit cannot be
    compared, so they count. If none are known of one side, nothing is yielded.

    With `all_known`, `before` has those of figures, too."""
    if not before or not now:
        return
    # figures of one's own have a limit of ours unless theirs is named, a command's wall time unless
    # any limit is named
    own = [
        replace(limit, value=OWN_LIMIT, unit="%")
        for limit in now
        if not all_known and (limit.kind.own_figure or limit.metric == WALL)
    ]
    if all(limit.default for limit in now):
        now = (*COMMAND_LIMITS, *now)
    old, new = _by_metric((*own, *before)), _by_metric(now)
    for metric, limit in old.items():
        other = new.get(metric)
        if other is None:
            yield metric, text.limit(limit), "none"
        elif other.unit != limit.unit or other.value > limit.value:
            yield metric, text.limit(limit), text.limit(other)


def _by_metric(limits: Limits) -> dict[str, Limit]:
    # the first ones hold unless others are named
    every = (*COUNTER_LIMITS, *limits)
    return {limit.metric: limit for limit in every}


def since_baseline(outcomes: Sequence[Outcome]) -> Iterator[Loosened]:
    """Yield what is not as strict as when the baselines of a run were saved."""
    for outcome in outcomes:
        for session in outcome.sessions[-1:]:
            found = partial(Loosened, since=BASELINE, test=text.name(outcome))
            for name, old, new in raised_limits(
                session.limits, outcome.limits, all_known=True
            ):
                yield found(kind=Kind.LIMIT, name=name, before=old, now=new)
            if outcome.launches < session.launches:
                yield found(
                    kind=Kind.MEASURED_LESS,
                    name="launches",
                    before=str(session.launches),
                    now=str(outcome.launches),
                )
