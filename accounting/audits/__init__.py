"""Tests that turn the guesses of an audit into proven lower bounds on epsilon."""

from dpsweep.accounting.audits.assumptions import ASSUMPTIONS, assumed_by_best
from dpsweep.accounting.audits.auditing import Guesses, audited_epsilon, best_audited_epsilon, p_value, provable
from dpsweep.accounting.audits.gaussian_tests import f_dp_epsilon, gdp_epsilon
from dpsweep.accounting.audits.scaled_noise import StatedRun, Uniforms, random_scores, ranks_epsilon

__all__ = [
    "ASSUMPTIONS",
    "Guesses",
    "StatedRun",
    "Uniforms",
    "assumed_by_best",
    "audited_epsilon",
    "best_audited_epsilon",
    "f_dp_epsilon",
    "gdp_epsilon",
    "p_value",
    "provable",
    "random_scores",
    "ranks_epsilon",
]
