"""The lines that show where a measurement is: on a terminal, and where it waits for others, wherever pytest writes."""

from __future__ import annotations

from pytest_ddpperf.report import text

_PHASES = {
    "start": "starting ranks",
    "group": "init_process_group",
    "setup": "setup",
    "delivery": "collecting",
    "cleanup": "clean-up",
    "done": "ending",
}


def line(
    *,
    launch: int,
    launches: int,
    phase: str,
    step: int,
    steps: int,
    p50_seconds: float | None,
    test: int = 1,
    tests: int = 1,
    left_seconds: float | None = None,
) -> str:
    """Return "test 3/12 (4 min left), launch 2/5, step 30/50, p50 so far 0.243s"; `launch` and `test` from 1, `step`
    counts those that have ended. A launch without steps calls a function."""
    if phase == "steps":
        place = f"step {step}/{steps}" if steps else "the function"
    elif phase == "warmup":
        place = f"warm-up {step}/{steps}"
    else:
        place = _PHASES.get(phase, phase)
    parts = [f"launch {launch}/{launches}", place] if launches else [place]
    if p50_seconds is not None:
        parts.append(f"p50 so far {text.seconds(p50_seconds)}")
    if tests > 1:  # first: a narrow terminal has room for no more
        parts.insert(0, f"test {test}/{tests}" + (f" ({_rounded(left_seconds)} left)" if left_seconds else ""))
    return ", ".join(parts)


def _rounded(seconds: float) -> str:
    """Return "50 s", "4 min", "2 h 10 min": an estimate is no better."""
    if seconds < 55:
        return f"{max(10, round(seconds, -1)):.0f} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(round(minutes, -1), 60)
    return f"{minutes} min" if minutes < 100 else f"{hours} h {rest} min"


def waiting(resource: str, holder: int | None, seconds: float) -> str:
    """Return the line of a run that waits for a core or device; `holder` is the pid of the process that uses it."""
    by = f"pid {holder}" if holder is not None else "another process"
    return f"waiting for {resource or 'the host'}, in use by {by}, {seconds:.0f} s"
