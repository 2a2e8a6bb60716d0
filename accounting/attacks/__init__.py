"""Bounds on membership inference that epsilon implies, and audits that prove lower bounds on epsilon."""

from dpsweep.accounting.attacks.areas import area_limit, epsilon_of_area
from dpsweep.accounting.attacks.auditing import Guesses, audited_epsilon, best_audited_epsilon, p_value, provable
from dpsweep.accounting.attacks.curves import (
    FALSE_POSITIVE_RATES,
    AttackRisk,
    CertifiedInterval,
    PrivacyCurve,
    attack_risk,
    curve_of_examples,
    privacy_curve,
    rate_name,
)
from dpsweep.accounting.attacks.gaussian_tests import f_dp_epsilon, gdp_epsilon
from dpsweep.accounting.attacks.scaled_noise import StatedRun, curve_epsilon, ranks_epsilon

__all__ = [
    "FALSE_POSITIVE_RATES",
    "AttackRisk",
    "CertifiedInterval",
    "Guesses",
    "PrivacyCurve",
    "StatedRun",
    "area_limit",
    "attack_risk",
    "audited_epsilon",
    "best_audited_epsilon",
    "curve_epsilon",
    "curve_of_examples",
    "epsilon_of_area",
    "f_dp_epsilon",
    "gdp_epsilon",
    "p_value",
    "privacy_curve",
    "provable",
    "ranks_epsilon",
    "rate_name",
]
