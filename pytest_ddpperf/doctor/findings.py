"""What keeps a machine from being steadier, and what to change: facts in, findings out. Knows no machine itself.

A gain is told where it was measured, and only there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_ddpperf.doctor import gpus
from pytest_ddpperf.doctor.system import spelt
from pytest_ddpperf.records.doctor import Cores, Finding, Load, Machine, Noise, Resolved, Survey, Trial
from pytest_ddpperf.report import text

# Of a core: what others use beyond that is told.
_BUSY = 0.1
# Of the time that cores had, while it was measured: what the hypervisor took beyond that is told.
_STOLEN = 0.005
# Of memory: less than that left, and pages of files are given up and read again.
_SPARE = 0.1
# Two spreads over five launches each differ so much by chance in one of twenty: the root of F(4, 4) at 95 %, 6.39. Over
# ten it is the root of F(9, 9), 3.18.
_CLEARLY = ((10, 1.78), (5, 2.53))
# Four times as many launches halve what is found. Where twice as fine is not fine enough, it is not launches that are
# missing.
_NEAR = 2.0
# As many processes as are named.
_NAMED = 3
SIBLINGS, NUMA, LOAD = "siblings", "numa", "load"


def trials(survey: Survey) -> tuple[tuple[str, Cores], ...]:
    """The findings that other cores would mend, each with those: as many as there are ranks, at least."""
    if survey.device != "cpu":  # ranks with a device of their own are not pinned
        return ()
    candidates = ((LOAD, _idle(survey)), (SIBLINGS, _one_each(survey)), (NUMA, _of_one_node(survey)))
    usable = set(survey.machine.usable)
    return tuple((code, cores) for code, cores in candidates if survey.world_size <= len(cores) < len(usable))


def _busy(load: Load) -> dict[int, float]:
    return {core.core: core.busy for core in load.cores}


def _idle(survey: Survey) -> Cores:
    busy = _busy(survey.load)
    return tuple(core for core in survey.machine.usable if busy.get(core, 0.0) < _BUSY)


def _one_each(survey: Survey) -> Cores:
    """One hardware thread of each core, the idlest."""
    busy = _busy(survey.load)
    return tuple(min(group, key=lambda core: busy.get(core, 0.0)) for group in survey.machine.siblings)


def _of_one_node(survey: Survey) -> Cores:
    """Those of the NUMA node that has the most, the idlest of several."""
    busy = _busy(survey.load)
    nodes = [node.cores for node in survey.machine.nodes]
    return max(nodes, key=lambda cores: (len(cores), -sum(busy.get(core, 0.0) for core in cores)), default=())


def findings(survey: Survey, noise: Noise | None) -> tuple[Finding, ...]:
    """All of them: what hinders most comes first."""
    tried = {trial.code: trial for trial in noise.trials} if noise is not None else {}
    during = noise.during if noise is not None else None
    return (
        *_unmeasured(survey, noise),
        *_others(survey, tried),
        *_virtual(during),
        *_quota(survey.machine, during),
        *_memory(survey.machine, during),
        *_cores(survey, tried),
        *_clocks(survey.machine),
        *gpus.findings([gpu for gpu in survey.machine.gpus if gpu.index in survey.gpus]),
        *_gpus_without_torch(survey),
        *(_measuring(noise) if noise is not None else ()),
    )


def _unmeasured(survey: Survey, noise: Noise | None) -> Iterator[Finding]:
    if survey.problem:
        yield Finding(
            code="no-ranks",
            problem=f"no rank can be started: {survey.problem}",
            remedy="`python -c 'import torch'` must work with this Python",
            gain=None,
        )
    elif noise is not None and noise.problem:
        yield Finding(
            code="unmeasured",
            problem=f"{'less' if noise.stored else 'nothing'} was measured: {noise.problem}",
            remedy="run it again when the machine is free, or mend that first",
            gain=None,
        )


def _others(survey: Survey, tried: dict[str, Trial]) -> Iterator[Finding]:
    if survey.timing:
        yield Finding(
            code="timing",
            problem=f"others time their steps here now: {', '.join(survey.timing)}",
            remedy="launches take turns with theirs and are not disturbed, but wait: one job a machine is faster",
            gain=None,
        )
    busy = {core: share for core, share in _busy(survey.load).items() if share >= _BUSY}
    if not busy:
        return
    total = sum(busy.values())
    named = (f"{each.name} ({each.pid}) {each.cores:.1f}" for each in survey.load.processes[:_NAMED])
    yield Finding(
        code=LOAD,
        problem=f"others use {total:.1f} of {len(survey.machine.usable)} cores (core {spelt(tuple(busy))}): "
        + (", ".join(named) or "no process that lasts and is seen from here"),
        remedy="let nothing else run meanwhile" + _taskset(tried.get(LOAD)),
        gain=_gain(tried.get(LOAD)),
    )


def _virtual(during: Load | None) -> Iterator[Finding]:
    if during is None or not during.cores:
        return
    stolen = sum(core.stolen for core in during.cores) / len(during.cores)
    if stolen >= _STOLEN:
        yield Finding(
            code="stolen",
            problem=f"the hypervisor took {text.amount(stolen)} of the cores' time while it was measured, for others",
            remedy="a machine with cores of its own (dedicated, not shared or burstable)",
        )


def _quota(machine: Machine, during: Load | None) -> Iterator[Finding]:
    if machine.quota_cores is None:
        return
    cores, seen = len(machine.usable), ""
    if during is not None and during.throttled:
        seen = f"; it was used up {during.throttled} times while it was measured: {during.throttled_seconds:.2g} s lost"
    if machine.quota_cores >= cores and not seen:
        return
    yield Finding(
        code="quota",
        problem=f"the cgroup's quota is the time of {machine.quota_cores:g} cores, and ranks run on {cores}" + seen,
        remedy="whole cores instead of a share of time: docker --cpuset-cpus, or in Kubernetes the static CPU manager "
        "with requests equal to limits",
    )


def _memory(machine: Machine, during: Load | None) -> Iterator[Finding]:
    if during is not None and during.swapped_pages:
        yield Finding(
            code="swap",
            problem=f"{during.swapped_pages} pages were swapped while it was measured",
            remedy="free memory, or `swapoff -a`",
        )
    total, left = machine.memory_bytes, machine.available_bytes
    if total and left is not None and left < _SPARE * total:
        yield Finding(
            code="memory",
            problem=f"{text.amount(left / total)} of the memory is left",
            remedy="end what has it",
        )


def _cores(survey: Survey, tried: dict[str, Trial]) -> Iterator[Finding]:
    machine = survey.machine
    if survey.device != "cpu":
        return
    if survey.crowded:
        yield Finding(
            code="threads",
            problem=f"OMP_NUM_THREADS asks for {survey.crowded} threads a rank, more than its share has cores: all "
            "ranks share all cores",
            remedy="unset it, or ask for fewer",
        )
    elif survey.world_size > len(machine.usable):
        yield Finding(
            code="shared",
            problem=f"{survey.world_size} ranks share {text.several(len(machine.usable), 'core')}",
            remedy="fewer ranks, or more cores",
        )
    shared = [group for group in machine.siblings if len(group) > 1]
    if shared:
        yield Finding(
            code=SIBLINGS,
            problem=f"{len(shared)} cores are two hardware threads each, or more, of which one slows the other",
            remedy="one of each: switch SMT off (`echo off > /sys/devices/system/cpu/smt/control`)"
            + _taskset(tried.get(SIBLINGS)),
            gain=_gain(tried.get(SIBLINGS)),
        )
    nodes = [node for node in machine.nodes if node.cores]
    if len(nodes) > 1:
        yield Finding(
            code=NUMA,
            problem=f"the cores are of {len(nodes)} NUMA nodes: memory is near to some and far from others",
            remedy="the cores of one node" + _taskset(tried.get(NUMA)),
            gain=_gain(tried.get(NUMA)),
        )


def _clocks(machine: Machine) -> Iterator[Finding]:
    slow = [governor for governor in machine.governors if governor != "performance"]
    if slow:
        yield Finding(
            code="governor",
            problem=f"the cores' clocks follow the load (governor {', '.join(slow)})",
            remedy="`cpupower frequency-set -g performance`",
        )
    if machine.boost:
        yield Finding(
            code="boost",
            problem="clocks go beyond the base clock as heat and other cores allow (turbo, boost)",
            remedy="where steady is worth more than fast: `echo 1 > /sys/devices/system/cpu/intel_pstate/no_turbo`, or "
            "`echo 0 > /sys/devices/system/cpu/cpufreq/boost`",
        )


def _gpus_without_torch(survey: Survey) -> Iterator[Finding]:
    if survey.machine.gpus and survey.facts and survey.facts.get("device_type") != "cuda":
        yield Finding(
            code="gpu-unused",
            problem=f"there {'are' if len(survey.machine.gpus) > 1 else 'is'} "
            f"{text.several(len(survey.machine.gpus), 'NVIDIA GPU')}, which this torch ({survey.facts.get('torch')}) "
            "does not see",
            remedy="a torch built for CUDA, and CUDA_VISIBLE_DEVICES that names them",
            gain=None,
        )


def _measuring(noise: Noise) -> Iterator[Finding]:
    """What another way to measure brings."""
    if not noise.stored:
        return
    last = noise.stored[-1]
    bounds = {limit.metric: limit.value for limit in noise.limits if limit.unit == "%"}
    coarse = [metric for metric, bound in bounds.items() if last.resolution.get(metric, 0.0) > bound]
    if not coarse:
        return
    asked = ", ".join(str(limit) for limit in noise.limits if limit.metric in coarse)
    if noise.turns and all(noise.turns[-1].resolution[metric] < last.resolution[metric] for metric in coarse):
        yield Finding(
            code="turns",
            problem=f"against a stored baseline of one session {asked} is finer than what can be found here",
            remedy="--ddp-against REF, which measures both sides in turns",
            gain=_both(noise.turns[-1], last, coarse),
        )
    first = noise.stored[0]
    if all(last.resolution[metric] < min(first.resolution[metric], _NEAR * bounds[metric]) for metric in coarse):
        yield Finding(
            code="launches",
            problem=f"{first.launches} launches a side are few for how far launches differ here",
            remedy=f"--ddp-launches {last.launches}",
            gain=_both(last, first, coarse),
        )
    yield Finding(
        code="sessions",
        problem=f"one session cannot tell how far sessions drift apart: {text.amount(noise.drift)} is assumed",
        remedy="--ddp-extend-baseline on other days: where they are nearer to each other, less is reckoned with",
    )


def _both(better: Resolved, worse: Resolved, metrics: Sequence[str]) -> str:
    """ "finds p10 +4.2 % instead of +17 %"."""
    found = (
        f"{m} +{text.amount(better.resolution[m])} instead of +{text.amount(worse.resolution[m])}" for m in metrics
    )
    return f"finds {', '.join(found)}"


def _taskset(trial: Trial | None) -> str:
    return f", or `taskset -c {spelt(trial.cores)} pytest ...`" if trial is not None else ""


def _gain(trial: Trial | None) -> str:
    """What launches on its cores showed."""
    if trial is None or trial.here is None or trial.all_cores is None:
        return ""
    here, there = trial.here, trial.all_cores
    clearly = next((factor for launches, factor in _CLEARLY if here.launches >= launches), None)
    spreads = ", ".join(
        f"{metric} {text.amount(spread)} instead of {text.amount(there.spread[metric])}"
        for metric, spread in here.spread.items()
    )
    told = f"on core {spelt(trial.cores)} {here.launches} launches spread by {spreads}"
    pairs = [(spread, there.spread[metric]) for metric, spread in here.spread.items()]
    if clearly is None or not any(own * clearly < other for own, other in pairs):
        return f"{told}: no more than chance may bring"
    return told
