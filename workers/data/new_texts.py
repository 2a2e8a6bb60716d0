"""Texts of another table, such as new messages, as the tokens of those that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.workers.data.encoder import TextEncoder
from dpsweep.workers.data.new_rows import NewRows
from dpsweep.workers.data.source_files import require_path
from dpsweep.workers.data.table import Range
from dpsweep.workers.data.texts import Length, texts_of


@dataclass(frozen=True)
class Texts:
    """A column of texts in the words of the sweep file (`text`). `tokenizer`: content of its file, which is public.

    `outputs`: names of the model's outputs; None for classes that are not declared.
    """

    text: str
    tokenizer: str
    max_length: Length
    padding_token: str | None
    encoding: str | None
    task: str
    outputs: Sequence[str] | None
    targets: Mapping[str, Range] = field(default_factory=dict)

    @property
    def example_shape(self) -> list[int]:
        """Return the shape of a text: its number of tokens."""
        return [self.max_length]

    @property
    def scaled(self) -> list[int]:
        """Return the places of features that ranges scale: none."""
        return []

    @property
    def example(self) -> dict[str, str]:
        """Return a row made of declarations."""
        return {self.text: "text"}

    def encoded(self, path: str) -> NewRows:
        """Return the tokens of a .csv, .tsv, .parquet or .jsonl file, which may have other columns, too.

        Raises: InvalidInput for a file without the column or rows, and without the package tokenizers; DataCorruption
        for a file that cannot be read.
        """
        encoder = TextEncoder.of(self.tokenizer.encode(), "of the trial", self.max_length, self.padding_token)
        encoding = self.encoding if path.lower().endswith((".csv", ".tsv")) else None
        ids, has_text, cut = [], list[bool](), 0
        for texts in texts_of(require_path(path), self.text, encoding, encoder.at_once):
            block, flaws = encoder.encode([each for each in texts if each is not None])
            ids.append(block.ids)
            has_text += (each is not None for each in texts)
            cut += int(flaws[:, 0].sum())
        if not has_text:
            raise InvalidInput(f"the table {path} has no rows; give one with at least one")
        rows, lacking = count_of(len(has_text), "row"), has_text.count(False)
        notes = {
            f"{lacking:,} of {rows} have no prediction: they lack a text ({self.text})": lacking,
            f"{self.text}: {cut:,} of {rows} are cut to {self.max_length} tokens": cut,
        }
        told = tuple(note for note, count in notes.items() if count)
        return NewRows(np.concatenate(ids), np.flatnonzero(has_text), len(has_text), told)
