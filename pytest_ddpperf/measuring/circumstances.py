"""What differs between a session of a baseline and now, beside the code: facts in, circumstances out. What they come to
is `verdict`'s to say."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from pytest_ddpperf.measuring import provenance
from pytest_ddpperf.measuring.benchmark import Measured
from pytest_ddpperf.records import Baseline, Distribution, LaunchSamples, Recording, Scalar
from pytest_ddpperf.verdict import Circumstances
from pytest_ddpperf.wire.trees import Trees

Facts = Mapping[str, Scalar]

# What may make the same code slower, and is no property of the machine at hand.
_ENVIRONMENT = ("python", "torch", "cuda", "hip", "nccl", "driver")
_VARIABLE = "env:"
_OPTION = "--"  # of the user's own


@dataclass(frozen=True, slots=True)
class Held:
    """What the baseline's code is to have otherwise than that at hand: what its session had."""

    variables: tuple[str, ...] = ()  # "NAME=VALUE", or "NAME" of one to unset
    options: tuple[tuple[str, str], ...] = ()  # name and value, as of `plugin.outset.own_options`
    told: tuple[str, ...] = ()  # how they differ


def held_then(measured: Measured, session: Recording) -> Held:
    """Where nothing of the environment differs but variables and options: those. Else both sides have those at
    hand."""
    now, then = measured.result.environment.recorded, session.measurement.environment.recorded
    brought = provenance.distributions(_imported(measured.shown))
    if any(_differing(now, then, _is_version)) or any(_installed(brought, session.distributions)):
        return Held()
    differ = sorted(name for name in {*now, *then} if _is_asked(name, now, then) and now.get(name) != then.get(name))
    if any(map(_of_a_place, (fact for name in differ for fact in (now.get(name), then.get(name))))):
        return Held()
    variables = (name for name in differ if name.startswith(_VARIABLE))
    return Held(
        variables=tuple(
            name.removeprefix(_VARIABLE) + (f"={then[name]}" if name in then else "") for name in variables
        ),
        options=tuple((name, str(then[name])) for name in differ if name.startswith(_OPTION)),
        told=_differing(now, then, lambda name: _is_asked(name, now, then)),
    )


def had_others(there: Facts, now: Facts, then: Facts, *, held: Held, trees: Trees) -> tuple[str, ...]:
    """The variables and options that its code ran with, where those are not what they were, to which they were `held`,
    or, where nothing was, neither what they were nor what they are. A folder of the repository is another in its
    tree."""

    def at_hand(value: Scalar) -> Scalar:
        return value.replace(trees.base, trees.hand) if isinstance(value, str) else value

    options = {name for name, _ in held.options}
    found = (name for name in sorted({*there, *now, *then}) if name.startswith(_VARIABLE) or name in options)
    sides = (then,) if held.told else (now, then)
    return tuple(
        f"{name.removeprefix(_VARIABLE)} {there.get(name, 'unset')}"
        for name in found
        if at_hand(there.get(name)) not in [side.get(name) for side in sides]
    )


def _of_a_place(value: Scalar) -> bool:
    """Whether it may be a path, which means nothing on another host or on another day."""
    return os.sep in str(value)


def _imported(launches: Iterable[LaunchSamples]) -> set[str]:
    """Top-level modules from outside the repository."""
    return {module for launch in launches for module in launch.others}


def circumstances(
    measured: Measured,
    baseline: Baseline,
    session: Recording,
    held: Held,
    *,
    there: Iterable[LaunchSamples],
    code_differs: bool,
) -> Circumstances:
    """Of `measured`, held against the last `session` of its baseline. `there`: launches of its own code, which ran with
    what it was `held` to. `code_differs`: whether ranks of both sides imported files that differ."""
    now, then = measured.result.environment.recorded, session.measurement.environment.recorded
    hosts = {each.measurement.environment.recorded.get("host") for each in baseline.sessions}
    files = provenance.files([launch.files for launch in measured.shown])
    others = _imported(measured.shown)
    brought = provenance.distributions(others)
    return Circumstances(
        another_host=now.get("host") not in hosts,
        environment=(
            *_differing(now, then, _is_version),
            *(() if held.told else _differing(now, then, lambda name: _is_asked(name, now, then))),
            *_installed(brought, session.distributions, provenance.distributions(_imported(there))),
        ),
        variables=held.told,
        code_differs=code_differs,
        code_is_todays=all(session.files.get(file) == now for file, now in files.items() if file in session.files)
        and brought == session.distributions,
        unaccounted=provenance.unaccounted(others),
    )


_Distributions = Mapping[str, Distribution]  # by name


def _installed(now: _Distributions, then: _Distributions, there: _Distributions | None = None) -> Iterator[str]:
    """Distributions that are others; those that came or went, too, where that is not the doing of the code at hand:
    `there` are those that the baseline's own code imports today."""
    for name in sorted({*now, *then}):
        before, after = then.get(name), now.get(name)
        if before is not None and after is not None and before != after:
            build = ", another build" * (before.version == after.version)
            yield f"{name} {before.version} -> {after.version}{build}"
        elif there is not None and before != after and (name in there) is (after is not None):
            yield f"{name} {before.version if before else 'not there'} -> {after.version if after else 'not there'}"


def _is_version(name: str) -> bool:
    return name in _ENVIRONMENT


def _is_asked(name: str, now: Facts, then: Facts) -> bool:
    """Whether it is a variable, or an option that both have: one that conftests did not have yet is their code's."""
    return name.startswith(_VARIABLE) or (name.startswith(_OPTION) and name in now and name in then)


def _differing(now: Facts, then: Facts, chosen: Callable[[str], bool]) -> tuple[str, ...]:
    """A line each of the chosen facts that differ, by name."""
    return tuple(
        f"{name.removeprefix(_VARIABLE)} {then.get(name, 'unset')} -> {now.get(name, 'unset')}"
        for name in sorted({*now, *then})
        if chosen(name) and now.get(name) != then.get(name)
    )
