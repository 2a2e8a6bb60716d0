"""The column of texts of a draft, and the tokenizer and pretrained model that read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.sweeps.draft_scale import SCALE_OF_TOKENS, Scale, scale_of
from dpsweep.orchestration.sweeps.read_column import rows_lacking
from dpsweep.workers.data import ColumnProfile, TableProfile, TableTask, padding_beside
from dpsweep.workers.models import has_other_tokenizer, most_tokens


@dataclass(frozen=True)
class TextColumn:
    """A column of texts, the tokenizer file that turns them into tokens, and the folder of a pretrained model, if any.

    Raises: InvalidInput where the folder of a pretrained model is absent, or has no tokenizer.json and none is given.
    """

    name: str
    tokenizer: Path
    pretrained: Path | None = None

    @classmethod
    def read_by(cls, name: str, tokenizer: Path | None, pretrained: Path | None) -> TextColumn | None:
        """Return the column with the tokenizer of the pretrained model where no other is given; None without both."""
        if tokenizer is None and pretrained is not None:
            tokenizer = pretrained / "tokenizer.json"
            if pretrained.is_file():
                raise InvalidInput(f"{pretrained} is a file; give the folder of the model, {pretrained.parent}")
            if not pretrained.is_dir():
                raise InvalidInput(
                    f"there is no folder {pretrained}; fetch a model to one: hf download NAME --local-dir {pretrained}"
                )
            if not tokenizer.is_file():
                raise InvalidInput(
                    f"{pretrained} has no tokenizer.json; give the tokenizer that the model was trained with, or let "
                    "transformers write it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
                )
        return None if tokenizer is None else cls(name, tokenizer, pretrained)

    @property
    def kind(self) -> str:
        return "text"

    @property
    def source(self) -> str:
        return "text"

    @property
    def options(self) -> list[tuple[str, str | None]]:
        """Return the options of `dpsweep init` that give it, by their names; the tokenizer of the model needs none."""
        if self.pretrained is None:
            return [("text", self.name), ("tokenizer", self.tokenizer.name)]
        is_own = self.tokenizer == self.pretrained / "tokenizer.json"
        tokenizer = None if is_own else self.tokenizer.name
        return [("text", self.name), ("tokenizer", tokenizer), ("pretrained", self.pretrained.name)]

    def accepts(self, column: ColumnProfile) -> bool:
        """Return False: only what tables read, too."""
        return False

    def section(self, table: TableProfile) -> Iterator[str]:
        """Yield the lines of a draft that name it. table: profile of the table that has it.

        Raises: InvalidInput where the tokenizer cannot be read.
        """
        column = table.column(self.name, self.kind)
        lacking = f"    # {rows_lacking(column)}" if column.missing else ""
        yield f"  text: {quoted(self.name)}{lacking}"
        yield f"  tokenizer: {quoted(str(self.tokenizer.resolve()))}    # CONFIRM: made of other texts than these"
        if self.has_other_tokenizer:
            yield "  # the folder of the model has a tokenizer.json of its own, which makes other tokens than this one"
        if (padding := padding_beside(str(self.tokenizer))) is not None:
            yield f"  padding_token: {quoted(padding)}    # fills short texts; the tokenizer itself names none"
        yield f"  max_length: {self.max_length}    # tokens; longer texts are cut"

    def model(self, head: str) -> Iterator[str]:
        """Yield the lines of preprocessing and model. head: a remark on a linear model for the task."""
        if self.pretrained is None:
            yield "model: transformer    # small; or a function of your own"
            return
        path = quoted(str(self.pretrained.resolve()))
        lora, adam = "head: linear, adapter: {method: lora}", "optimizer: {name: adam, learning_rate: 0.01}"
        yield "preprocessing:    # reads each text once; no epsilon is spent"
        yield "  name: text_features"
        yield f"  path: {path}    # CONFIRM: trained on other texts than these"
        yield f"model: logistic    # {head}, the head of a frozen model; or, without preprocessing,"
        yield f"# model: {{name: hugging_face, path: {path}, {lora}}}    # an hour in place of a minute; {adam}"

    def scale(self, rows: int, task: TableTask, outputs: int, deviation: float | None) -> Scale:
        """Return the learning rate and bound; arguments as of `scale_of`."""
        return SCALE_OF_TOKENS if self.pretrained is None else scale_of((), rows, task, outputs, deviation, True)

    @property
    def max_length(self) -> int:
        """Tokens of a text that a draft keeps: as many as the pretrained model reads, at most 128."""
        places = None if self.pretrained is None else most_tokens(str(self.pretrained))
        return _TOKENS if places is None else min(places, _TOKENS)

    @property
    def has_other_tokenizer(self) -> bool:
        return self.pretrained is not None and has_other_tokenizer(str(self.pretrained), str(self.tokenizer))


_TOKENS: Final = 128


def quoted(value: str) -> str:
    """Return a text as YAML takes it for one."""
    return json.dumps(value, ensure_ascii=False) if value.isprintable() else json.dumps(value)
