"""A step of a history, measured again by a whole run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_ddpperf.cli.main import main
from pytest_ddpperf.history import folder
from pytest_ddpperf.history.entry import Kept
from tests.integration.conftest import SMALL, Run
from tests.integration.conftest import STEP as PLAIN_STEP
from tests.integration.test_against import SECOND, STEP, Repository, repository
from tests.unit.test_history import history, stepped

__all__ = ["repository"]

MARKER = "@pytest.mark.ddp(world_size=(1, 2))"
SIZED = """
@pytest.mark.parametrize("kind", ["bf16"])
def test_step(ddp_benchmark, kind):
    ddp_benchmark(lambda ctx: lasting(ctx, speed.MILLISECONDS))
"""


def with_a_step(repository: Repository, run: Run, earlier: str, later: str, *asked: str) -> Kept:
    """A history of what a run measures here, with a step between two commits; what each of its runs has."""
    kept = repository.top.parent / "kept"
    assert run(f"--ddp-history={kept}", *asked).ret == 0
    (file,) = kept.glob("*/*.json")
    (measured,) = folder.read(kept)
    file.unlink()
    (row,) = measured.measurements
    for day, each in enumerate(history(stepped((40, 240.0)))):
        ran = replace(each.run, commit={39: earlier, 40: later}.get(day, each.run.commit))
        figures = each.measurements[0].launch_seconds
        folder.add(kept, replace(measured, run=ran, measurements=(replace(row, launch_seconds=figures),)))
    return row


def confirm(repository: Repository) -> list[str]:
    small = [option for option in SMALL if not option.startswith("--ddp-threshold")]
    kept = repository.top.parent / "kept"
    return ["history", "confirm", "test_step", "--in", str(kept), f"--option={' '.join(small)}"]


@pytest.mark.parametrize(
    ("marker", "options"), [(MARKER, ()), ("", ("--ddp-world-size=1,2",))], ids=["marker", "option"]
)
def test_a_step_of_a_test_with_several_world_sizes_is_measured_again_with_its_own(
    repository: Repository,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    marker: str,
    options: tuple[str, ...],
) -> None:
    """With 60 instead of 5 ms from the second commit on; the history is what a run of each would have added."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly -p no:benchmark")
    repository.write("tests/test_step.py", STEP, marker, SIZED)
    earlier = repository.commit()
    repository.write("src/speed/__init__.py", SECOND)
    later = repository.commit()
    row = with_a_step(repository, run, earlier, later, "-k", "ws2", *options)
    assert (row.test.name, row.sized) == ("test_step[bf16]", True)
    status = main(confirm(repository))
    out = capfd.readouterr().out
    assert status == 1, out
    assert f"measuring {later[:12]} beside {earlier[:12]}" in out
    assert "REGRESSED  tests/test_step.py::test_step[bf16-ws2]  p10 x 12" in out
    assert "ws1" not in out


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ("README.md", "--ddp-against: nothing differs between "),
        ("src/speed/__init__.py", "no test imported a file that differs between "),
    ],
    ids=["text", "not imported"],
)
def test_a_step_of_which_both_sides_are_the_same_is_neither_confirmed_nor_refuted(
    repository: Repository,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    changed: str,
    why: str,
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly -p no:benchmark")
    repository.write("tests/test_step.py", PLAIN_STEP, "def test_step(ddp_benchmark): ddp_benchmark(lasting)\n")
    earlier = repository.commit()
    repository.write(changed, SECOND)
    with_a_step(repository, run, earlier, repository.commit())
    status = main(confirm(repository))
    out, err = capfd.readouterr()
    assert status == 5, out + err
    assert f"ddpperf: {why}" in err
