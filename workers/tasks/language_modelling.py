"""Language modelling: predicts a token at each counted position of a sequence, masked tokens or the next ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.tasks.task import IGNORED, Array, Score, Task, labels_within, occurrences, share, wrong_form

if TYPE_CHECKING:
    from torch import Tensor


def _loss(sums: Array) -> Array:
    return share(sums[..., 0], sums[..., 1])


def _perplexity(sums: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.exp(_loss(sums))


class LanguageModelling(Task):
    """Labels: integers [n, t], the token at each of t positions, or `IGNORED` if it is not counted.

    Outputs: [t, V], at each position a logit for each of V tokens.
    """

    name = "language_modelling"
    main = "token_accuracy"
    scores = (
        Score(
            "token_accuracy",
            "Token accuracy",
            "higher",
            "share",
            lambda sums: share(sums[..., 2], sums[..., 1]),
            "The share of counted tokens of test data that the model gives the highest probability.",
        ),
        Score(
            "perplexity",
            "Perplexity",
            "lower",
            "number",
            _perplexity,
            "The exponential of the mean of −ln p over the counted tokens: every token counts alike, while the loss "
            "of training weighs every example alike.",
        ),
        Score("token_loss", "Token loss", "lower", "number", _loss, "The mean of −ln p over the counted tokens."),
    )

    def check_labels(self, what: str, labels: Tensor, names: tuple[str, ...]) -> None:
        if labels.ndim != 2 or labels.is_floating_point():
            takes = (
                f"language_modelling takes int64 [n, t]: a token for each position, {IGNORED} where it is not counted"
            )
            raise wrong_form(what, labels, takes)
        if not labels_within(labels, len(names)):
            raise InvalidInput(f"{what} must be tokens from 0 to {len(names) - 1}, or {IGNORED} where none is counted")

    def output_shape(self, labels: Tensor, names: tuple[str, ...]) -> tuple[int, ...]:
        return labels.shape[1], len(names)

    def outputs(self, names: tuple[str, ...]) -> str:
        return f"at each position one logit for each of {len(names)} tokens"

    def kept(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return [b, 3]: sum of -ln p(token) in nats over the counted positions, their number, and how many are
        correct.
        """
        import torch  # late: sweep files do not need it
        from torch.nn import functional

        counted = labels != IGNORED
        rows, tokens = outputs.flatten(0, 1), labels.flatten()
        losses = functional.cross_entropy(rows, tokens, reduction="none", ignore_index=IGNORED).view(labels.shape)
        right = (outputs.argmax(2) == labels) & counted
        return torch.stack((losses.double().sum(1), counted.double().sum(1), right.double().sum(1)), 1)

    def constant(self, labels: Tensor, names: tuple[str, ...]) -> float | None:
        """Return the share of the most frequent token."""
        counts = occurrences(labels, len(names))
        return float(counts.max() / counts.sum()) if counts.any() else None
