"""Composed cost of several trials, whose models, curves and statistics come from the same training records. Pure.

The epsilon of a trial covers that trial alone. A mean over seeds shows something of every seed, and a report something
of every trial, so they cost as much as the composed mechanisms.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dpsweep.accounting.accountants.joint_cost import account_together
from dpsweep.accounting.errors import UnsupportedMechanism, count_of
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import Reason, union, weakened
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.orchestration.comparison.formats import listed
from dpsweep.orchestration.store.attempts import Attempt
from dpsweep.orchestration.store.published import PublishedTrial


@dataclass(frozen=True)
class ComposedGroup:
    """The cost for any ``group_size`` records together; estimate is None if no epsilon covers all runs (refusal)."""

    group_size: int
    estimate: PrivacyEstimate | None
    refusal: str = ""

    @property
    def epsilon(self) -> float | None:
        return self.estimate.epsilon if self.estimate else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found = {} if self.estimate is None else self.estimate.as_dict()
        kept = {name: found.get(name) for name in ("epsilon", "accountant", "kind")}
        reasons = list(self.estimate.reasons) if self.estimate else []
        return {"group_size": self.group_size, **kept, "reasons": reasons, "refusal": self.refusal}


@dataclass(frozen=True)
class Composition:
    """The cost of publishing everything that some private trials have released.

    `trials`: number of private trials.
    `attempts`: number of their earlier starts, which count too.
    `candidates`: number of runs of an unaccounted tuning that chose what was trained, which count too.
    `estimate`: composed epsilon for a record, or a user, that may be in the data of every run, with its reasons; None
    if no epsilon covers all runs.
    `release_epsilon`: the part of it for the released statistics alone.
    `refusal`: why no epsilon covers all runs.
    `groups`: the cost for any k records together, for each k > 1 with an epsilon in the trials, ascending.
    """

    trials: int
    attempts: int
    estimate: PrivacyEstimate | None
    release_epsilon: float | None = None
    refusal: str = ""
    candidates: int = 0
    groups: tuple[ComposedGroup, ...] = ()

    @property
    def epsilon(self) -> float | None:
        return self.estimate.epsilon if self.estimate else None

    @property
    def included(self) -> str:
        """Return what it counts besides the trials, between commas; "" for nothing."""
        more = [f"{count_of(self.attempts, 'earlier start')} of them"] if self.attempts else []
        more += [f"{self.candidates} candidates of their tuning"] if self.candidates else []
        return f", {listed(more)} included," if more else ""

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Return why the composed epsilon is an estimate; empty if it is a guarantee, or if none is known."""
        return self.estimate.reasons if self.estimate else ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found = {} if self.estimate is None else self.estimate.as_dict()
        kept = {name: found.get(name) for name in ("epsilon", "delta", "adjacency", "accountant", "kind", "unit")}
        claimed = {"reasons": list(self.reasons), "refusal": self.refusal}
        counts = {"trials": self.trials, "attempts": self.attempts, "candidates": self.candidates}
        groups = [group.as_dict() for group in self.groups]
        return {**kept, **counts, "release_epsilon": self.release_epsilon, **claimed, "groups": groups}


def composed(trials: Iterable[PublishedTrial]) -> Composition | None:
    """Return the composed cost of the private trials in ``trials`` with all their attempts; None if nothing was
    released.

    Guarantee: adaptive composition (`dpsweep.accounting.accountants.joint_cost`), at the delta of the trials and the
    adjacency of ``estimate``. The result is only an estimate if a run ended before its planned end, because that may
    depend on its outputs, and if outputs may have decided that a trial was added, or trained again. So it is if runs
    drew the same noise, or noise from known seeds, and if noise followed results. An unaccounted tuning makes it an
    estimate too: its candidates count, but their outputs decided which mechanism followed.
    """
    trials = tuple(trials)
    asked = {size for trial in trials if trial.privacy is not None for size in trial.privacy.group_epsilons if size > 1}
    return _composed(trials, tuple(sorted(asked)))


