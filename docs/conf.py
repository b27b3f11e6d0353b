"""The documentation site: `make docs`. The pages are those that people read in the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform

DOCS = Path(__file__).parent
ROOT = DOCS.parent
_ABOUT = metadata.metadata("pytest-ddpperf")

project = "pytest-ddpperf"
release = version = _ABOUT["Version"]
# Where the repository is, once `[project.urls]` in pyproject.toml says it as `Repository`. Links to
# files outside of docs/ lead there; until then these files are in the site, to be downloaded.
REPOSITORY = dict(
    url.split(", ", 1) for url in _ABOUT.get_all("Project-URL", [])
).get("Repository", "")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3
default_role = "code"  # of docstrings, which are written as Markdown is
highlight_language = "text"  # of what names no other: output
nitpicky = True

# No network: nothing is looked up at other projects, so their names have no links.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|pytest|_pytest|collections|pathlib|typing)\..*"),
    # the types of some fields of a verdict, which docs/json.md describes
    (r"py:class", r"pytest_ddpperf\.records\..*"),
]
# Ranks import torch, a page need not.
autodoc_mock_imports = ["torch"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
add_module_names = False
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
html_copy_source = False
html_static_path = ["site"]
html_css_files = ["site.css"]

# What the product's own commands make of what is kept in docs/sample/: a file of sample/ in the
# site, and its command.
SAMPLES = {
    "page.html": ["html", "run.json", "-o"],
    "history.html": ["history", "history", "--html"],
}


class OutOfDocs(SphinxTransform):
    """Let links to files outside of docs/ lead to the repository, as they do there."""

    default_priority = 10  # before the files to be downloaded are gathered

    def apply(self, **kwargs: object) -> None:
        here = Path(self.env.doc2path(self.env.docname)).parent
        for node in list(self.document.findall(pending_xref)):
            # A link to Markdown that is no page of the site.
            if (
                node.get("refdomain") == "doc"
                and Path(node["reftarget"]).is_absolute()
            ):
                target = os.path.relpath(node["reftarget"] + ".md", here)
                node.replace_self(
                    download_reference("", "", *node.children, reftarget=target)
                )
        for node in list(self.document.findall(download_reference)):
            path = here.joinpath(node["reftarget"]).resolve()
            if REPOSITORY and not path.is_relative_to(DOCS):
                uri = f"{REPOSITORY}/blob/HEAD/{path.relative_to(ROOT)}"
                node.replace_self(
                    nodes.reference("", "", *node.children, refuri=uri)
                )


def without_constructor(
    app: Sphinx, what: str, name: str, *others: object
) -> tuple[str, None] | None:
    """Users are given objects, and construct none but a `Figure`."""
    if what not in ("class", "exception") or name.endswith(".Figure"):
        return None
    return "", None


def draw_samples(app: Sphinx) -> None:
    for name, command in SAMPLES.items():
        path = Path(app.outdir, "sample", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        asked = [sys.executable, "-m", "pytest_ddpperf", *command, path]
        # 1 is a verdict
        if subprocess.run(asked, cwd=DOCS / "sample").returncode not in (0, 1):
            raise ExtensionError(f"sample/{name} could not be drawn")


def setup(app: Sphinx) -> None:
    app.add_transform(OutOfDocs)
    app.connect("autodoc-process-signature", without_constructor)
    app.connect("builder-inited", draw_samples)
