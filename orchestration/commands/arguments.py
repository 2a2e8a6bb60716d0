"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Folder = Annotated[str, typer.Argument(help="Folder or URI that `dpsweep run` wrote.", metavar="DIR")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
