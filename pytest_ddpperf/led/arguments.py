"""How a pytest that is led is called: as this one, less what writes reports, selects by history or is ours."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

# By how much of the command line follows an option as its value. Both sides would write the same files.
_FLAGS = {
    *("--ddp-save-baseline", "--ddp-extend-baseline", "--ddp-disable"),
    *("-x", "--exitfirst", "--lf", "--last-failed", "--ff", "--failed-first", "--nf", "--new-first"),
    *("--sw", "--stepwise", "--sw-skip", "--stepwise-skip", "--sw-reset", "--stepwise-reset", "--cache-clear"),
    *(
        "--pdb",
        "--trace",
        "--no-cov",
        "--no-cov-on-fail",
        "--cov-append",
        "--cov-branch",
        "--self-contained-html",
        "--json-report",
    ),
    *("--benchmark-autosave", "--benchmark-save-data", "--collect-only", "--co"),
}
_WITH_VALUE = {
    *("--ddp-confirm", "--ddp-suite-plots", "--ddp-markdown", "--ddp-html", "--ddp-annotate", "--ddp-history"),
    *("--ddp-json", "--ddp-against", "--ddp-against-setup", "--ddp-against-python", "--ddp-against-env"),
    *("--ddp-against-option", "--junitxml", "--junit-xml", "--junitprefix", "--junit-prefix", "--basetemp"),
    *("--maxfail", "--lfnf", "--last-failed-no-failures", "--pastebin", "--log-file", "--report-log", "--html"),
    *("--csv", "--json-report-file", "--alluredir", "--benchmark-json", "--benchmark-save"),
    *("--benchmark-compare-fail", "--cov-report", "--cov-config", "--cov-fail-under", "--cov-context"),
}
_WITH_OPTIONAL_VALUE = {"--cov", "--benchmark-compare", "--benchmark-histogram", "--debug"}


def of_led(arguments: Sequence[str], tests: Collection[str]) -> list[str]:
    """`arguments` are all of this run's, those of the ini file and of PYTEST_ADDOPTS first; `tests` are those that
    name tests. Of a named test the whole file is collected: a parameter may exist on one side only."""
    kept, words = [], list(arguments)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name in _FLAGS or word == "--":
            continue
        if name in _WITH_VALUE | _WITH_OPTIONAL_VALUE:
            value_follows = name in _WITH_VALUE or not (words and words[0].startswith("-"))
            if not equals and words and value_follows:
                words.pop(0)
            continue
        if re.fullmatch("-[a-z]*x[a-z]*", word) and set(word[1:]) <= set("xvqsl"):  # -xvs
            word = word.replace("x", "")
            if word == "-":
                continue
        kept.append(word.partition("::")[0] if word in tests else word)
    return kept
