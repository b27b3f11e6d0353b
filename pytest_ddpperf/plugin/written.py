"""The reports of a run that are files: what was asked for is written when the session ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_ddpperf import files
from pytest_ddpperf.records.errors import DdpPerfError

if TYPE_CHECKING:
    from pytest_ddpperf.measuring.outcomes import RunResults
    from pytest_ddpperf.plugin.state import Run


def begin(run: Run) -> None:
    """Of reports that were asked for: raises MissingExtraError where one could not be made, before a run that may take
    hours and not at its end, and notes the commit while the run has saved nothing yet, wherever its tests run."""
    settings = run.settings
    if settings.html_path is not None:
        from pytest_ddpperf.report import page

        page.check("--ddp-html")
    asked = (settings.json_path, settings.markdown_path, settings.html_path, settings.history_dir)
    if any(path is not None for path in asked) and not run.worker:
        _ = run.report  # which begins when it is first asked for


def write(run: Run) -> bool:
    """Write the requested reports and return whether all were written. The summary says which were not, and why."""
    from pytest_ddpperf.report.markdown import appends

    reports: tuple[tuple[str, Path | None, Callable[[RunResults], str]], ...] = (
        ("--ddp-json", run.settings.json_path, _json),
        ("--ddp-markdown", run.settings.markdown_path, lambda report: report.markdown()),
        ("--ddp-html", run.settings.html_path, lambda report: report.html()),
    )
    for option, path, text in reports:
        if path is not None:
            with _noting_errors(run.report, f"{option} {path} was not written"):
                files.write(path, text(run.report), append=appends(path))
    if run.settings.history_dir is not None and run.reported:
        with _noting_errors(run.report, "--ddp-history"):
            _remember(run.report, run.settings.history_dir, run.config.rootpath)
    return not run.reported or not run.report.unwritten


@contextmanager
def _noting_errors(report: RunResults, what: str) -> Iterator[None]:
    """Let the summary say why a report was not written. Other reports are still written, but the run fails."""
    try:
        yield
    except OSError as error:
        report.unwritten.append(f"{what}: {error.strerror or error}")
    except DdpPerfError as error:
        report.unwritten.append(f"{what}: {error}")
    except Exception as error:
        report.unwritten.append(f"{what}: {type(error).__name__}: {error}")


def _remember(report: RunResults, root: Path, measured: Path) -> None:
    """Add to the history what it has a place for, of the code in `measured`, and tell what became of it; raises
    HistoryError."""
    from pytest_ddpperf.git import why_unknown
    from pytest_ddpperf.history import entries
    from pytest_ddpperf.report.text import several

    entry = entries.make_entry(report.outcomes, report.run)
    why = entries.why_unfit(report.run) if entry.measurements else "no measurement describes this commit alone"
    if why:
        unknown = entry.measurements and not (report.run.commit and report.run.committed)
        reason = why_unknown(measured) if unknown else ""
        report.messages.append(f"--ddp-history: nothing was added: {why}{f': {reason}' * bool(reason)}")
        return
    path = entries.add_entry(root, entry)
    report.messages.append(f"--ddp-history: {several(len(entry.measurements), 'measurement')} added as {path}")


def _json(report: RunResults) -> str:
    from pytest_ddpperf.records import codec

    return codec.dumps(report.data())
