"""The ε of given records, such as all of one user, over all that several trials have shown: private data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpsweep.accounting.accountants.joint_cost import epsilon_of_examples_together
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import union, weakened
from dpsweep.accounting.records import TrialFiles, has_norms
from dpsweep.orchestration.commands.stored_trial import recorded, stored_trace
from dpsweep.orchestration.comparison.ledger import composed
from dpsweep.orchestration.comparison.stored import owned_record
from dpsweep.orchestration.records.attempts import Attempt
from dpsweep.orchestration.records.layout import SweepFiles


def composed_of_examples(
    files: SweepFiles, key: str | None, examples: Sequence[int], delta: float | None
) -> PrivacyEstimate:
    """Return the composed epsilon of the records ``examples`` together, from their contributions to each trial.

    key: of one trial, by default all private ones; delta: by default the sweep's. Earlier starts, candidates of a
    tuning, and trials without norms count with the most that records can contribute. A trial that did not train on a
    record costs it nothing.

    Claim: as `epsilon_of_examples_together`, and an estimate for the reasons of `ledger.composed`.
    Raises: InvalidInput if no trial trained on one of the records, DataCorruption for damaged files.
    """
    ids, record = sorted(set(examples)), owned_record(files)
    trials = [record.trial(point) for point in record.points if point.is_private and key in (None, point.key)]
    cost = composed(trials)
    if cost is None:
        raise InvalidInput(f"{files.root} has no private trial that has shown anything; name another sweep or trial")
    kept = {trial.key: _kept(files.trial(trial.key), trial.attempts) for trial in trials}
    candidates = {(each.key, each.number): each for trial in trials for each in trial.candidates}
    without = [each for trial in trials for each in trial.attempts if each is not kept[trial.key]]
    without += candidates.values()
    own = [recorded(files.trial(key), each.trace, ids) for key, each in kept.items() if each is not None]
    missing = sorted(frozenset.intersection(*(each.missing for each in own))) if own else []
    if missing:
        raise InvalidInput(
            f"--examples has {missing[0]}, but no trial of {files.root} with norms trained on an example of this id"
        )
    traces = [each.trace for each in kept.values() if each is not None]
    runs = [(trace, one.steps, one.contributions) for trace, one in zip(traces, own, strict=True)]
    most = np.ones((len(ids), 1), np.float32)
    asked = max(attempt.delta for trial in trials for attempt in trial.attempts) if delta is None else delta
    found = epsilon_of_examples_together([*runs, *((each.trace, (0,), most) for each in without)], asked)
    reasons = cost.reasons if cost.estimate else union(trial.reasons for trial in trials)
    return weakened(found, reasons)


def _kept(files: TrialFiles, attempts: Sequence[Attempt]) -> Attempt | None:
    """Return the attempt whose norms are stored: the last one that trained, if it showed what the stored trace says."""
    trained = [attempt for attempt in attempts if attempt.trace.segments]
    if not trained or not has_norms(files.norms) or stored_trace(files.trace) != trained[-1].trace:
        return None
    return trained[-1]
