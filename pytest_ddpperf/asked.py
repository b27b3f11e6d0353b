"""What is asked of a measurement: the part of the records that every pytest run pays for.

Apart from `records`, which re-exports it, because making some twenty dataclasses takes ten milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What --ddp-fail-on may name: every verdict but PASS, in lower case.
FAIL_ON_NAMES = ("regressed", "improved", "inconclusive", "no-baseline", "incomparable", "not-gated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How much worse than the baseline one metric may get: `p50:5%`, `p95:2ms`, `cpu_p50:5%`."""

    metric: str  # "p50", "p99.9", "cpu_p10"
    value: float  # a share for "%" (0.05), seconds for "ms" (0.002)
    unit: Literal["%", "ms"]
    default: bool = False  # ours, so it may be dropped where the asked steps cannot support it

    @property
    def is_cpu_time(self) -> bool:
        return self.metric.startswith("cpu_")

    @property
    def percentile(self) -> float:
        """The q of pNN, from 0 to 100."""
        return float(self.metric.removeprefix("cpu_").removeprefix("p"))

    def __str__(self) -> str:
        scale = 100.0 if self.unit == "%" else 1000.0
        return f"{self.metric}:{self.value * scale:.10g}{self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a launch needs to know; the same for every launch of a test."""

    world_size: int
    backend: str  # a name torch knows, never "auto"; "" for no process group (the probe)
    device: str  # a device type: "cpu", "cuda", ...
    warmup: int = 0  # steps
    steps: int = 1
    timing: Literal["free", "step"] = "step"
    timeout_seconds: float = 300.0
    seed: int = 0
    preload: tuple[str, ...] = ()
