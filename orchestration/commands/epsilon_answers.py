"""The answers of `dpsweep epsilon` about a run, before any of them is printed or drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpsweep.accounting.attacks import PrivacyCurve, curve_of_examples, privacy_curve
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import weakened
from dpsweep.orchestration.commands.epsilon_request import AccountedRun, EpsilonRequest
from dpsweep.orchestration.commands.number_lists import whole_numbers
from dpsweep.orchestration.commands.risk import curve_deltas, risk_of
from dpsweep.orchestration.commands.selection_flags import accounted, compared_with_naive
from dpsweep.orchestration.commands.stored_trial import (
    EpsilonSpread,
    GivenExamples,
    contributions_of,
    estimate_of_examples,
    spread_of_epsilons,
)
from dpsweep.orchestration.comparison.group_sizes import GroupComparison, compare_groups


@dataclass(frozen=True)
class EpsilonAnswers:
    """The answers to a request about a run; those that were not asked for are None or empty.

    `estimates`: one for each group size. `compared`: reference values by group size. `selection`: the number of runs,
    and epsilons without the selection. `together`: epsilon of the given examples. `spread`: epsilons of single
    examples. `curves`: one for each group size, then that of the given examples. `risks`: bounds on attacks, one for
    each curve.
    """

    run: AccountedRun
    request: EpsilonRequest
    estimates: Sequence[PrivacyEstimate]
    compared: Mapping[int, GroupComparison]
    selection: dict[str, Any]
    together: PrivacyEstimate | None
    spread: EpsilonSpread | None
    curves: Sequence[PrivacyCurve]
    risks: Sequence[dict[str, Any]]


def answer(run: AccountedRun, request: EpsilonRequest) -> EpsilonAnswers:
    """Account for the run as asked.

    Raises: InvalidInput or UnsupportedMechanism for a run that cannot be accounted, DataCorruption for damaged norm
    shards.
    """
    trace, delta, trials = run.trace, request.delta, request.trials
    sizes = whole_numbers("--group-size", request.group_size, 1)
    estimates = [accounted(trace, delta, request.accountant, size, trials) for size in sizes]
    compared = compare_groups(trace, delta, sizes) if request.compare else {}
    curves = _curves_of_groups(run, request, sizes)
    selection = {} if trials is None else compared_with_naive(trace, delta, trials)
    group = _given_examples(run, request)
    together = None if group is None else estimate_of_examples(group, trace, delta)
    if curves and group is not None:
        curves.append(curve_of_examples(trace, group.steps, group.contributions, _deltas(request)))
    spread = _spread(run, request)
    estimates = [weakened(each, run.reasons) for each in estimates]
    curves = [weakened(each, run.reasons) for each in curves]
    together, spread = together and weakened(together, run.reasons), spread and weakened(spread, run.reasons)
    risks = [risk_of(curve, request.prior) for curve in curves] if request.risk else []
    return EpsilonAnswers(run, request, estimates, compared, selection, together, spread, curves, risks)


def _curves_of_groups(run: AccountedRun, request: EpsilonRequest, sizes: Sequence[int]) -> list[PrivacyCurve]:
    if not request.risk and request.curve is None:
        return []
    return [privacy_curve(run.trace, size, _deltas(request)) for size in sizes]


def _deltas(request: EpsilonRequest) -> tuple[float, ...]:
    """Return the deltas at which the drawn curves must be tight; empty if none is drawn."""
    return () if request.curve is None else curve_deltas(request.delta)


def _given_examples(run: AccountedRun, request: EpsilonRequest) -> GivenExamples | None:
    if run.files is None or request.examples is None:
        return None
    return contributions_of(run.files, run.trace, whole_numbers("--examples", request.examples, 0))


def _spread(run: AccountedRun, request: EpsilonRequest) -> EpsilonSpread | None:
    if run.files is None or request.individual is None:
        return None
    return spread_of_epsilons(run.files, run.trace, request.delta, request.individual)
