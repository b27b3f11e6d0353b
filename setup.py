"""The README of the built package. On a package index its relative links would lead nowhere, so
here they lead to where `[project.urls]` in pyproject.toml says that the project is. All else of the
build is in pyproject.toml."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from setuptools import setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent
# "![words](" of a picture or "[words](" of a link, and the target
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^()\s]+)")


def with_absolute_links(readme: str, urls: Mapping[str, str]) -> str:
    """Return a README whose links lead to the `Repository`, and those to pages of docs/ to the site
    `Documentation`, if there is one. Without a `Repository` links stay as they are."""
    repository = urls.get("Repository", "").rstrip("/")
    site = urls.get("Documentation", "").rstrip("/")
    if not repository:
        return readme

    def absolute(link: re.Match[str]) -> str:
        before, target = link.groups()
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        page = re.fullmatch(r"docs/(.+)\.md(#.*)?", target)
        if site and page is not None:
            return f"{before}{site}/{page[1]}.html{page[2] or ''}"
        kind = "raw" if before.startswith("!") else "blob"
        return f"{before}{repository}/{kind}/HEAD/{target}"

    return _LINK.sub(absolute, readme)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    readme = (ROOT / "README.md").read_text("utf-8")
    setup(
        long_description=with_absolute_links(
            readme, project["project"].get("urls", {})
        ),
        long_description_content_type="text/markdown",
    )
