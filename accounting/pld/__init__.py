"""Privacy loss distributions: certified composition of any trace, for one example and for groups.

Building blocks for other accountants: `group_law` and `examples_law` return a `SensitivityMixture`, to be scaled by
1 / noise multiplier; `discretise` returns the certified law of its loss on a lattice (`dpsweep.accounting.pld.loss`).
"""

from dpsweep.accounting.pld.allocation import mean_from_above
from dpsweep.accounting.pld.allocation_transform import EvenLaw
from dpsweep.accounting.pld.chains import Chain, epsilon_of_chain, profile_of_chain, rounds_or_chain
from dpsweep.accounting.pld.composition import (
    MIN_DELTA,
    TOLERANCE,
    PairBounds,
    epsilon_of_rounds,
    require_pld_delta,
    upper_epsilon_of_rounds,
)
from dpsweep.accounting.pld.group_rounds import GroupRounds, rounds_of_examples, rounds_of_group
from dpsweep.accounting.pld.groups import (
    CertifiedDelta,
    CertifiedEpsilon,
    delta_pld,
    epsilon_of_examples,
    epsilon_pld,
    group_epsilons,
    grows_at_least_linearly,
    linear_growth,
    vadhan_epsilon,
)
from dpsweep.accounting.pld.loss import Direction, LatticeLoss, discretise
from dpsweep.accounting.pld.prefixes import upper_of_many_levels, upper_of_prefixes
from dpsweep.accounting.pld.profile import CertifiedProfile, profile_of_rounds
from dpsweep.accounting.pld.sensitivity import (
    AllocatedRound,
    RoundLaw,
    SensitivityMixture,
    examples_law,
    group_law,
)

__all__ = [
    "MIN_DELTA",
    "TOLERANCE",
    "AllocatedRound",
    "CertifiedDelta",
    "CertifiedEpsilon",
    "CertifiedProfile",
    "Chain",
    "Direction",
    "EvenLaw",
    "GroupRounds",
    "LatticeLoss",
    "PairBounds",
    "RoundLaw",
    "SensitivityMixture",
    "delta_pld",
    "discretise",
    "epsilon_of_chain",
    "epsilon_of_examples",
    "epsilon_of_rounds",
    "epsilon_pld",
    "examples_law",
    "group_epsilons",
    "group_law",
    "grows_at_least_linearly",
    "linear_growth",
    "mean_from_above",
    "profile_of_chain",
    "profile_of_rounds",
    "require_pld_delta",
    "rounds_of_examples",
    "rounds_of_group",
    "rounds_or_chain",
    "upper_epsilon_of_rounds",
    "upper_of_many_levels",
    "upper_of_prefixes",
    "vadhan_epsilon",
]
