"""The claims of stored and published trials: every number that claims privacy, with the reasons of its trial."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, overload

from dpsweep.accounting.mechanism.reasons import Reason, in_words, union, weakened
from dpsweep.orchestration.store.published import PublishedAccount, PublishedTrial

if TYPE_CHECKING:  # this module loads torch
    from dpsweep.orchestration.store.results import StoppedTrial, StoredResult, TrialResult


@overload
def claimed(result: TrialResult, reasons: Iterable[Reason]) -> TrialResult: ...
@overload
def claimed(result: StoppedTrial, reasons: Iterable[Reason]) -> StoppedTrial: ...
def claimed(result: StoredResult, reasons: Iterable[Reason]) -> StoredResult:
    """Return ``result`` with every epsilon and bound on attacks as an estimate for these reasons and for its own."""
    found = union((result.reasons, reasons))
    if not found or not result.spec.is_private:
        return result
    return replace(
        result,
        reasons=found,
        worst_case=weakened(result.worst_case, found),
        others=tuple(weakened(each, found) for each in result.others),
        groups=tuple(weakened(each, found) for each in result.groups),
        risks=tuple(weakened(each, found) for each in result.risks),
        individuals=result.individuals and weakened(result.individuals, found),
    )


def claimed_account(account: PublishedAccount, reasons: Iterable[Reason]) -> PublishedAccount:
    """Return ``account``, but with its epsilons as estimates for these reasons, if there are any."""
    found = weakened(account, reasons)
    return replace(found, individual_kind="estimate") if found.reasons else found


def reasons_of_trials(trials: Iterable[PublishedTrial]) -> tuple[Reason, ...]:
    """Return why epsilons of some of the trials are estimates."""
    return union(trial.reasons for trial in trials)


def told(trials: Iterable[PublishedTrial]) -> tuple[str, ...]:
    """Return a sentence for each reason why epsilons are estimates; says how many trials it concerns unless it is
    all.
    """
    private = [trial for trial in trials if trial.privacy is not None and trial.privacy.is_private]
    found = []
    for reason, words in zip(reasons := reasons_of_trials(private), in_words(reasons), strict=True):
        count = sum(reason in trial.reasons for trial in private)
        found.append(words if count == len(private) else f"{count} of {len(private)} private trials: {words}")
    return tuple(found)
