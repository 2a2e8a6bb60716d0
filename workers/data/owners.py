"""Who owns which row. A row has one owner, or several, such as the authors of a document.

Owners are int64: [n] if each row has one, or [n, k] if rows may have up to k, where `NOBODY` fills up.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import scipy.sparse as sparse
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput

Ids = npt.NDArray[np.int64]
NOBODY: Final = -1
"""Fills the places of further owners of a row that has fewer."""


def are_shared(owners: Tensor | None) -> bool:
    """Return whether rows may have several owners."""
    return owners is not None and owners.ndim == 2


def first_owners(owners: Tensor) -> Tensor:
    """Return one owner [n] of each row. Raises: InvalidInput if a row has none."""
    if owners.ndim != 2:
        return owners
    if owners.shape[1] == 0 or bool((owners == NOBODY).all(1).any()):
        raise InvalidInput(f"user_ids has a row without an owner; each has at least one that is not {NOBODY}")
    return owners.amax(1)


def ownership(owners: Tensor) -> tuple[Ids, Ids]:
    """Return the rows and the owners of all pairs of a row and one of its owners, each pair once, ascending by row."""
    found = owners.numpy()
    if found.ndim == 1:
        return np.arange(len(found)), found
    found = np.sort(found, axis=1)
    once = found != NOBODY
    once[:, 1:] &= found[:, 1:] != found[:, :-1]
    rows, places = np.nonzero(once)
    return rows, found[rows, places]


def dependent_rows(owners: Tensor) -> Ids:
    """Return the number [n] of the set of people that each row belongs to.

    It is the owner of the row; of several owners, all who share rows with each other, directly or through others.
    """
    if not are_shared(owners):
        return owners.numpy()
    rows, people = ownership(owners)
    people = np.unique(people, return_inverse=True)[1]
    size = len(owners) + int(people.max(initial=-1)) + 1
    links = sparse.coo_array((np.ones(len(rows), dtype=bool), (rows, len(owners) + people)), shape=(size, size))
    return connected_components(links, directed=False)[1][: len(owners)].astype(np.int64)


def rows_of_owners(owners: Tensor, most: int) -> Ids:
    """Return the rows `greedily_kept` in an order that depends on their number alone: the same in every trial."""
    return greedily_kept(owners, most, np.random.default_rng(len(owners)).permutation(len(owners)))


def greedily_kept(owners: Tensor, most: int, order: Ids) -> Ids:
    """Return the rows that stay if they are taken in this ``order`` [n], each unless one of its owners has ``most``
    rows already; ascending.

    The result depends on the owners and the order alone. It is maximal. Where rows have at most k owners, it
    holds at least 1/k of as many rows as the largest choice with at most ``most`` rows of each owner.

    Proof: let K be kept and O any choice with at most m rows of each owner. A row of O that is not in K has an owner u
    with m rows in K. Charge it to one such u, whose rows are G(u). At most m - |O & K & G(u)| = |(K - O) & G(u)| rows
    are charged to u. Summed over owners, that is at most k |K - O|, as each row of K - O is counted once for each
    owner. So |O| <= |O & K| + k |K - O| <= k |K|.

    Rows are decided many at a time, as if one by one. A row stays once all rows of its owners that come before it and
    are not left out are fewer than ``most``. It is left out once as many of them stay. The first undecided row can
    always be decided.
    """
    rows, people = ownership(owners)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    by_person = np.lexsort((place[rows], people))
    rows, people = rows[by_person], people[by_person]
    stays = np.zeros(len(owners), dtype=bool)
    while len(rows):
        first = np.flatnonzero(np.concatenate([[True], people[1:] != people[:-1]]))
        start = np.repeat(first, np.diff(np.append(first, len(people))))
        before = np.arange(len(rows)) - start
        staying = np.concatenate([[0], np.cumsum(stays[rows])])
        is_full, is_crowded = np.zeros((2, len(owners)), dtype=bool)
        is_full[rows[staying[:-1] - staying[start] >= most]] = True
        is_crowded[rows[before >= most]] = True
        stays[rows[~is_crowded[rows]]] = True
        if (is_full | ~is_crowded)[rows].all():
            break
        left = ~is_full[rows]
        rows, people = rows[left], people[left]
    return np.flatnonzero(stays)
