"""Privacy of groups: random sensitivities, and certified laws of their privacy loss on a lattice.

Building blocks (see `accounting._loss` for the guarantees): `poisson_group`, `fixed_batch_group`, `poisson_examples`
and `fixed_batch_examples` give a `SensitivityMixture`; `discretise` gives the law of its loss on a lattice.
"""

from accounting._loss import DIRECTIONS, Bound, Direction, LatticeLoss, LossTable, discretise, tabulate
from accounting._sensitivity import (
    SensitivityMixture,
    fixed_batch_examples,
    fixed_batch_group,
    poisson_examples,
    poisson_group,
)

__all__ = [
    "DIRECTIONS",
    "Bound",
    "Direction",
    "LatticeLoss",
    "LossTable",
    "SensitivityMixture",
    "discretise",
    "fixed_batch_examples",
    "fixed_batch_group",
    "poisson_examples",
    "poisson_group",
    "tabulate",
]
