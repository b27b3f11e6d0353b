"""The arguments of the public fixtures: what is wrong with them is raised before any launch.

What may raise hides its frame, so that --pdb opens in the test's.
"""

import inspect
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pytest_ddpperf.options.settings import Settings
from pytest_ddpperf.records.errors import short_repr
from pytest_ddpperf.records.figure import Figure
from pytest_ddpperf.records.metric import why_no_figure
from pytest_ddpperf.records.plan import (
    MARK,
    UPDATE,
    Command,
    Limits,
    Plan,
    Program,
    Setup,
    Variables,
)
from pytest_ddpperf.wire import payload
from pytest_ddpperf.wire.source_trees import Trees
from pytest_ddpperf.wire.variables import concealed_words, digest

_WHAT_SETUP_DOES = {
    "setup": "setup(ctx) returns the step to time",
    "main": "main(ctx) trains in a loop of its own",
    "trainer": "trainer(ctx), or trainer(ctx, shared) with a master, returns the step to time",
    "master": "master(ctx) returns what every trainer gets",
    "parameter_server": "parameter_server(ctx) prepares a server",
    "fn": "fn(ctx, ...) runs on every rank",
    "reference": "reference(ctx) is what the test is compared with",
}
_OPTIONAL = ("master", "parameter_server", "reference")


class Reference(NamedTuple):
    """What a call compares its measurement with in the same run."""

    setup: Setup
    settings: Settings  # of the test, with the limits of the call


def check_setup(
    fixture: str, role: str, setup: Any, given: str = "ctx", count: int = 1
) -> None:
    """Raise TypeError if a function for ranks cannot be called with what is `given`, so many
    arguments."""
    __tracebackhide__ = True
    name, problem = payload.name_of(setup), ""
    if not callable(setup) or payload.is_model(setup):
        problem = f"must be a function, not {name}"
    elif not payload.accepts(setup, count):
        problem = f"is called with {given}, which {name} does not take"
    elif inspect.iscoroutinefunction(setup):
        problem = f"must be a function without async, which {name} is not"
    if problem:
        called = f"{fixture}.loop" if role == "main" else fixture
        raise TypeError(
            f"{called}({name}): {role} {problem}: {_WHAT_SETUP_DOES[role]}"
        )


def check_setups(fixture: str, setups: Mapping[str, Any]) -> None:
    """Check the set-up functions of a measurement by role, as `check_setup`: the master's before
    the trainer's, which it gives an argument. Some roles may have none."""
    __tracebackhide__ = True
    for role, setup in reversed([*setups.items()]):
        if role == "trainer" and setups["master"] is not None:
            check_setup(fixture, role, setup, "ctx and shared", 2)
        elif setup is not None or role not in _OPTIONAL:
            check_setup(fixture, role, setup)


def check_name(name: Any) -> None:
    """Raise ValueError for a name of a measurement that no report could show."""
    __tracebackhide__ = True
    if name is None:
        return
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ValueError(
            f"name={short_repr(name)}: must be printable and not empty: it is used in reports and"
            " file names"
        )


def check_boundary(boundary: Any) -> None:
    """Raise ValueError for what does not say where a step of a program ends."""
    __tracebackhide__ = True
    # a program that runs as __main__ defines its functions too late
    is_function = re.fullmatch(r"(?!__main__:)[\w.]+:[\w.]+", str(boundary))
    if boundary not in (UPDATE, MARK) and not is_function:
        raise ValueError(
            f'boundary={short_repr(boundary)}: must be "{UPDATE}", "{MARK}" or'
            ' "module:function"'
        )


def check_number(name: str, value: Any, what: str = "") -> None:
    """Raise ValueError if a value is given that is no whole number from 1, or one that no machine
    could have."""
    __tracebackhide__ = True
    if value is not None and (
        type(value) is not int or not 1 <= value <= 1_000_000_000
    ):
        raise ValueError(
            f"{name}={short_repr(value)}: {what}a whole number from 1 to 1,000,000,000"
        )


