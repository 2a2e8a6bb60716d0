"""Build the pages as a site with search, the full API and the report of a sweep: ``python -m docs --help``."""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rich
from sphinx.application import Sphinx

import dpsweep
from docs.reference import FURTHER, MODULES

ROOT = Path(__file__).parent.parent
_SETTINGS: dict[str, Any] = {
    "project": "dpsweep",
    "extensions": ["myst_parser", "sphinx.ext.autodoc"],
    "root_doc": "README",
    "include_patterns": ["*.md", "docs/*.md", "examples/*.md"],
    "html_theme": "furo",
    "html_title": "dpsweep",
    "html_copy_source": False,
    "myst_heading_anchors": 4,
    "suppress_warnings": ["myst.header"],  # a level of headings that is left out
    "default_role": "py:obj",  # single backticks in docstrings
    "autodoc_member_order": "bysource",
    "autodoc_typehints": "description",
}


def main() -> None:
    """Build the site into a folder; a broken link or reference is an error."""
    parser = argparse.ArgumentParser(prog="python -m docs", description=__doc__)
    parser.add_argument("--output", default=ROOT / "build" / "site", type=Path, help="folder of the site")
    parser.add_argument(
        "--sweep", default="sweeps/quickstart.yaml", help="sweep whose report is shown; it is run if it was not"
    )
    arguments = parser.parse_args()
    report = dpsweep.run(arguments.sweep, console=rich.get_console()).report()
    build(arguments.output, report)
    print(f"open {arguments.output / 'README.html'}")


def build(output: Path, report: str) -> None:
    """Write the site into ``output``, with a copy of the report that may be shared."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(report, Path(folder) / "report.html")
        app = Sphinx(
            srcdir=ROOT,
            confdir=None,
            outdir=output,
            doctreedir=Path(folder) / "doctrees",
            buildername="html",
            confoverrides=_SETTINGS | {"html_extra_path": [f"{folder}/report.html"]},
            warningiserror=True,
        )
        app.connect("source-read", _complete)
        app.build()
        if app.statuscode:
            raise SystemExit(app.statuscode)


def _complete(_: Sphinx, name: str, source: list[str]) -> None:
    """Add to the pages what only a site has: a link to the report, a list of all pages, the API from docstrings."""
    opening, heading, rest = source[0].partition("\n## ")
    if name == "README":
        index = re.findall(r"\]\(([\w-]+)\.md\)", (ROOT / "docs" / "README.md").read_text())
        pages = [f"docs/{page}" for page in ["README", *index]]
        pages += ["examples/README", "SECURITY", "CONTRIBUTING", "CHANGELOG"]
        contents = "\n".join(["```{toctree}", ":hidden:", "", *pages, "```"])
        source[0] = f'{opening}\n<p><a href="report.html">Open this report</a></p>\n{heading}{rest}\n{contents}\n'
    elif name == "docs/reference":
        source[0] = "\n".join([opening, *_api()])


def _api() -> Iterator[str]:
    """Yield a section for each public module, with every name where it is first exported."""
    listed = ["set_fit_request", "set_score_request"]  # scikit-learn's own
    for name in (*MODULES, FURTHER):
        yield f"\n## {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:"
        yield f"   :exclude-members: {', '.join(listed)}\n```"
        listed += getattr(importlib.import_module(name), "__all__", [])


if __name__ == "__main__":
    main()
