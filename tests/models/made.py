"""The functions that the sweeps of `tests.models` name: data of a few random examples, the models, and losses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from torch.nn import functional

from dpsweep.workers.data import Preparation, Scaling, Source, Tokens, make_split
from tests.models.table import TABLE

EXAMPLES = 24
CLASSES = tuple(f"class {number}" for number in range(4))
VOCABULARY, LENGTH = 50, 12


def _source(name: str, features: npt.NDArray[np.generic], preparation: Preparation) -> Source:
    labels = np.arange(len(features)) % len(CLASSES)
    train = make_split(features[:EXAMPLES], labels[:EXAMPLES])
    test = make_split(features[EXAMPLES:], labels[EXAMPLES:], first_id=EXAMPLES)
    return Source(name, train, test, CLASSES, CLASSES, preparation)


def _normal(name: str, *shape: int) -> Source:
    features = np.random.default_rng(0).normal(size=(EXAMPLES + 8, *shape)).astype(np.float32)
    return _source(name, features, Scaling())


def vectors() -> Source:
    """64 numbers."""
    return _normal("vectors", 64)


def pictures() -> Source:
    """Pictures of 32 x 32 with three channels."""
    return _normal("pictures", 3, 32, 32)


def clips() -> Source:
    """Clips of 4 pictures of 16 x 16 with three channels."""
    return _normal("clips", 3, 4, 16, 16)


def tokens() -> Source:
    """12 out of 50 tokens."""
    return _source("tokens", np.random.default_rng(0).integers(3, VOCABULARY, (EXAMPLES + 8, LENGTH)), Tokens())


def brought(feature_shape: tuple[int, ...], num_classes: int, which: str) -> nn.Module:
    """The model of the table with this name."""
    return TABLE[which].make()


def two_heads() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss over four classes and over whether the class is odd."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        of_class = functional.cross_entropy(outputs[:, :4], labels, reduction="none")
        return of_class + functional.cross_entropy(outputs[:, 4:6], labels % 2, reduction="none")

    return loss
