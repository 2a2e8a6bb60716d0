"""`dpsweep init`: draft a sweep file for the user's own table."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Final

import typer

from dpsweep.accounting.errors import InvalidInput, full_text
from dpsweep.orchestration.commands.options import write_file
from dpsweep.orchestration.comparison.formats import for_terminal


def init(
    data: Annotated[
        Path,
        typer.Argument(help="A table: .csv or .tsv with a header, .jsonl or .parquet.", metavar="DATA", readable=False),
    ],
    label: Annotated[
        list[str], typer.Option(help="The column that models predict: classes or numbers. Or several: repeat it.")
    ],
    group: Annotated[
        list[str] | None, typer.Option(help="The column whose groups are compared (default: the label).")
    ] = None,
    user: Annotated[
        list[str] | None, typer.Option(help="The column that names the owner of each row, if one may have several.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="A column of texts: its letters are counted, or read by --tokenizer or --pretrained."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json of the package tokenizers.", readable=False)
    ] = None,
    pretrained: Annotated[
        Path | None, typer.Option(help="A folder with a pretrained model of the package transformers.", readable=False)
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(help="A column of pictures, or of names of their files, which models read in place of features."),
    ] = None,
    to: Annotated[Path | None, typer.Option(help="The file to write (default: the table's name, .yaml).")] = None,
) -> None:
    """Draft a commented sweep for a table: task, types, ranges and categories, to be confirmed as public.

    A label of many numbers is for regression, several of 0 and 1 are for multi-label classification. All of it is read
    off the rows, so the file is private data (mode 0600) until you have confirmed it.
    """
    # Errors name the columns that are there, which those of `plan` and `run` withhold: whoever drafts a sweep looks at
    # their own table on their own terminal, has to choose columns by these names, and nothing of it is stored. Where a
    # name is a number they are withheld here too: the table may have no names.
    from dpsweep.orchestration.sweeps.draft import draft_sweep
    from dpsweep.orchestration.sweeps.picture_column import PictureColumn
    from dpsweep.orchestration.sweeps.text_column import TextColumn
    from dpsweep.workers.data import require_path

    group_column, user_column = _one("--group", group), _one("--user", user)
    text_column, image_column = _one("--text", text, _JOINED), _one("--image", image, _ONE_PICTURE)
    require_path(str(data))  # before the tokenizer, as whoever has neither would correct its path alone
    read: TextColumn | PictureColumn | None = None if image_column is None else PictureColumn(image_column)
    if text_column is not None:
        read = TextColumn.read_by(text_column, tokenizer, pretrained)
    hashed = text_column if read is None else None
    target = Path(f"{data.stem}.yaml") if to is None else to
    if os.path.exists(target):  # False for a name that is too long
        raise InvalidInput(f"{target} exists and may hold your changes; name another file with --to")
    try:
        draft = draft_sweep(data, label, group_column, user_column, read, hashed)
    except InvalidInput as error:
        raise InvalidInput(full_text(error)) from error
    write_file("--to", target, draft.encode(), private=True)
    typer.echo(
        for_terminal(f"{target}: confirm what was read off the data, then: dpsweep plan {shlex.quote(str(target))}")
    )


_LISTED: Final = "draft by {first!r}, then list several in the file (docs/data.md)"
_JOINED: Final = "join several to one column of the table first"
_ONE_PICTURE: Final = "draft by {first!r}, as a model reads one picture of each row"


def _one(flag: str, names: list[str] | None, instead: str = _LISTED) -> str | None:
    """Return the only column of an option. instead: the next step for several.

    Raises: InvalidInput for several, as --label has, not to take the last.
    """
    if names and len(names) > 1:
        raise InvalidInput(f"{flag} names one column; {instead.format(first=names[0])}")
    return names[0] if names else None
