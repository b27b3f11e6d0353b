"""The reason codes of verdicts."""

from enum import Enum


class Text(str, Enum):
    """One of several words; a str, so that it compares and serialises as its text."""

    def __str__(self) -> str:
        return str.__str__(self)


class Reason(Text):
    """Why a verdict has its status."""

    # PASS, IMPROVED, REGRESSED, INCONCLUSIVE
    WITHIN_LIMIT = "within-limit"
    BEYOND_LIMIT = "beyond-limit"
    NOT_SIGNIFICANT = "not-significant"
    TOO_NOISY = (
        "too-noisy"  # a slowdown of three limits might not have been seen
    )
    UNDECIDED = "undecided"  # further launches would hardly decide it
    CONFIRMED = "confirmed"  # by the baseline's own code
    MACHINE_SLOWER = "machine-slower"
    IMPROVED = "improved"
    COUNTER_ROSE = "counter-rose"
    COUNTER_FELL = "counter-fell"
    RECOMPILED = "recompiled"
    GOES_ON = "goes-on"
    TWO_SPEEDS = "two-speeds"
    UNREACHED = "unreached"  # no file that differs was opened
    # NO BASELINE
    NO_BASELINE = "no-baseline"
    # INCOMPARABLE; "now" is what no other baseline would help
    MUST_MATCH = "must-match"
    BASELINE_SUPPORT = "baseline-support"
    UNKNOWN_METRIC = "unknown-metric"  # that a limit names
    UNKNOWN_METRIC_NOW = "unknown-metric-now"
    OTHER_EXAMPLES = "other-examples"
    NOT_SYNCHRONISED = "not-synchronised"
    # NOT GATED
    SAVING = "saving"
    DISABLED = "disabled"
    GATE_OFF = "gate-off"
    DEBUGGING_VARIABLE = "debugging-variable"
    NO_SUPPORTED_LIMIT = "no-supported-limit"
    BASE_SIDE = "base-side"  # the leader of this pytest judges
    FOLLOWS = "follows"  # the pytest of the first node judges
