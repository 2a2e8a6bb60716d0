"""Pictures that another table lists, as those that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dpsweep.accounting.errors import count_of
from dpsweep.workers.data.images import SideLength, read_image
from dpsweep.workers.data.listed_images import listed_files, stored_pictures, with_names
from dpsweep.workers.data.new_rows import NewRows, read_new_table
from dpsweep.workers.data.table import Range, Roles, require_once, used_columns
from dpsweep.workers.data.tabular import complete_rows
from dpsweep.workers.machine.folders import at_home


@dataclass(frozen=True)
class Pictures:
    """A column of pictures, or of names of their files, in the words of the sweep file (`image_table`).

    `outputs`: names of the model's outputs; None for classes that are not declared.
    """

    image: str
    size: SideLength
    encoding: str | None
    task: str
    outputs: Sequence[str] | None
    targets: Mapping[str, Range] = field(default_factory=dict)

    @property
    def scaled(self) -> list[int]:
        """Return the places of features that ranges scale: none."""
        return []

    @property
    def example_shape(self) -> list[int]:
        """Return the shape of a picture."""
        return [3, self.size, self.size]

    def encoded(self, path: str) -> NewRows:
        """Return the pictures that a .csv, .tsv, .jsonl or .parquet file names or holds, beside other columns.

        Their names start at the folder of the file, and none may lie outside of it, by its name or by a link. Raises:
        InvalidInput for a file without the column or rows, for pictures that are missing or outside, and for files that
        are none; DataCorruption for files that cannot be read.
        """
        rows = read_new_table(path, {self.image: []}, self.encoding)
        require_once([self.image], rows, path, "leave one of them")
        roles = Roles((), (), None, (self.image,), frozenset((self.image,)))
        rows, stored = with_names(rows, self.image)
        named = used_columns(rows, roles, {self.image: []}, path)
        complete = complete_rows(named)
        names, folder = named[self.image].take(complete), at_home(path).parent
        step = "put the table into the folder where they start"
        files = (
            listed_files(names, folder, path, step) if stored is None else stored_pictures(stored.take(complete), path)
        )
        pictures = [read_image(file, self.size) for file in files]
        lacking, of = rows.num_rows - len(complete), count_of(rows.num_rows, "row")
        note = f"{lacking:,} of {of} have no prediction: they name no picture ({self.image})"
        features = torch.stack(pictures) if pictures else torch.empty(0, *self.example_shape, dtype=torch.uint8)
        return NewRows(features.numpy(), complete, rows.num_rows, (note,) if lacking else ())
