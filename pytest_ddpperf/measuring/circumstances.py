"""What differs between a session of a baseline and now, beside the code: facts in, circumstances out. What they come to
is `verdict`'s to say."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

from pytest_ddpperf.measuring import provenance
from pytest_ddpperf.measuring.benchmark import Measured
from pytest_ddpperf.records import Baseline, Distribution, Recording, Scalar
from pytest_ddpperf.verdict import Circumstances

# What may make the same code slower, and is no property of the machine at hand.
_ENVIRONMENT = ("python", "torch", "cuda", "hip", "nccl", "driver")
_VARIABLE = "env:"


def variables_then(measured: Measured, session: Recording) -> dict[str, str]:
    """Where nothing of the environment differs but variables: those, as assignments that make them what they were, and
    how they differ. Else both sides have those at hand."""
    now, then = measured.result.environment.recorded, session.measurement.environment.recorded
    brought = provenance.distributions(_imported(measured))
    if any(_differing(now, then, _is_version)) or any(_installed(brought, session.distributions, added=False)):
        return {}
    differ = [name for name in {*now, *then} if _is_variable(name) and now.get(name) != then.get(name)]
    if any(map(_of_a_place, (fact for name in differ for fact in (now.get(name), then.get(name))))):
        return {}
    lines = _differing(now, then, _is_variable)
    held = (name.removeprefix(_VARIABLE) + (f"={then[name]}" if name in then else "") for name in sorted(differ))
    return dict(zip(held, lines, strict=True))


def _of_a_place(value: Scalar) -> bool:
    """Whether it may be a path, which means nothing on another host or on another day."""
    return os.sep in str(value)


def _imported(measured: Measured) -> set[str]:
    """Top-level modules from outside the repository."""
    return {module for launch in measured.shown for module in launch.others}


def circumstances(
    measured: Measured, baseline: Baseline, session: Recording, variables: Mapping[str, str], *, code_differs: bool
) -> Circumstances:
    """Of `measured`, held against the last `session` of its baseline. `variables`, as of `variables_then`: those that
    the baseline's code ran with. `code_differs`: whether ranks of both sides imported files that differ."""
    now, then = measured.result.environment.recorded, session.measurement.environment.recorded
    hosts = {each.measurement.environment.recorded.get("host") for each in baseline.sessions}
    files = provenance.files([launch.files for launch in measured.shown])
    others = _imported(measured)
    brought = provenance.distributions(others)
    return Circumstances(
        another_host=now.get("host") not in hosts,
        environment=(
            *_differing(now, then, _is_version),
            *(() if variables else _differing(now, then, _is_variable)),
            *_installed(brought, session.distributions, added=not code_differs),
        ),
        variables=tuple(variables.values()),
        code_differs=code_differs,
        code_is_todays=all(session.files.get(file) == held for file, held in files.items() if file in session.files)
        and brought == session.distributions,
        unaccounted=provenance.unaccounted(others),
    )


def _installed(now: Mapping[str, Distribution], then: Mapping[str, Distribution], *, added: bool) -> Iterator[str]:
    """Distributions that are others; those that one side alone imports, too, where it is not its code that does."""
    for name in sorted({*now, *then}):
        before, after = then.get(name), now.get(name)
        if before is not None and after is not None and before != after:
            build = ", another build" * (before.version == after.version)
            yield f"{name} {before.version} -> {after.version}{build}"
        elif added and (before is None or after is None):
            yield f"{name} {before.version if before else 'not there'} -> {after.version if after else 'not there'}"


def _is_version(name: str) -> bool:
    return name in _ENVIRONMENT


def _is_variable(name: str) -> bool:
    return name.startswith(_VARIABLE)


def _differing(now: Mapping[str, Scalar], then: Mapping[str, Scalar], chosen: Callable[[str], bool]) -> tuple[str, ...]:
    """A line each of the chosen facts that differ, by name."""
    return tuple(
        f"{name.removeprefix(_VARIABLE)} {then.get(name, 'unset')} -> {now.get(name, 'unset')}"
        for name in sorted({*now, *then})
        if chosen(name) and now.get(name) != then.get(name)
    )
