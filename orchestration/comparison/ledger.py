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

from accounting.errors import UnsupportedMechanism
from accounting.estimates import PrivacyEstimate
from accounting.joint_cost import account_together
from accounting.mechanism import Trace
from orchestration.records.attempts import Attempt
from orchestration.records.published import PublishedTrial


@dataclass(frozen=True)
class Composition:
    """The cost of publishing everything that some private trials have released.

    trials: number of private trials. attempts: number of their earlier starts, which count too. candidates: number of
    runs of an unaccounted tuning that chose what was trained, which count too. estimate: composed epsilon for a record
    that may be in the data of every run; None if no epsilon covers all runs. release_epsilon: the part of it for the
    released statistics alone. reason: why the estimate is no guarantee, or unknown; "" if it is a guarantee.
    """

    trials: int
    attempts: int
    estimate: PrivacyEstimate | None
    release_epsilon: float | None = None
    reason: str = ""
    candidates: int = 0

    @property
    def epsilon(self) -> float | None:
        return self.estimate.epsilon if self.estimate else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = {} if self.estimate is None else self.estimate.as_dict()
        kept = {name: found.get(name) for name in ("epsilon", "delta", "adjacency", "accountant", "kind")}
        counts = {"trials": self.trials, "attempts": self.attempts, "candidates": self.candidates}
        return {**kept, **counts, "release_epsilon": self.release_epsilon, "reason": self.reason}


def composed(trials: Iterable[PublishedTrial]) -> Composition | None:
    """Composed cost of the private trials in ``trials`` with all their attempts; None if nothing was released.

    Guarantee: adaptive composition (`accounting.joint_cost`), at the delta of the trials and the adjacency of
    ``estimate``. The result is only an estimate if a run ended before its planned end, because that may depend on what
    it showed; if runs drew the same noise, or noise from known seeds; if noise followed results; or if an unaccounted
    tuning chose what was trained: its candidates count too, but what they showed decided which mechanism followed.
    """
    private = [trial for trial in trials if trial.attempts]
    own = [attempt for trial in private for attempt in trial.attempts]
    if not own:
        return None
    candidates = {(attempt.key, attempt.number): attempt for trial in private for attempt in trial.candidates}
    attempts = [*own, *candidates.values()]
    delta = max(attempt.delta for attempt in attempts)
    repeated = sum(sum(bool(attempt.trace.segments) for attempt in trial.attempts) - 1 for trial in private)
    found = Composition(len(private), repeated, None, _release_epsilon(own, delta), candidates=len(candidates))
    if len(attempts) == 1 and (privacy := private[0].privacy) is not None:
        alone = PrivacyEstimate(privacy.epsilon, privacy.delta, privacy.adjacency, privacy.accountant, privacy.kind)
        weakness = _known_seeds(attempts) if alone.kind == "guarantee" else _weakness(attempts)
        reason = _tuned(private) or weakness
        kind = "estimate" if reason and alone.kind == "guarantee" else alone.kind
        return replace(found, estimate=replace(alone, kind=kind), reason=reason)
    try:
        together = _together(_counted(attempt.trace for attempt in attempts), delta)
    except UnsupportedMechanism as refusal:
        return replace(found, reason=str(refusal))
    reason = _tuned(private) or _weakness(attempts)
    if together.kind == "guarantee" and reason:
        together = replace(together, kind="estimate")
    return replace(found, estimate=together, reason=reason)


def composed_epsilon(trial: PublishedTrial) -> float | None:
    """Composed epsilon of all attempts at a trial that has ended; the trial's own epsilon if no attempt is recorded.

    None for a trial that has not ended or is not private.
    """
    if not trial.state.has_ended or trial.privacy is None or not trial.privacy.is_private:
        return None
    found = composed([trial])
    return found.epsilon if found else trial.privacy.epsilon


def _tuned(trials: Iterable[PublishedTrial]) -> str:
    """The reason that an unaccounted tuning weakens a composition, and whether its candidates are counted; else ""."""
    tuned = [t for t in trials if t.tags.get("tuning") == "unaccounted" and "candidate" not in t.labels]
    if any(not trial.candidates for trial in tuned):
        return "the candidates of their tuning trained on the same records and are not counted: tuning/ is gone"
    if tuned:
        return "the candidates of their tuning are counted too, but what they showed chose what was trained"
    return ""


def _weakness(attempts: list[Attempt]) -> str:
    seeds = Counter(attempt.seed for attempt in attempts if attempt.seed is not None)
    if any(count > 1 for count in seeds.values()):
        return "runs of one seed draw the same noise (research mode), so what they show is no independent composition"
    if not all(attempt.ended for attempt in attempts):
        return "a run ended before its planned end, which may depend on what it showed"
    if any(attempt.trace.kind != "guarantee" for attempt in attempts):
        return "noise followed results"
    return _known_seeds(attempts)


def _known_seeds(attempts: list[Attempt]) -> str:
    if any(attempt.seed is not None for attempt in attempts):
        return "the noise is drawn from known seeds (research mode), and whoever knows a seed can subtract it"
    return ""


def _release_epsilon(attempts: list[Attempt], delta: float) -> float | None:
    released = [attempt.statistics for attempt in attempts if attempt.statistics is not None]
    return _together(_counted(released), delta).epsilon if released else None


def _counted(traces: Iterable[Trace]) -> tuple[tuple[Trace, int], ...]:
    """Each distinct trace with its count, in the order of the trials, because sums round differently in another."""
    return tuple(Counter(traces).items())


@functools.lru_cache(maxsize=1024)
def _together(traces: tuple[tuple[Trace, int], ...], delta: float) -> PrivacyEstimate:
    return account_together((trace for trace, count in traces for _ in range(count)), delta)
