"""Private selection: train several candidates, release one of them only, and account for that.

If the best of a fixed number of runs is released, the cost may be that of all of them. If their number K is drawn from
a truncated negative binomial law and kept secret, it is a small multiple of one run's (Liu and Talwar 2019, where K is
geometric; Papernot and Steinke 2022). If candidates train on disjoint parts of the data, it is the larger of the cost
of one run and that of choosing among them (paper C, Sec. IV-A3). Proofs: docs/accounting-proofs.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from dpsweep.accounting.accountants.methods import total_rdp
from dpsweep.accounting.accountants.one_run import account_one
from dpsweep.accounting.attacks import privacy_curve
from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism, require_finite
from dpsweep.accounting.mechanism.estimates import Kind, PrivacyEstimate
from dpsweep.accounting.mechanism.random_trials import ExponentialChoice, RandomTrials
from dpsweep.accounting.mechanism.reasons import weakened
from dpsweep.accounting.mechanism.rounds import require_group_size
from dpsweep.accounting.mechanism.trace import Selection, Trace, require_unit_of_rows
from dpsweep.accounting.numerics.renyi import ORDERS, Array, epsilon_improved, pure_rdp
from dpsweep.accounting.numerics.roots import beginning
from dpsweep.accounting.numerics.rounding import ROUND_UP
from dpsweep.accounting.pld import MIN_DELTA
from dpsweep.accounting.registry import lookup

CHOICE: Final = "choice-"
"""What the name of an accountant begins with in the claim of a choice among disjoint parts."""
_COARSE = 0.3  # deltas above this are resolved by every curve
_FAR = 1e6  # larger epsilons are vacuous


def account_selected(
    trace: Trace, selection: Selection, delta: float, accountant: str = "auto", group_size: int = 1
) -> PrivacyEstimate:
    """Return (epsilon, delta) of releasing only the run that ``selection`` chose among several runs of ``trace``.

    Guarantee and errors: as `account_selection` or `account_choice`, by the kind of selection.
    """
    match selection:
        case RandomTrials():
            return account_selection(trace, selection, delta, accountant, group_size)
        case ExponentialChoice():
            return account_choice(trace, selection, delta, accountant, group_size)


def account_choice(
    trace: Trace, choice: ExponentialChoice, delta: float, accountant: str = "auto", group_size: int = 1
) -> PrivacyEstimate:
    """Return (epsilon, delta) of releasing only the run that ``choice`` chose among runs of ``trace``, with all its
    outputs.

    Guarantee, where the trace's kind is one, under the trace's adjacency: the larger of one run's epsilon and the
    choice's. An example lies in one part of the data, whatever the other examples are. In the part of candidate i, it
    changes run i alone, and everything else follows from run i's outputs and from other examples. In the last part it
    changes the counts of errors alone, by at most 1 each. Every candidate must lead to ``trace``, or to one that costs
    no more.

    Raises: UnsupportedMechanism for groups of several examples and for users, whose rows may lie in several parts, and
    where the accountant does not cover the trace.
    """
    delta = require_finite("delta", delta, above=0.0, below=1.0)
    require_unit_of_rows(trace)
    if require_group_size(group_size) > 1:
        raise UnsupportedMechanism(
            f"the {group_size} examples of a group may lie in several parts of the data that candidates were trained "
            "on, and no bound for that is proven here; account for single examples, group size 1"
        )
    run = account_one(replace(trace, selection=None), delta, accountant, 1)
    return replace(
        run, epsilon=max(run.epsilon, choice.epsilon), accountant=f"{CHOICE}{run.accountant}", lower_epsilon=None
    )


def selected_rdp(trace: Trace) -> Array:
    """Return RDP of ``trace`` at every order, its selection included: it adds up over adaptive composition."""
    match trace.selection:
        case None:
            return total_rdp(trace)
        case RandomTrials():
            return selection_rdp(trace, trace.selection)
        case ExponentialChoice():
            return np.maximum(total_rdp(replace(trace, selection=None)), pure_rdp(trace.selection.epsilon))


def before_choice(trace: Trace) -> Trace:
    """Return the trace without an `ExponentialChoice`, whose cost does not depend on the noise multiplier."""
    return replace(trace, selection=None) if isinstance(trace.selection, ExponentialChoice) else trace


def account_selection(
    trace: Trace, trials: RandomTrials, delta: float, accountant: str = "auto", group_size: int = 1
) -> PrivacyEstimate:
    """Return (epsilon, delta) of releasing only the best of a random number of runs of ``trace``.

    Guarantee, where the trace's kind is one, under the trace's adjacency: draw K from ``trials`` independently of the
    data, make K independent runs, each of settings drawn at random from a law fixed in advance. Release the run with
    the highest score with all its outputs, neither K nor any other run. The score is a function of the run's own
    released outputs and of data outside the training set; ties fall to the earliest run. Every setting must lead to
    ``trace``, or to one that costs no more at any order and epsilon.

    `accountant`: ``rdp`` (Papernot and Steinke 2022, Theorem 2), ``pld`` (docs/accounting-proofs.md), or ``auto``, the
    lower of both, without pld where that would need a delta below 1e-250. At a mean of one the result is the cost of
    one run.

    Raises: UnsupportedMechanism where the accountant does not cover the trace and for runs that protect users,
    InvalidInput for another accountant and for the trace of a selection.
    """
    delta, group_size = require_finite("delta", delta, above=0.0, below=1.0), require_group_size(group_size)
    if trace.selection is not None:
        raise InvalidInput("the trace is that of a selection already; account for it by dpsweep.accounting.account")
    require_unit_of_rows(trace)
    if accountant not in ("auto", *_METHODS):
        raise InvalidInput(f"accountant {accountant!r} covers no selection among trials; choose auto, pld or rdp")
    if trials.gamma == 1.0 or not trace.is_private:
        return account_one(trace, delta, accountant, group_size)
    unit = trace.unit.of(group_size)
    found: dict[str, float] = {}
    refusals: list[str] = []
    resolved = [name for name in _METHODS if name != "pld" or delta / trials.largest_mean >= MIN_DELTA]
    for name in resolved if accountant == "auto" else (accountant,):
        try:
            found[name] = lookup(_METHODS, name, "accountant")(trace, trials, delta, group_size)
        except UnsupportedMechanism as refusal:
            refusals.append(str(refusal))
    if not found:
        raise UnsupportedMechanism("; ".join(dict.fromkeys(refusals)))
    best = min(found, key=found.__getitem__)
    kind: Kind = "guarantee" if found[best] < math.inf else "none"
    selected = PrivacyEstimate(found[best], delta, trace.adjacency, f"selection-{best}", kind, unit, group_size)
    return weakened(selected, trace.reasons)


def _by_renyi(trace: Trace, trials: RandomTrials, delta: float, group_size: int) -> float:
    return float(epsilon_improved(selection_rdp(trace, trials, group_size), delta))


def selection_rdp(trace: Trace, trials: RandomTrials, group_size: int = 1) -> Array:
    """Return RDP, at every order of `dpsweep.accounting.numerics.renyi.ORDERS`, of releasing only the best of
    ``trials`` runs of ``trace``.

    Papernot and Steinke 2022, Theorem 2: at order a, with one further order b shared by all a,

    D_a + (1 + shape) ((1 - 1/b) D_b + log(1/gamma) / b) + log(E[K]) / (a - 1).

    It adds up over adaptive composition, like that of any mechanism.
    """
    rdp = total_rdp(replace(trace, selection=None), group_size)
    if trials.gamma == 1.0:
        return rdp
    shared = (1.0 + trials.shape) * np.min((1.0 - 1.0 / ORDERS) * rdp - math.log(trials.gamma) / ORDERS)
    selected: Array = (rdp + shared + math.log(trials.largest_mean) / (ORDERS - 1.0)) * ROUND_UP
    return selected


def _by_profile(trace: Trace, trials: RandomTrials, delta: float, group_size: int) -> float:
    """Return the epsilon of the selection by the certified curve delta(epsilon) of one run.

    It is e + (1 + shape) r with E[K] delta(e) <= delta and delta(r) <= (e^r - 1) gamma / (1 - gamma)
    (docs/accounting-proofs.md; after Koskela, Redberg and Wang 2024).
    """
    gamma, aim = trials.gamma, delta / trials.largest_mean
    curve = privacy_curve(trace, group_size, (aim, min(gamma, _COARSE)))
    end = float(curve.profile.epsilons[-1])
    released = _least(lambda epsilon: curve.delta(epsilon).upper <= aim, end)
    odds = gamma / (1.0 - gamma) / ROUND_UP
    ratio = _least(lambda epsilon: curve.delta(epsilon).upper <= odds * math.expm1(min(epsilon, 700.0)), _FAR)
    return (released + (1.0 + trials.shape) * ratio) * ROUND_UP


def _least(holds: Callable[[float], bool], end: float) -> float:
    """Return the least number up to ``end`` that ``holds``, as all larger ones do, rounded up; infinite if there is
    none.
    """
    return beginning(holds, 0.0, end)[1] if holds(end) else math.inf  # the epsilon returned must hold


_METHODS: dict[str, Callable[[Trace, RandomTrials, float, int], float]] = {"pld": _by_profile, "rdp": _by_renyi}
