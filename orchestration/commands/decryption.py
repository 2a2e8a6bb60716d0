"""`dpsweep decrypt`: decrypt a private file of a sweep for its owner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.sealed import read_encrypted
from dpsweep.orchestration.commands import options
from dpsweep.orchestration.commands.options import write_file
from dpsweep.orchestration.comparison.formats import for_terminal
from dpsweep.orchestration.records.layout import absolute


def decrypt(
    file: Annotated[str, typer.Argument(help="A file below a folder private/, or its URI.", metavar="FILE")],
    to: Annotated[Path, typer.Option(help="The file to write, readable by you only.", metavar="FILE")],
) -> None:
    """Decrypt a private file with the key in DPSWEEP_KEY, such as private/report.html or a trial's error.txt."""
    uri = absolute(file)
    try:
        content = read_encrypted(uri)
    except FileNotFoundError:
        raise InvalidInput(f"there is no {uri}; name a file below a folder private/ of a sweep") from None
    write_file("--to", to, content, private=True)
    typer.echo(for_terminal(f"{to}: {len(content):,} bytes, not encrypted and readable by you only"))


def register(app: typer.Typer) -> None:
    """Add the command ``decrypt`` to ``app``."""
    app.command(**options.listed(options.PRIVACY, "decrypt runs/quickstart/private/report.html --to report.html"))(
        decrypt
    )
