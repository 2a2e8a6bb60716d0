"""The curve delta(epsilon) of a run, its trade-off function, and what attacks reach at most by them.

An attacker who sees every step of a run and knows all of the data but one record (or k of them) tests which of two
neighbouring data sets was used. The trade-off function f gives the least false negative rate of any such test by its
false positive rate alpha (f-DP; Dong, Roth and Su 2019). For every epsilon >= 0, (epsilon, delta)-DP
holds if and only if no test is below

    max(0, 1 - delta - e^epsilon alpha, e^-epsilon (1 - delta - alpha))

(Wasserman and Zhou 2010; Dong, Roth and Su 2019, Section 2). So the largest of these lines over any set of epsilons is
a lower bound on f, convex and valid for both ways to name the two hypotheses. This bound is published here: no attack
does better. Lower bounds on the best attack belong to the worst run that the trace describes, where they are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.attacks.trade_off import AttackBounds
from dpsweep.accounting.errors import UnsupportedMechanism, require_finite, require_numbers
from dpsweep.accounting.mechanism.estimates import Claim
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.accounting.mechanism.reductions import by_rows, is_attained, is_attained_by
from dpsweep.accounting.mechanism.rounds import require_group_size
from dpsweep.accounting.mechanism.samplings import Adjacency
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.pld import (
    MIN_DELTA,
    CertifiedProfile,
    Chain,
    GroupRounds,
    profile_of_chain,
    profile_of_rounds,
    rounds_of_examples,
    rounds_or_chain,
)

Array = npt.NDArray[np.float64]

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
"""Where `attack_risk` reads off the true positive rate (Carlini et al. 2022 report it at low rates)."""

_ROUNDING = 1e-12  # far above the rounding error of an interpolation


class CertifiedInterval(NamedTuple):
    """lower <= exact value <= upper; lower is None where no lower bound is known for the run that took place."""

    lower: float | None
    upper: float


@dataclass(frozen=True)
class PrivacyCurve:
    """delta(epsilon) of a run, certified from both sides, and what follows from it for attacks.

    Guarantee, where kind is ``guarantee``, with every step's output visible and later steps chosen adaptively. The run
    is (epsilon, upper delta)-DP at every epsilon of ``profile`` at once, under ``adjacency``, for the records that
    ``unit`` names. Lower bounds belong to the worst run that the trace describes. There are none where that is not the
    rounds' dominating pairs. Then batches may be cut, epochs are shuffled, a filter limits examples, or noise or end
    followed results. of_given: whether it holds for given records by their own contributions, not for any of them.
    """

    profile: CertifiedProfile
    adjacency: Adjacency
    unit: str
    group_size: int
    kind: Claim
    of_given: bool
    reasons: tuple[Reason, ...] = ()

    def delta(self, epsilon: float) -> CertifiedInterval:
        """Return delta at ``epsilon`` >= 0. Between the curve's points upper is linear in e^epsilon, where delta is
        convex.
        """
        epsilon = require_finite("epsilon", epsilon, at_least=0.0)
        points, upper = self.profile.epsilons, self.profile.worst
        lower = None if self.profile.lower is None else self.profile.lower.max(axis=0)
        right = int(np.searchsorted(points, epsilon, side="left"))
        if right == len(points):
            return CertifiedInterval(None if lower is None else 0.0, float(upper[-1]))
        highest, end = float(upper[right]), float(points[right])
        if epsilon < end:
            share = math.expm1(epsilon - end) / math.expm1(float(points[right - 1]) - end)
            highest += (float(upper[right - 1]) - highest) * share * (1.0 + _ROUNDING)
        least = None if lower is None else float(lower[right])
        return CertifiedInterval(least, min(highest, float(upper[max(right - 1, 0)])))

    def trade_off(self, false_positive_rates: npt.ArrayLike) -> tuple[Array, Array | None]:
        """Return (lower, upper) false negative rate of the best attack at each of the rates [points], all in [0, 1].
        The lower one is convex, does not rise, and is at most 1 - alpha: no attack has fewer false negatives. The upper
        rate is achieved by an attack on the worst run, in the worse one of its two directions, or None where that is
        unknown.
        """
        rates = _rates(false_positive_rates)
        fewest = 1.0 - self._attacks.limit(rates)
        if self.profile.lower is None:
            return fewest, None
        return fewest, 1.0 - np.array([self._attacks.achieved(rate, self.profile.lower) for rate in rates.tolist()])

    def true_positive_rate(self, false_positive_rate: float) -> CertifiedInterval:
        """Return the largest true positive rate of any attack at ``false_positive_rate`` in [0, 1]: 1 - trade-off
        function.
        """
        lower, upper = self.trade_off([false_positive_rate])
        return CertifiedInterval(None if upper is None else 1.0 - float(upper[0]), 1.0 - float(lower[0]))

    def most_found(self, false_positive_rates: npt.ArrayLike) -> Array:
        """Return the true positive rates that no attack passes which says of records whether they took part.

        At the given rates [points], of records that did not. At most 1 - lower `trade_off`, which also covers attacks
        that say whether they are missing.
        """
        return self._attacks.limit_of(0, _rates(false_positive_rates))

    @property
    def advantage(self) -> CertifiedInterval:
        """Membership advantage: the largest true minus false positive rate of any attack, which is delta(0)."""
        least = None if self.profile.lower is None else float(self.profile.lower[:, 0].max())
        return CertifiedInterval(least, float(self.profile.worst[0]))

    def reconstruction(self, prior: float) -> float:
        """Return an upper bound on the probability that any attack reconstructs the record (the group's records,
        jointly).

        prior: the largest probability, over all guesses made without the output, that a guess counts as success, for a
        target drawn independently of all other data. It is kappa of Hayes, Mahloujifar and Balle 2023. Their bound, for
        the trade-off function f, is 1 - f(kappa) (Kaissis, Hayes, Ziller and Rueckert 2023). A guess made from the
        output of the data without the target succeeds with probability at most kappa on average over targets z. With z
        it does so with at most 1 - f(rate of z), and 1 - f is concave.

        Raises: UnsupportedMechanism for the curve of given records: the bound averages over all records that the
        target may be, and the curve holds for these alone.
        """
        if self.of_given:
            raise UnsupportedMechanism(
                "the reconstruction bound averages over all records that the target may be, but the curve is that of "
                f"{self.unit} alone; use the curve of any record"
            )
        prior = require_finite("prior", prior, above=0.0, at_most=1.0)
        return self.true_positive_rate(prior).upper

    @cached_property
    def _attacks(self) -> AttackBounds:
        return AttackBounds(self.profile)


def _rates(given: npt.ArrayLike) -> Array:
    rates = require_numbers("false positive rates", given, 1).astype(np.float64)
    for rate in (rates.min(initial=0.0), rates.max(initial=0.0)):
        require_finite("false positive rate", float(rate), at_least=0.0, at_most=1.0)
    return rates


def privacy_curve(trace: Trace, group_size: int = 1, deltas: Sequence[float] = ()) -> PrivacyCurve:
    """Return the certified curve of ``trace`` for any ``group_size`` records, or users, by composition of privacy loss
    distributions.

    deltas: values in [1e-250, 1) near which delta(epsilon) shall be tight relative to itself. Without them the bounds
    are close relative to delta at epsilon 0, which suffices for attacks at false positive rates down to 1e-4. Covers
    every trace of one run; without noise nothing is bounded, and delta is 1 everywhere.

    Raises: UnsupportedMechanism for a private selection.
    """
    group_size = require_group_size(group_size)
    rows, size = by_rows(trace, group_size)
    profile = _profile(rounds_or_chain(rows, size), deltas, is_attained(rows, size) or not rows.is_private)
    unit = trace.unit.of(group_size)
    return PrivacyCurve(profile, trace.adjacency, unit, group_size, trace.kind, False, trace.reasons)


def curve_of_examples(
    trace: Trace, steps: Sequence[int], contributions: npt.ArrayLike, deltas: Sequence[float] = ()
) -> PrivacyCurve:
    """Return the certified curve of given records together (one, or all of a person) by their own contributions.

    steps [snapshots] and contributions [members, snapshots] as in `epsilon_of_examples`. Private data of these records.
    kind is `Trace.individual_kind`: contributions read off a run hold for the run that took place.
    """
    rounds = rounds_of_examples(trace, steps, contributions)
    members = len(require_numbers("contributions", contributions, 2))
    profile = _profile(rounds, deltas, is_attained_by(trace, members) or not rounds.is_private)
    unit = "given example" if members == 1 else f"{members} given examples"
    kind, reasons = trace.individual_kind, trace.individual_reasons
    return PrivacyCurve(profile, trace.adjacency, unit, members, kind, True, reasons)


def _profile(rounds: GroupRounds | Chain, deltas: Sequence[float], is_attained: bool) -> CertifiedProfile:
    given = require_numbers("deltas of a curve", deltas, 1).tolist()
    wanted = [require_finite("delta of a curve", delta, at_least=MIN_DELTA, below=1.0) for delta in given]
    match rounds:
        case GroupRounds():
            found = profile_of_rounds(rounds, wanted)
        case Chain():
            found = profile_of_chain(rounds, wanted)
    return found if is_attained else replace(found, lower=None)


@dataclass(frozen=True)
class AttackRisk:
    """Limits on attacks on a run: membership advantage, and true positive rates at low false positive rates.

    Each upper end is a guarantee where kind is one, under ``adjacency``, for the records that ``unit`` names; lower
    ends are as in `PrivacyCurve`. true_positive_rates: at each of `FALSE_POSITIVE_RATES`.
    """

    unit: str
    group_size: int
    adjacency: Adjacency
    kind: Claim
    advantage: CertifiedInterval
    true_positive_rates: tuple[CertifiedInterval, ...]
    reasons: tuple[Reason, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: each upper bound by its name, each certified lower one by the name +
        ``_at_least``.

        Lower bounds that are not known are left out.
        """
        named = {"advantage": self.advantage} | {
            rate_name(rate): found for rate, found in zip(FALSE_POSITIVE_RATES, self.true_positive_rates, strict=True)
        }
        upper = {name: found.upper for name, found in named.items()}
        lower = {f"{name}_at_least": found.lower for name, found in named.items() if found.lower is not None}
        whose = {"unit": self.unit, "group_size": self.group_size, "adjacency": self.adjacency, "kind": self.kind}
        return whose | upper | lower | {"reasons": list(self.reasons)}


def rate_name(false_positive_rate: float) -> str:
    """Return the name of the true positive rate at ``false_positive_rate``, such as tpr_at_fpr_1pct."""
    return f"tpr_at_fpr_{100.0 * false_positive_rate:g}pct"


def attack_risk(curve: PrivacyCurve) -> AttackRisk:
    """Return the membership advantage and true positive rates of ``curve``, as reports show them."""
    rates = tuple(curve.true_positive_rate(rate) for rate in FALSE_POSITIVE_RATES)
    return AttackRisk(curve.unit, curve.group_size, curve.adjacency, curve.kind, curve.advantage, rates, curve.reasons)


@lru_cache(maxsize=8192)
def risk_of(trace: Trace, group_size: int) -> AttackRisk:
    """Return `attack_risk` of a run; kept, as trials that differ only in their seed have one trace."""
    return attack_risk(privacy_curve(trace, group_size))
