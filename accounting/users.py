"""Epsilon of every user: of all records of one user together, from what each of them contributed.

The claim is that of `accounting.pld.epsilon_of_examples` for users of several records, whose ids are fixed and known
before the run, and that of `accounting.individual` for users of one. Adjacency: all records of one user differ.
"""

from __future__ import annotations

import numpy as np

from accounting.errors import InvalidInput
from accounting.individual import individual_claim, individual_epsilons
from accounting.mechanism import Trace
from accounting.pld import epsilon_of_examples
from accounting.records import Epsilons, NormShards, StoredUsers, read_contributions


def epsilons_of_users(shards: NormShards, users: StoredUsers, trace: Trace, delta: float, share: int) -> Epsilons:
    """Epsilons of the users whose id leaves the remainder ``share`` when divided by the number of parts.

    shards, users: of the trial. The result has the ids of users in place of those of examples, ascending, and no
    losses. Every part is read, and only the rows of these users are kept.

    Raises: InvalidInput for a run that a filter ended, where no user was bounded; DataCorruption for damaged files.
    """
    if trace.filter is not None:
        raise InvalidInput("a filter limited single examples, not users, so users have no epsilon of their own here")
    found = users.of((part, read_contributions(shards.files(part))) for part in shards.parts)
    shares = len(shards.parts)
    kept = [(owners[mine], rows.contributions[mine]) for owners, rows in found for mine in [owners % shares == share]]
    owners, values = (np.concatenate(column) for column in zip(*kept, strict=True))
    order = np.argsort(owners, kind="stable")
    ids, starts, counts = np.unique(owners[order], return_index=True, return_counts=True)
    values, alone = values[order], counts == 1
    upper, lower = np.empty(len(ids)), np.empty(len(ids))
    single = individual_epsilons(shards.steps, values[starts[alone]], trace, delta, "pld")
    upper[alone], lower[alone] = single.upper, single.lower
    for place in np.flatnonzero(~alone).tolist():
        own = values[starts[place] : starts[place] + counts[place]]
        together = epsilon_of_examples(trace, shards.steps, own, delta)
        upper[place], lower[place] = together.upper, together.lower
    return Epsilons(
        example_ids=ids,
        groups=np.zeros(len(ids), np.int32),
        upper=upper,
        lower=lower,
        losses=np.full(len(ids), np.nan, np.float32),
        delta=delta,
        method="pld",
        kind=individual_claim(trace),
    )
