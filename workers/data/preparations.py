"""Preparations: how stored features become the inputs of a model, each example by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

import torch
from torch import Tensor


class Preparation(Protocol):
    """Converts stored features [b, ...] to model inputs, each example by itself, and therefore costs no privacy.

    It must not change ``features``, but may return them, or a view of them.
    """

    def __call__(self, features: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Scaling:
    """(features - offset) / scale as float32; offset and scale have one number, or one per channel."""

    offset: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0,)

    def __call__(self, features: Tensor) -> Tensor:
        if self == AS_STORED:
            return features.to(torch.float32)
        trailing = (1,) * max(features.ndim - 2, 0)
        offset = _constant(self.offset, features.device).view(-1, *trailing)
        return (features.to(torch.float32) - offset) / _constant(self.scale, features.device).view(-1, *trailing)


AS_STORED: Final = Scaling()
"""Scaling that changes no value, for features that are stored as the model takes them."""


@lru_cache(maxsize=32)
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the values as a tensor that stays on the device: sending them with every batch makes a GPU wait."""
    return torch.tensor(values, device=device)


def pixels(mean: Sequence[float] = (0.5,), std: Sequence[float] = (0.5,)) -> Scaling:
    """Return a scaling of uint8 pixels by a mean and standard deviation given for pixels in [0, 1].

    >>> pixels((0.5,), (0.5,))(torch.tensor([[0, 255]], dtype=torch.uint8))
    tensor([[-1.,  1.]])
    """
    return Scaling(tuple(255.0 * m for m in mean), tuple(255.0 * s for s in std))


@dataclass(frozen=True)
class Tokens:
    """Token ids as int64, for models whose first layer is an embedding.

    `vocabulary`: number of tokens. `padding`: token that fills short texts. `causal`: whether a position may depend
    only on earlier ones. Each is None if the source does not know it, and otherwise offered to models that take it
    (`dpsweep.workers.models.offered`).
    """

    vocabulary: int | None = None
    padding: int | None = None
    causal: bool | None = None

    def __call__(self, features: Tensor) -> Tensor:
        return features if features.is_floating_point() else features.long()


_PREPARATIONS: Final[Mapping[str, type[Scaling] | type[Tokens]]] = {"scaling": Scaling, "tokens": Tokens}


def preparation_as_stored(features: Tensor) -> Scaling | Tokens:
    """Return the preparation of features that are stored as a model takes them: whole numbers are tokens."""
    return Tokens() if features.dtype in (torch.int32, torch.int64) else Scaling()


def plain_preparation(preparation: Preparation) -> tuple[str, dict[str, Any]] | None:
    """Return the name of a preparation and its fields as plain values; None for one of the user's own."""
    for name, kind in _PREPARATIONS.items():
        if type(preparation) is kind:
            fields = asdict(preparation).items()
            return name, {key: list(value) if isinstance(value, tuple) else value for key, value in fields}
    return None


def made_preparation(name: str, fields: Mapping[str, Any]) -> Preparation:
    """Return the preparation of a `plain_preparation`. Raises: KeyError and TypeError for other values."""
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return _PREPARATIONS[name](**given)
