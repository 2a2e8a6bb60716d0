"""Epsilons of single examples from their recorded contributions (paper A), by Renyi DP or exact composition."""

from accounting.individual.epsilons import INDIVIDUAL_ACCOUNTANTS, IndividualEpsilons, individual_epsilons

__all__ = ["INDIVIDUAL_ACCOUNTANTS", "IndividualEpsilons", "individual_epsilons"]