def check_facts(facts: Any) -> dict[str, str | int | float | bool]:
    """Return the facts that a test gives; raises ValueError unless they are text, numbers or truth
    values by name."""
    __tracebackhide__ = True
    what = "a fact has a name, and is text, a finite number, True or False"
    given = facts or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"facts={short_repr(facts)}: give a dict: {what}")
    for name, value in given.items():
        is_name = isinstance(name, str) and name.isprintable() and name.strip()
        is_number = type(value) is float and math.isfinite(value)
        if not (is_name and (is_number or type(value) in (str, int, bool))):
            raise ValueError(f"facts={short_repr({name: value})}: {what}")
    return dict(given)


def check_figures(fixture: str, figures: Any) -> dict[str, Figure]:
    """Return the figures that a program writes; raises TypeError and ValueError."""
    __tracebackhide__ = True
    given = figures or {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{fixture}(figures={short_repr(figures)}): give a dict of Figure by name"
        )
    for name, figure in given.items():
        place = f"{fixture}(figures={{{short_repr(name)}: ...}})"
        if not isinstance(figure, Figure):
            raise TypeError(
                f"{place}: must be a Figure of pytest_ddpperf, not {short_repr(figure)}"
            )
        problem = why_no_figure(name)
        if bool(figure.pattern) == bool(figure.key) or (
            figure.key and not figure.file
        ):
            problem = (
                "give Figure(pattern=...), of the output or of file=..., or Figure(file=...,"
                " key=...)"
            )
        if problem:
            raise ValueError(f"{place}: {problem}")
    return dict(given)


# Modules and console scripts.
_LAUNCHERS = re.compile(
    r"torch\.distributed\.(run|launch|elastic\..+)|accelerate\.commands\..+|deepspeed\.launcher\..+|horovod\.runner.*"
    r"|lightning(_|\.)fabric\.cli|trl\.cli\..+"
    r"|torchrun|accelerate(-launch)?|deepspeed|horovodrun|fabric|trl"
)
_PATH = (str, os.PathLike)


def _are_words(given: Any) -> bool:
    return isinstance(given, list | tuple) and all(
        isinstance(each, (*_PATH, int, float)) for each in given
    )


def read_program(
    fixture: str,
    words: tuple[Any, ...],
    root: Path,
    args: Any,
    cwd: Any,
    env: Any,
) -> Program:
    """Return the program that `script` is called with; raises ValueError."""
    __tracebackhide__ = True
    is_module = words[:1] == ("-m",)
    if len(words) != 1 + is_module or not isinstance(
        words[-1], str if is_module else _PATH
    ):
        raise ValueError(
            f'{fixture}.script{short_repr(words)}: give a path, or "-m" and the name of a module;'
            " its arguments are args=[...]"
        )
    call = f"{fixture}.script"
    folder = read_folder(call, root, cwd)
    path = str(words[-1] if is_module else folder / words[-1])
    if _LAUNCHERS.fullmatch(path if is_module else Path(path).name):
        raise ValueError(
            f"{fixture}.script: {words[-1]} starts ranks itself: give the program that it starts,"
            f" or use {fixture}.command"
        )
    if not is_module and not Path(path).is_file():
        raise ValueError(
            f"{fixture}.script({short_repr(words[-1])}): there is no file {path}: paths begin at"
            " cwd= or rootdir"
        )
    if not _are_words(args):
        raise ValueError(
            f"{fixture}.script(args={short_repr(args)}): give a list, each argument for itself"
        )
    return Program(
        path=path,
        is_module=is_module,
        args=tuple(map(str, args)),
        cwd=str(folder),
        env=read_variables(call, env),
    )


def read_reference(
    fixture: str, reference: Any, root: Path, args: Any, cwd: Any, env: Any
) -> Program | None:
    """Return the program of `script(reference=...)`, if there is one: a path, which gets the
    arguments of the test's own, or a list with the arguments of its own. Raises ValueError."""
    __tracebackhide__ = True
    if reference is None:
        return None
    if not isinstance(reference, list | tuple):
        return read_program(fixture, (reference,), root, args, cwd, env)
    words = tuple(reference)
    first = 2 if words[:1] == ("-m",) else 1
    return read_program(fixture, words[:first], root, words[first:], cwd, env)


