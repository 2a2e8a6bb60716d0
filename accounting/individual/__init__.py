"""Per-example accounting from recorded contributions (paper A)."""

from accounting.individual.epsilons import INDIVIDUAL_ACCOUNTANTS, IndividualEpsilons, individual_epsilons

__all__ = ["INDIVIDUAL_ACCOUNTANTS", "IndividualEpsilons", "individual_epsilons"]
