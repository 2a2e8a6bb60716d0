"""Tokens of texts, by a tokenizer file of the package tokenizers, whoever made it."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.workers.data.source_files import reading
from dpsweep.workers.machine.folders import at_home

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKENS_AT_ONCE: Final = 2**17
"""Number of tokens encoded at a time; the package tokenizers needs about a hundred bytes for each."""
_MOST_IDS: Final = 2**22
"""Most ids of a tokenizer; the largest vocabularies have about 2**18 tokens."""
_MOST_GROWTH: Final = 64
_PADDING: Final = ("[PAD]", "<pad>")


@dataclass(frozen=True)
class Block:
    """Tokens of n rows. ids: [n, t]. own: [n, t], whether a token belongs to the text, not special or padding."""

    ids: npt.NDArray[np.int32]
    own: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer that pads and truncates texts to ``length`` tokens.

    `content`: of its file.
    `place`: its name in errors.
    `tokens`: names by id.
    `padding`: id of the token.
    """

    tokenizer: Tokenizer
    content: bytes
    place: str
    length: int
    tokens: tuple[str, ...]
    padding: int

    @classmethod
    def of_file(cls, file: str, length: int, padding_token: str | None) -> TextEncoder:
        """Load the tokenizer of a file. Raises: InvalidInput without the file, and as `of`."""
        path, content = _read(file)
        return cls.of(content, str(path), length, padding_token)

    @classmethod
    def of(cls, content: bytes, place: str, length: int, padding_token: str | None) -> TextEncoder:
        """Make the tokenizer. Raises: InvalidInput without the package or a padding token, and for no tokenizer."""
        tokenizer = _tokenizer(content, place)
        normalizer = tokenizer.normalizer
        if normalizer is not None and _growth(parsed_json(normalizer.__getstate__())) > _MOST_GROWTH:
            raise InvalidInput(
                f"{place} makes texts more than {_MOST_GROWTH} times as long before they are cut, which would fill the "
                "memory; give another tokenizer"
            )
        ids = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
        if max(ids, default=0) >= _MOST_IDS:
            raise InvalidInput(
                f"{place} gives a token the id {max(ids):,}, but a model would need a row for each of as many ids, at "
                f"most {_MOST_IDS:,}; number the tokens from 0 on"
            )
        padding = _padding(tokenizer, place, padding_token)
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length, pad_id=padding, pad_token=ids[padding])
        names = tuple(ids.get(number, f"(no token {number})") for number in range(max(ids) + 1))
        return cls(tokenizer, content, place, length, names, padding)

    @property
    def at_once(self) -> int:
        """Return the number of texts to encode at a time."""
        return max(1, _TOKENS_AT_ONCE // self.length)

    def encode(self, texts: Sequence[str]) -> tuple[Block, npt.NDArray[np.bool_]]:
        """Return the tokens of the texts, and the flaws of each, as in a `Split`."""
        with _no_panic(self.place):
            found = self.tokenizer.encode_batch(list(texts))
        ids = np.array([each.ids for each in found], dtype=np.int32).reshape(len(texts), self.length)
        special = np.array([each.special_tokens_mask for each in found], dtype=bool).reshape(ids.shape)
        own = ~special & (ids != self.padding)
        is_cut = np.array([bool(each.overflowing) for each in found], dtype=bool)
        return Block(ids, own), np.stack([is_cut, ~own.any(1)], 1)


def padding_beside(file: str) -> str | None:
    """Return the token that the files beside a tokenizer name for the end of short texts; None if they name none, or
    the tokenizer has one itself.

    ``save_pretrained`` of transformers writes them. Decoders such as GPT-2 fill with the token that ends a text.
    Raises: InvalidInput without the package or the file, and for no tokenizer.
    """
    path, content = _read(file)
    tokenizer = _tokenizer(content, str(path))
    if _own_padding(tokenizer) is not None:
        return None
    known = tokenizer.get_vocab(with_added_tokens=True)
    words, model = (_named_beside(path, name) for name in ("tokenizer_config.json", "config.json"))
    given = (words.get("pad_token"), model.get("pad_token_id"), words.get("eos_token"), model.get("eos_token_id"))
    return next((name for each in given if (name := _name_of(each, known)) is not None), None)


def _named_beside(tokenizer: Path, name: str) -> Mapping[str, object]:
    file = tokenizer.with_name(name)
    with contextlib.suppress(OSError, ValueError):
        found = parsed_json(file.read_bytes()) if file.is_file() else None
        return found if isinstance(found, dict) else {}
    return {}


def _name_of(token: object, known: Mapping[str, int]) -> str | None:
    """Return the name of a token that is given by it, a description or the id; None unless it is ``known``."""
    match token:
        case str(name) | {"content": str(name)}:
            return name if name in known else None
        case int() if not isinstance(token, bool):
            return next((name for name, number in known.items() if number == token), None)
        case [int() as first, *_]:  # of several tokens that end a text, as of chat models
            return _name_of(first, known)
    return None


def _read(file: str) -> tuple[Path, bytes]:
    path = at_home(file).absolute()
    if not os.path.exists(path):  # False for a name that is too long
        raise InvalidInput(
            f"there is no tokenizer {path}; correct the path, or fetch a model with it: hf download NAME "
            f"--local-dir {path.parent}"
        )
    with reading(path):
        return path, path.read_bytes()


def _tokenizer(content: bytes, place: str) -> Tokenizer:
    try:
        from tokenizers import Tokenizer  # late: an extra
    except ImportError as error:
        raise InvalidInput("data source 'text' needs the package tokenizers: pip install 'dpsweep[text]'") from error
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises Exception itself
        raise InvalidInput(f"{place} is no tokenizer file; give a tokenizer.json of the package tokenizers") from error


def _growth(normalizer: Mapping[str, Any]) -> int:
    """Return how many times as long a text can become by the texts that a normalizer puts into it."""
    match normalizer["type"]:
        case "Sequence":
            return math.prod(map(_growth, normalizer["normalizers"]))
        case "Replace":
            return max(1, len(normalizer["content"]))
        case "Prepend":
            return 1 + len(normalizer["prepend"])
    return 1


@contextlib.contextmanager
def _no_panic(place: str) -> Iterator[None]:
    """Turn whatever a tokenizer raises into InvalidInput; a panic of its Rust code is no `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise InvalidInput(
            f"the tokenizer {place} cannot encode the texts ({type(error).__name__}); a token that it refers to may be "
            "missing from its vocabulary"
        ) from error


def token_called(tokenizer: Tokenizer, place: str, name: str, key: str) -> int:
    """Return the id of a token. `key`: parameter that names it. Raises: InvalidInput for an unknown token."""
    found = tokenizer.token_to_id(name)
    if found is None:
        raise InvalidInput(
            f"the tokenizer {place} has no token {name!r}; name one that it has by `{key}`{_special_tokens(tokenizer)}"
        )
    return int(found)


def _special_tokens(tokenizer: Tokenizer) -> str:
    """Return the end of a message, with tokens that fill or hide others."""
    special = [repr(token.content) for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return f"; its special tokens are {', '.join(special[:10])}" if special else ""


def _padding(tokenizer: Tokenizer, place: str, named: str | None) -> int:
    if named is not None:
        return token_called(tokenizer, place, named, "padding_token")
    if (own := _own_padding(tokenizer)) is not None:
        return own
    raise InvalidInput(
        f"the tokenizer {place} says nothing of padding; name the token that fills short texts by `padding_token`"
        f"{_special_tokens(tokenizer)}"
    )


def _own_padding(tokenizer: Tokenizer) -> int | None:
    own = (tokenizer.padding["pad_token"],) if tokenizer.padding else ()
    found = map(tokenizer.token_to_id, (*own, *_PADDING))
    return next((int(each) for each in found if each is not None), None)
