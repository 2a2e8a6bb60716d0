"""Notes on groups of test examples that are too small for their measures to be shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dpsweep.orchestration.comparison.formats import listed
from dpsweep.orchestration.records.published import PublishedTrial
from dpsweep.orchestration.records.states import TrialState

_NAMED: Final = 8
"""Most groups that are named; intersections of several attributes may hide hundreds."""


def hidden_groups_note(trials: Iterable[PublishedTrial]) -> tuple[str, ...]:
    """Return a sentence that names the groups that finished trials do not show, without their sizes; nothing if all are
    shown.

    Data with a single group need no such sentence.
    """
    evaluated = [
        (trial, trial.quality) for trial in trials if trial.state is TrialState.FINISHED and trial.quality is not None
    ]
    hidden = list(dict.fromkeys(name for _, quality in evaluated for name in quality.hidden))
    shown = {group.name for _, quality in evaluated for group in quality.groups}
    count = len(shown.union(hidden))
    if not hidden or count < 2:
        return ()
    named = listed([*hidden[:_NAMED], *([f"{len(hidden) - _NAMED} more"] if len(hidden) > _NAMED else [])])
    bounds = {bound for trial, _ in evaluated if (bound := trial.params.get("spec.min_group_size")) is not None}
    least = f" = {listed(sorted(map(str, bounds)))}" if bounds else ""
    verb, where = "is" if len(hidden) == 1 else "are", " in some trials" if shown.intersection(hidden) else ""
    return (
        f"{len(hidden)} of {count} groups {verb} not shown{where}: {named}. They have fewer than min_group_size{least} "
        "test examples, or would give another group away; raise test_fraction or lower min_group_size to see them.",
    )
