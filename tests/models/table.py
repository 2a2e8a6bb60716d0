"""All models of the suite by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.models.brought import Brought
from tests.models.by_hand import OTHERS, VECTORS
from tests.models.of_torchvision import TORCHVISION
from tests.models.of_transformers import TRANSFORMERS

FAMILIES: Mapping[str, Mapping[str, Brought]] = {
    "by hand": {**VECTORS, **OTHERS},
    "torchvision": TORCHVISION,
    "transformers": TRANSFORMERS,
}
TABLE: Mapping[str, Brought] = {name: each for family in FAMILIES.values() for name, each in family.items()}
