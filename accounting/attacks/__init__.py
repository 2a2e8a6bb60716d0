"""Bounds on membership inference that epsilon implies."""

from dpsweep.accounting.attacks.curves import (
    FALSE_POSITIVE_RATES,
    AttackRisk,
    CertifiedInterval,
    PrivacyCurve,
    attack_risk,
    curve_of_examples,
    privacy_curve,
    rate_name,
    risk_of,
)
from dpsweep.accounting.attacks.exposures import exposure_limit, mean_exposure
from dpsweep.accounting.attacks.trade_off import area_limit, epsilon_of_area

__all__ = [
    "FALSE_POSITIVE_RATES",
    "AttackRisk",
    "CertifiedInterval",
    "PrivacyCurve",
    "area_limit",
    "attack_risk",
    "curve_of_examples",
    "epsilon_of_area",
    "exposure_limit",
    "mean_exposure",
    "privacy_curve",
    "rate_name",
    "risk_of",
]
