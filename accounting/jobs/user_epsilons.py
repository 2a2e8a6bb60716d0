"""Epsilon of every user: of all records of one user together, from their recorded contributions.

The claim is that of `dpsweep.accounting.pld.epsilon_of_examples` (`Trace.individual_kind`), also where a filter
guarantees more of users of one record: it limits each record, not a user's records together. Who owns which record is
fixed and known before the run. Adjacency: all records of one user differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.individual import individual_epsilons
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.pld import epsilon_of_examples
from dpsweep.accounting.records import Epsilons


def epsilons_of_users(
    users: NDArray[np.int64], rows: NDArray[np.float32], steps: Sequence[int], trace: Trace, delta: float
) -> Epsilons:
    """Return the epsilons of some users, from all of their records.

    users: whose each record is [records]. rows: what it contributed [records, snapshots], at ``steps`` of the run. The
    result has the ids of users in place of examples, ascending, and no losses.
    """
    order = np.argsort(users, kind="stable")
    ids, starts, counts = np.unique(users[order], return_index=True, return_counts=True)
    alone = counts == 1
    upper, lower = np.empty(len(ids)), np.empty(len(ids))
    single = individual_epsilons(steps, rows[order[starts[alone]]], trace, delta, "pld")
    upper[alone], lower[alone] = single.upper, np.nan if single.lower is None else single.lower
    for place in np.flatnonzero(~alone).tolist():
        own = rows[order[starts[place] : starts[place] + counts[place]]]
        together = epsilon_of_examples(trace, steps, own, delta)
        upper[place], lower[place] = together.upper, np.nan if together.lower is None else together.lower
    return Epsilons(
        example_ids=ids,
        groups=np.zeros(len(ids), np.int32),
        upper=upper,
        lower=None if np.isnan(lower).any() else lower,
        losses=np.full(len(ids), np.nan, np.float32),
        delta=delta,
        method="pld",
        kind=trace.individual_kind,
    )