def _composed(trials: Iterable[PublishedTrial], group_sizes: tuple[int, ...]) -> Composition | None:
    private = [trial for trial in trials if trial.attempts]
    counted = _counted_once(private)
    own = [attempt for attempts in counted for attempt in attempts]
    if not own:
        return None
    every = {each.identity: each for trial in private for each in trial.candidates}
    shown = {each.identity for each in own}  # a tuning that is compared with its sweep
    candidates = [each for name, each in every.items() if name not in shown]
    attempts = [*own, *candidates]
    delta = max(attempt.delta for attempt in attempts)
    repeated = sum(max(_trained(each) - 1, 0) for each in counted)
    found = Composition(len(counted), repeated, None, _release_epsilon(own, delta), candidates=len(candidates))
    tuned = (each for each in private if "unaccounted_tuning" in each.reasons and "candidate" not in each.labels)
    lost: tuple[Reason, ...] = ("candidates_not_counted",) if any(not each.candidates for each in tuned) else ()
    by_results = len(private) > 1 and any(trial.is_added for trial in private)
    grown: tuple[Reason, ...] = ("end_followed_results",) if by_results or repeated else ()
    reasons = union((*(trial.reasons for trial in private), _of_attempts(attempts), lost, grown))
    traces = _counted(attempt.trace for attempt in attempts)
    found = replace(found, groups=tuple(_group_together(traces, delta, size, reasons) for size in group_sizes))
    if len(attempts) == 1 and (privacy := private[0].privacy) is not None:
        alone = PrivacyEstimate(
            privacy.epsilon,
            privacy.delta,
            privacy.adjacency,
            privacy.accountant,
            privacy.kind,
            privacy.unit,
            reasons=privacy.reasons,
        )
        of_run = _of_seeds(attempts) if alone.kind == "guarantee" else _of_attempts(attempts)
        claimed = union(trial.reasons for trial in private)
        return replace(found, estimate=weakened(alone, (*claimed, *of_run, *attempts[0].reasons, *lost)))
    try:
        together = _together(traces, delta)
    except UnsupportedMechanism as refusal:
        return replace(found, refusal=str(refusal))
    return replace(found, estimate=weakened(together, reasons))


def _counted_once(private: Iterable[PublishedTrial]) -> list[tuple[Attempt, ...]]:
    """Return the releases of each trial, without copies, which a sweep takes over from another: each counts for the
    trial that trained most often, so that all starts of that stand together. Trials with nothing left are omitted.
    """
    seen: set[str] = set()
    found: list[tuple[Attempt, ...]] = []
    for trial in sorted(private, key=lambda each: -_trained(each.attempts)):
        new = tuple(each for each in trial.attempts if not each.release or each.release not in seen)
        seen.update(each.release for each in new)
        found += [new] if new else []
    return found


def _trained(attempts: Iterable[Attempt]) -> int:
    """Return how many of the attempts trained, rather than released statistics alone."""
    return sum(bool(attempt.trace.segments) for attempt in attempts)


def composed_epsilon(trial: PublishedTrial) -> float | None:
    """Return the composed epsilon of all attempts at a trial that has ended; the trial's own epsilon if no attempt is
    recorded.

    None for a trial that has not ended or is not private.
    """
    if not trial.state.has_ended or trial.privacy is None or not trial.privacy.is_private:
        return None
    found = _composed([trial], ())
    return found.epsilon if found else trial.privacy.epsilon


def _of_attempts(attempts: Iterable[Attempt]) -> tuple[Reason, ...]:
    """Return why what several attempts have shown has no composed epsilon that is a guarantee."""
    attempts = tuple(attempts)
    ended = all(attempt.ended for attempt in attempts)
    own = (*(attempt.reasons for attempt in attempts), *(attempt.trace.reasons for attempt in attempts))
    return union((*own, _of_seeds(attempts), () if ended else ("end_followed_results",)))


def _of_seeds(attempts: Iterable[Attempt]) -> tuple[Reason, ...]:
    """Return why noise that is drawn from known seeds protects nobody who knows them, and composes with nothing."""
    counts = Counter(attempt.seed for attempt in attempts if attempt.seed is not None)
    found: dict[Reason, bool] = {"known_seed": bool(counts), "repeated_seed": any(n > 1 for n in counts.values())}
    return tuple(reason for reason, holds in found.items() if holds)


def _release_epsilon(attempts: list[Attempt], delta: float) -> float | None:
    released = [attempt.statistics for attempt in attempts if attempt.statistics is not None]
    return _together(_counted(released), delta).epsilon if released else None


def _counted(traces: Iterable[Trace]) -> tuple[tuple[Trace, int], ...]:
    """Return each distinct trace with its count, in the order of the trials, because sums round differently in
    another.
    """
    return tuple(Counter(traces).items())


def _group_together(
    traces: tuple[tuple[Trace, int], ...], delta: float, size: int, reasons: tuple[Reason, ...]
) -> ComposedGroup:
    try:
        return ComposedGroup(size, weakened(_together(traces, delta, size), reasons))
    except UnsupportedMechanism as refusal:
        return ComposedGroup(size, None, str(refusal))


@functools.lru_cache(maxsize=1024)
def _together(traces: tuple[tuple[Trace, int], ...], delta: float, group_size: int = 1) -> PrivacyEstimate:
    return account_together((trace for trace, count in traces for _ in range(count)), delta, group_size)
