"""Inputs and labels of language models: randomly masked tokens, or next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from dpsweep.workers.tasks import IGNORED

Objective = Literal["label", "masked_lm", "causal_lm"]
_MASKED: Final = 0.8
_REPLACED: Final = 0.9
"""Of the predicted tokens, 80% become the mask token, 10% a random one, 10% stay (Devlin et al. 2019)."""
_ROWS_AT_ONCE: Final = 4096
_WORDS_PER_COUNTER: Final = 4
"""Number of 64-bit words that Philox4x64 makes from one counter."""


@dataclass(frozen=True)
class Block:
    """Tokens of n rows. ids: [n, t]. own: [n, t], whether a token belongs to the text, not special or padding."""

    ids: npt.NDArray[np.int32]
    own: npt.NDArray[np.bool_]


def masked_tokens(
    block: Block, first: int, mask: int, vocabulary: int, fraction: float, seed: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return tokens [n, t] with some masked, and labels [n, t]: the original token where predicted, `IGNORED`
    elsewhere.

    Every own token of a row is predicted with probability ``fraction``, and at least one. The draws for a row depend
    only on ``seed`` and its position; first: position of the first row. mask: id of the mask token.
    """
    ids, labels = block.ids.copy(), np.full(block.ids.shape, IGNORED, dtype=np.int32)
    for start in range(0, len(ids), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        own, tokens = block.own[rows], block.ids[rows]
        chance, action, other = _draws(seed, first + start, *tokens.shape)
        least = np.where(own, chance, np.inf).min(1, initial=np.inf)
        chosen = own & (chance <= np.maximum(fraction, least)[:, None])
        labels[rows][chosen] = tokens[chosen]
        replaced = np.where(action < _MASKED, mask, np.floor(other * vocabulary).astype(np.int32))
        ids[rows] = np.where(chosen & (action < _REPLACED), replaced, tokens)
    return ids, labels


def _draws(seed: int, first: int, rows: int, length: int) -> npt.NDArray[np.float64]:
    """[3, rows, length] uniform numbers in [0, 1); each row has its own section of one random stream."""
    counters = -(-3 * length // _WORDS_PER_COUNTER)
    stream = np.random.Generator(np.random.Philox(key=seed, counter=first * counters))
    drawn = stream.random((rows, counters * _WORDS_PER_COUNTER))[:, : 3 * length]
    return drawn.reshape(rows, 3, length).transpose(1, 0, 2)


def next_tokens(block: Block, padding: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the tokens [n, t], and labels [n, t]: the next token at each position, or `IGNORED` if that is padding.

    The last position has no next token and is `IGNORED` too.
    """
    labels = np.full(block.ids.shape, IGNORED, dtype=np.int32)
    following = block.ids[:, 1:]
    labels[:, :-1] = np.where(following == padding, IGNORED, following)
    return block.ids, labels
