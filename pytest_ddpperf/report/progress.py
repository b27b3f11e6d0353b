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


def line(*, launch: int, launches: int, phase: str, step: int, steps: int, p50_seconds: float | None) -> str:
    """ "launch 2/5, step 30/50, p50 so far 0.243s"; `launch` from 1, `step` counts those that have ended. A launch
    without steps calls a function."""
    if phase == "steps":
        place = f"step {step}/{steps}" if steps else "the function"
    elif phase == "warmup":
        place = f"warm-up {step}/{steps}"
    else:
        place = _PHASES.get(phase, phase)
    parts = [f"launch {launch}/{launches}", place] if launches else [place]
    if p50_seconds is not None:
        parts.append(f"p50 so far {text.seconds(p50_seconds)}")
    return ", ".join(parts)


def waiting(resource: str, holder: int | None, seconds: float) -> str:
    """While other processes time their steps on the same core or device; `holder` is the pid of the one that does."""
    by = f"pid {holder}" if holder is not None else "another process"
    return f"waiting for {resource or 'the host'}, held by {by}, {seconds:.0f} s"
