"""Look, on random tokens, for a dependence of a model that predicts the next token on later ones."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import Tokens
from dpsweep.workers.gradients.checks import in_its_precision
from dpsweep.workers.gradients.modes import modes_kept

_ROUNDING: Final = 1e-5
"""Tolerated change of a logit, relative to the largest one."""
_TIMES: Final = 4.0
"""How many times the change of a row whose tokens stay may be that of the others: of experts that share a batch."""


def require_causal(model: nn.Module, preparation: Tokens, features: Tensor) -> None:
    """Raises: InvalidInput where a logit of ``model`` depends on a token behind its position.

    Such a model reads the token that it is to predict. It is run twice in evaluation mode on random tokens of the
    vocabulary, without padding. The second time the tokens from a position on differ, and logits before it must not.

    features: prepared ones, as the model takes them, [b, t].
    """
    length = features.shape[1]
    vocabulary = preparation.vocabulary or int(features.max()) + 1
    known = torch.arange(vocabulary, device=features.device)
    known = known[known != (-1 if preparation.padding is None else preparation.padding)]
    if length < 2 or len(known) < 2:
        return  # there is no earlier position, or no other token
    inside = {1, length // 4, length // 2, length // 2 + 1, 3 * length // 4, length - 1} - {0, length}
    cuts = (length, *sorted(inside))  # of two neighbours, one lies inside a block that is read at once
    drawn = torch.randint(len(known), (len(cuts), length), device=features.device)
    other = (drawn + 1 + torch.randint(max(1, len(known) - 1), drawn.shape, device=features.device)) % len(known)
    is_later = torch.arange(length, device=features.device) >= torch.tensor(cuts, device=features.device)[:, None]
    with torch.no_grad(), modes_kept(model), in_its_precision(model, features.device):
        model.eval()
        tokens = [known[each] for each in (drawn, torch.where(is_later, other, drawn))]
        for each in tokens:
            each[:, 0] = features[0, 0]  # a model may ask for the token with which texts begin
        before, after = (model(each).float() for each in tokens)
    changes = (after - before).abs().amax(-1)
    unmoved, *moved = (changes[row, :cut].max().item() for row, cut in enumerate(cuts))
    if max(moved) > max(_TIMES * unmoved, _ROUNDING * before.abs().max().item()):
        raise InvalidInput(
            "its logit at a position changes with later tokens, so that it reads the token to predict; objective: "
            "causal_lm needs a model with a causal mask, such as GPT-2 or Llama; or set objective: masked_lm"
        )