def name_of(program: Any, root: Path, trees: Trees | None) -> str:
    """Return the command line of a program or a command as a file may hold it, or the name of a
    function."""
    if isinstance(program, Program):
        name = ["-m"] if program.is_module else []
        words = [*name, program.path, *program.args]
    elif isinstance(program, Command):
        words = [
            word.replace(sys.executable, "python") for word in program.words
        ]
    else:
        return payload.name_of(program)
    return _as_anywhere(program.env, words, root, trees)


def read_folder(call: str, root: Path, cwd: Any) -> Path:
    """Return where a program runs; raises ValueError."""
    __tracebackhide__ = True
    below = cwd or ""
    if not isinstance(below, _PATH) or not (root / below).is_dir():
        raise ValueError(
            f"{call}(cwd={short_repr(cwd)}): give the path of a folder, from rootdir"
        )
    return root / below


def read_variables(call: str, env: Any) -> dict[str, str]:
    """Return the further variables of a program; raises ValueError."""
    __tracebackhide__ = True
    variables = env or {}
    if not isinstance(variables, Mapping) or not all(
        isinstance(each, str) for each in chain(*variables.items())
    ):
        # values may be secret: none is shown
        raise ValueError(f"{call}(env=...): give a dict of texts")
    if 2 * len(variables.items() & os.environ.items()) > len(os.environ):
        # These values differ from run to run, and would replace what is set for ranks.
        raise ValueError(
            f"{call}(env=...): give only further variables, not a copy of os.environ"
        )
    return dict(variables)


def read_command(
    call: str, words: Any, root: Path, cwd: Any, env: Any
) -> Command:
    """Return the command that is to run; raises ValueError."""
    __tracebackhide__ = True
    if not _are_words(words) or not words:
        raise ValueError(
            f"{call}({short_repr(words)}): give a list, each word for itself:"
            ' ["torchrun", "train.py"]'
        )
    return Command(
        words=tuple(map(str, words)),
        cwd=str(read_folder(call, root, cwd)),
        env=read_variables(call, env),
    )


def check_limits_of_command(limits: Limits, plan: Plan) -> None:
    """Raise ValueError for a limit of a test's own that its command cannot have."""
    __tracebackhide__ = True
    for limit in limits:
        if not (limit.kind.own_figure or limit.kind.applies_to(plan)):
            raise ValueError(
                f"@pytest.mark.ddp(threshold=...): {limit}: a launch of a command has one wall"
                " time, and its steps and ranks are not seen: limit wall, or a figure of figures="
            )


def _as_anywhere(
    env: Variables, words: Sequence[str], root: Path, trees: Trees | None
) -> str:
    """Return a command line with its variables, whose values may be secret: the same on every
    machine, in each run, and in every version of the code. So without `root`, and without paths of
    temporary files: a folder of a test's own is another one in each run."""
    as_current = trees.as_current if trees else str
    home = as_current(str(root))
    # pytest resolves links in the path of tmp_path
    temporary = tempfile.gettempdir()
    rules = [
        # neither in "/mnt/repo" nor in "/repo-2", but in "-I/repo"
        (
            rf"(?:(?<![\w.-])|(?<=^-\w)|(?<=\s-\w)){re.escape(home)}(?:{os.sep}|(?![\w.@-]))",
            "",
        ),
        *(
            (rf"{re.escape(place)}{os.sep}\S*", "TEMPORARY")
            for place in (temporary, os.path.realpath(temporary))
        ),
    ]
    if temporary.startswith(f"{home}{os.sep}"):
        rules.reverse()

    def same(text: str) -> str:
        for place, instead in rules:
            text = re.sub(place, instead, as_current(text))
        return text

    own = [
        f"{name}={digest(same(value))}" for name, value in sorted(env.items())
    ]
    line = shlex.join(concealed_words([*map(same, words)]))
    return " ".join([*own, line])
