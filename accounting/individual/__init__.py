"""Epsilons of single examples from their recorded contributions (paper A), by Renyi DP or exact composition."""

from dpsweep.accounting.individual.epsilons import (
    FILTERED,
    INDIVIDUAL_ACCOUNTANTS,
    IndividualEpsilons,
    individual_claim,
    individual_epsilons,
    individual_reasons,
)
from dpsweep.accounting.individual.many_rounds import epsilon_of_many_rounds

__all__ = [
    "FILTERED",
    "INDIVIDUAL_ACCOUNTANTS",
    "IndividualEpsilons",
    "epsilon_of_many_rounds",
    "individual_claim",
    "individual_epsilons",
    "individual_reasons",
]
