"""The column of texts of a draft, and the tokenizer and pretrained model that read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dpsweep.accounting.errors import InvalidInput
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
    def max_length(self) -> int:
        """Tokens of a text that a draft keeps: as many as the pretrained model reads, at most 128."""
        places = None if self.pretrained is None else most_tokens(str(self.pretrained))
        return _TOKENS if places is None else min(places, _TOKENS)

    @property
    def has_other_tokenizer(self) -> bool:
        return self.pretrained is not None and has_other_tokenizer(str(self.pretrained), str(self.tokenizer))


_TOKENS: Final = 128
