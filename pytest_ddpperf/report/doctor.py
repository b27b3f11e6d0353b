"""What the doctor found, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from pytest_ddpperf.records.doctor import Diagnosis, Load, Machine, Noise, Resolved, Survey
from pytest_ddpperf.report import text

_WIDTH = 110
_GB = 1e9


def about(survey: Survey) -> Iterator[str]:
    """What this machine can run, and what goes on there."""
    machine, facts = survey.machine, survey.facts
    what = [
        ("torch", _torch(survey)),
        ("devices", _devices(survey)),
        ("cores", _cores(machine, str(facts.get("cpu_model") or ""))),
        ("NUMA", ", ".join(f"node {node.number}: {text.several(len(node.cores), 'core')}" for node in machine.nodes)),
        ("memory", _memory(machine)),
        ("cgroup", _cgroup(machine)),
        ("clocks", _clocks(machine)),
        ("now", _now(survey.load)),
        ("a run", survey.place),
    ]
    yield f"{facts.get('host') or 'this machine'}: what it has"
    width = max(len(name) for name, told in what if told)
    for name, told in what:
        if told:
            yield from textwrap.wrap(
                f"  {name.ljust(width)}  {told}", _WIDTH, subsequent_indent=" " * (width + 4), break_on_hyphens=False
            )
    if topology := str(facts.get("topology") or ""):
        yield from (f"    {line}".rstrip() for line in topology.splitlines())


def rest(diagnosis: Diagnosis) -> Iterator[str]:
    """How steady it is, and what to change."""
    if diagnosis.noise is not None and diagnosis.noise.stored:
        yield ""
        yield from _noise(diagnosis.noise, diagnosis.survey.world_size)
    yield ""
    if not diagnosis.findings:
        yield "what to change: nothing was found"
        return
    yield "what to change for steadier results"
    for number, found in enumerate(diagnosis.findings, 1):
        lead = f"  {number}. "
        remedy = f"{found.remedy} (not measured)" if found.gain == "" else found.remedy
        gain = f"measured: {found.gain}" if found.gain else ""
        for indent, line in ((lead, found.problem), ("     -> ", remedy), ("        ", gain)):
            yield from textwrap.wrap(
                line, _WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent), break_on_hyphens=False
            )


def _torch(survey: Survey) -> str:
    if survey.problem:
        return "no rank can be started"
    cuda = f", CUDA {survey.facts['cuda']}" if survey.facts.get("cuda") else ""
    backends = str(survey.facts.get("backends")).replace(",", ", ")
    return f"{survey.facts.get('torch')}{cuda}, with {backends}"


def _devices(survey: Survey) -> str:
    if survey.problem:
        return ""
    count = int(survey.facts.get("device_count") or 0)
    devices = "no accelerator"
    if count:
        model = survey.facts.get("device_model") or survey.facts.get("device_type")
        devices = f"{count} x {model}"
    gpus = [
        f"GPU {gpu.index}: {gpu.power_limit_watts:g} W, {gpu.clock_mhz:g} of {gpu.most_clock_mhz:g} MHz"
        for gpu in survey.machine.gpus
        if None not in (gpu.power_limit_watts, gpu.clock_mhz, gpu.most_clock_mhz)
    ]
    return "; ".join([devices, *gpus])


def _cores(machine: Machine, model: str) -> str:
    told = [text.several(len(machine.usable), "core")]
    if machine.online > len(machine.usable):
        told[0] += f" of {machine.online}"
    if machine.siblings and len(machine.siblings) < len(machine.usable):
        threads = text.several(len(machine.usable), "hardware thread")
        told[0] = f"{threads} of {text.several(len(machine.siblings), 'core')}"
    if machine.packages is not None and machine.packages > 1:
        told.append(f"{machine.packages} packages")
    told += filter(None, [model, "virtual machine" if machine.virtual else ""])
    return ", ".join(told)


def _memory(machine: Machine) -> str:
    if machine.memory_bytes is None:
        return ""
    left = f", {_gigabytes(machine.available_bytes)} available" if machine.available_bytes is not None else ""
    swap = f", {_gigabytes(machine.swap_used_bytes)} swapped" if machine.swap_used_bytes else ""
    pages = f", huge pages: {machine.huge_pages}" if machine.huge_pages else ""
    return f"{_gigabytes(machine.memory_bytes)}{left}{swap}{pages}"


def _cgroup(machine: Machine) -> str:
    cpu = f"the time of {machine.quota_cores:g} cores" if machine.quota_cores is not None else ""
    memory = f"{_gigabytes(machine.memory_limit_bytes)} of memory" if machine.memory_limit_bytes is not None else ""
    return ", ".join(filter(None, [cpu, memory])) or "no limit on CPU time or memory"


def _clocks(machine: Machine) -> str:
    governor = f"governor {', '.join(machine.governors)}" if machine.governors else "no governor is told"
    boost = {True: "boost on", False: "boost off", None: ""}[machine.boost]
    return ", ".join(filter(None, [governor, boost]))


def _now(load: Load) -> str:
    if not load.cores:
        return ""
    busy = ", ".join(f"core {core.core} {core.busy * 100:.0f} %" for core in load.cores if core.busy >= 0.01)
    return f"busy with others: {busy}" if busy else "idle"


def _noise(noise: Noise, world_size: int) -> Iterator[str]:
    ranks = text.several(world_size, "rank")
    yield (
        f"how steady it is: a small DDP step on {ranks}, {text.seconds(noise.step_seconds)}, {noise.steps} a launch; "
        f"{noise.seconds:.0f} s"
    )
    how = "stretch by stretch" if noise.in_stretches else "one launch after the other"
    rows = [("", "launches", "spread", "smallest slowdown that is found")]
    for name, of_kind in (("against a stored baseline", noise.stored), (f"in turns, {how}", noise.turns)):
        rows += [_row(name if number == 0 else "", resolved) for number, resolved in enumerate(of_kind)]
    yield from (f"  {line}" for line in text.aligned(rows))
    yield from textwrap.wrap(
        "launches are a side's, the spread is one standard deviation; slowdowns as large as told are found four "
        f"times out of five. The stored baseline has one session, and {text.amount(noise.drift)} of drift between "
        "sessions is assumed",
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )


def _row(name: str, resolved: Resolved) -> tuple[str, str, str, str]:
    spread = ", ".join(f"{metric} {text.amount(value)}" for metric, value in resolved.spread.items())
    told = ", ".join(f"{metric} +{text.amount(value)}" for metric, value in resolved.resolution.items())
    return name, str(resolved.launches), spread, told


def _gigabytes(value: int | None) -> str:
    return f"{(value or 0) / _GB:.3g} GB"
