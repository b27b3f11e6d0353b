"""What the tests of one version are judged by, and what is weaker in another version."""

from collections.abc import Mapping
from dataclasses import field

from pytest_ddpperf.records.plan import Limits
from pytest_ddpperf.records.reason import Text
from pytest_ddpperf.records.record import record

# The label of all measurements of a collective, or its end: there is one for each size.
EVERY_SIZE = "*"
ALL_FILES = ""


@record
class JudgedTest:
    """How one test would be measured and judged, known from its collection."""

    nodeid: str  # as collected
    file: str  # from the top of the git working tree
    # why it would not be judged: 'skipped: "flaky"', "deselected"; "" if it would
    why_not: str
    # of its measurements that have a gate; None if its function does not show them
    labels: tuple[str, ...] | None = None
    limits: Limits = ()
    limits_from: str = ""  # "pytest.ini", "marker", "command line" or "default"
    nodes: int | None = None  # that its ranks are on; None: all
    # "launches", "steps", "ranks", "backend", ...; {} if its marker is invalid
    settings: Mapping[str, float | str] = field(default_factory=dict)
    # of its fixtures those that are not the plugin's, with the file that has them
    overridden: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()  # their names
    body: str = ""  # a digest of its function, without its name and marks


@record
class Judged:
    """How all tests of a version would be judged."""

    tests: tuple[JudgedTest, ...] = ()
    # what makes a run red, as --ddp-fail-on names it
    red: tuple[str, ...] = ()
    # a digest of how the ini file selects tests; "" if it is not known, or not another one
    ini: str = ""
    # files that could not be collected, or ALL_FILES, and why
    file_errors: Mapping[str, str] = field(default_factory=dict)


class Kind(Text):
    """What is weaker; a str, so that it serialises as its text."""

    NOT_COMPARED = "not-compared"
    LIMIT = "limit"
    MEASURED_LESS = "measured-less"
    FIXTURE = "fixture"
    NOT_RED = "not-red"
    # These are shown, but nobody can say whether they weaken anything.
    RENAMED = "renamed"
    FILE = "file"
    NOT_COLLECTED = "not-collected"


UNSURE = (Kind.RENAMED, Kind.FILE, Kind.NOT_COLLECTED)
BASELINE = "the baseline"


@record
class Loosened:
    """One thing that is weaker than in the other version, or than when a baseline was saved."""

    kind: Kind
    since: str  # the version as it was asked for, or BASELINE
    test: str = ""  # node id, with the label of its measurement; "" for the run
    name: str = ""  # of what differs: "p50", "launches", a file
    before: str = ""
    now: str = ""
    source: str = ""  # where it is set now, as `JudgedTest.limits_from`
