"""Makes the published results of the suite anew, from one run, so that no figure comes from older
code.

    python benchmarks/suite_pages.py [--size tiny]

Runs the whole suite, with figures. In docs/suite*.md it then replaces what is between `<!-- suite:
TITLE -->` and `<!-- end -->` by the first table whose first line begins with TITLE; with `<!--
suite: TITLE | word, word -->` only by those of its rows that have one of the words. Figures of the
names that are there are replaced, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(
    r"( *)<!-- suite: (.*?)(?: \| (.*?))? -->\n.*?<!-- end -->", re.DOTALL
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--size", default="tiny", choices=("tiny", "small", "full")
    )
    size = parser.parse_args().size
    with tempfile.TemporaryDirectory() as folder:
        report, figures = Path(folder) / "report.json", Path(folder) / "figures"
        options = (
            f"--ddp-suite-size={size}",
            f"--ddp-json={report}",
            f"--ddp-suite-plots={figures}",
        )
        command = [
            str(Path(sys.executable).with_name("pytest")),
            "--pyargs",
            "pytest_ddpperf.suite",
            *options,
        ]
        environ = {
            name: value for name, value in os.environ.items() if name != "CI"
        }
        began = time.monotonic()
        ended = subprocess.run(
            [*command, "-p", "no:randomly", "-p", "no:cacheprovider"],
            cwd=folder,
            env=environ,
        )
        print(f"{time.monotonic() - began:.0f} s")
        if ended.returncode:
            return ended.returncode
        lines = json.loads(report.read_text())["sections"][
            "pytest_ddpperf.suite"
        ]
        pages = [DOCS / "suite.md", *sorted((DOCS / "suite").glob("*.md"))]
        for page in pages:
            page.write_text(
                _BLOCK.sub(lambda found: block(found, lines), page.read_text())
            )
        for figure in (DOCS / "suite").glob("*.png"):
            shutil.copy(figures / figure.name, figure)
    return 0


def block(found: re.Match[str], lines: Sequence[str]) -> str:
    """Return a block with the table of the run; raises SystemExit without one."""
    indent, title, words = found.groups()
    begins = [
        number
        for number, line in enumerate(lines)
        if line.strip().startswith(title)
    ]
    if not begins:
        raise SystemExit(f"the run has no table that begins with {title!r}")
    head, *rows = lines[begins[0] :]
    end = next(
        (
            number
            for number, row in enumerate(rows)
            if not row.startswith((" ", "|"))
        ),
        len(rows),
    )
    rows = rows[:end]
    if words:
        rows = [
            row
            for row in rows
            if any(word.strip() in row for word in words.split(","))
        ]
    shown = "\n".join(f"{indent}    {row}".rstrip() for row in (head, *rows))
    marker = found[0].splitlines()[0]
    return f"{marker}\n\n{shown}\n\n{indent}<!-- end -->"


if __name__ == "__main__":
    sys.exit(main())
