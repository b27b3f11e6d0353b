"""`make demo`: the gate in three acts, from a first baseline to a regression that it catches.

Runs pytest on the two DDP examples as a user would, and believes only what pytest's exit status and the report of
`--ddp-json` say. Writes into `.demo` and nowhere else. Exits 0 only if all three acts went as told.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(".demo")  # relative to ROOT, as shown to the reader
TWO_GLOO_RANKS = ("--ddp-world-size=2", "--ddp-backend=gloo", "--ddp-device=cpu")
QUIET = ("-p", "no:benchmark", "-p", "no:cacheprovider")  # one table is enough here; no mark left for --lf
REGRESSION = {"DDP_BUCKET_CAP_MB": "0.001"}  # a bucket, and so an all-reduce, for each gradient

Measurement = dict[str, Any]  # as in the JSON report: docs/json.md


class Surprise(Exception):
    """An act that did not go as told."""


def say(text: str) -> None:
    print(text, flush=True)  # before what pytest prints, which shares our standard output


def headline(text: str) -> None:
    say(f"\n\033[1m=== {text}\033[0m" if sys.stdout.isatty() else f"\n=== {text}")


def run_examples(report: str, *options: str, exit_status: int, **variables: str) -> list[Measurement]:
    """Run pytest on the examples, shown to the reader; returns what it measured.

    Raises Surprise if pytest ends otherwise than with `exit_status`, or if an example was not measured.
    """
    path = FOLDER / report
    command = ["pytest", "examples", *TWO_GLOO_RANKS, *QUIET, "--ignore=examples/rpc"]
    command += [f"--ddp-baseline-dir={FOLDER / 'baselines'}"]
    command += [f"--ddp-json={path}", *options]
    say(f"$ {shlex.join([f'{name}={value}' for name, value in variables.items()] + command)}\n")
    environment = {**os.environ, **variables}
    ended = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment).returncode
    if ended != exit_status:
        raise Surprise(f"pytest ended with exit status {ended}, not {exit_status}")
    measurements: list[Measurement] = json.loads((ROOT / path).read_text())["measurements"]
    if len(measurements) != 2 or any(measurement["verdict"] is None for measurement in measurements):
        raise Surprise(f"not both examples were measured, says {path}")
    return measurements


def expect(measurement: Measurement, *allowed: str) -> None:
    status, reason = measurement["verdict"]["status"], measurement["verdict"]["reason"]
    if status not in allowed:
        raise Surprise(f"{measurement['nodeid']} was to be {' or '.join(allowed)}, but is {status} ({reason})")


def changes(measurement: Measurement) -> str:
    """The change of every gated percentile, with its bounds: "p10 +48% (+44% to +53%)"."""
    return ", ".join(
        "{limit[metric]} {change[estimate]:+.0%} ({change[low]:+.0%} to {change[high]:+.0%})".format(**comparison)
        for comparison in measurement["verdict"]["comparisons"]
    )


def slower(comparison: dict[str, Any]) -> bool:
    """Whether it is the step time that failed, beyond its limit."""
    return comparison["status"] == "REGRESSED" and comparison["limit"]["metric"] in ("p10", "p50")


def play() -> None:
    """All three acts; raises Surprise in the first that did not go as told."""
    shutil.rmtree(ROOT / FOLDER, ignore_errors=True)

    headline("Act 1 of 3: save a baseline")
    for measurement in run_examples("act1.json", "--ddp-save-baseline", exit_status=0):
        if not measurement["saved"]:
            raise Surprise(f"{measurement['nodeid']} saved no baseline")

    headline("Act 2 of 3: the same code again, and the gate lets it pass")
    for measurement in run_examples("act2.json", exit_status=0):
        expect(measurement, "PASS", "IMPROVED", "INCONCLUSIVE")

    headline("Act 3 of 3: gradient buckets far too small, and the gate must fail")
    measurements = run_examples("act3.json", exit_status=1, **REGRESSION)
    for measurement in measurements:
        expect(measurement, "REGRESSED")
        if not any(map(slower, measurement["verdict"]["comparisons"])):
            raise Surprise(f"{measurement['nodeid']} is REGRESSED, but not in its step time")
    say("\nThe gate caught what was planted, in the step times of both examples:")
    for measurement in measurements:
        say(f"  {measurement['test']['name']}: {changes(measurement)}")


def main() -> int:
    began = time.monotonic()
    try:
        play()
    except Surprise as surprise:
        say(f"\nThe demo did NOT go as told: {surprise}.")
        say("A machine busy with other work can do that; the reports and baselines are in .demo.")
        return 1
    say(f"\nAll three acts went as told, in {time.monotonic() - began:.0f} s. Reports and baselines are in .demo.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
