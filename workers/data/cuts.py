"""Splits a source into a data set: test, public part, reduced groups, disjoint parts, as the spec alone determines."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput, PrivateDetail, require_finite
from dpsweep.accounting.registry import nearest
from dpsweep.workers.data.base import Dataset, Indices, Source, Split
from dpsweep.workers.data.owners import are_shared, ownership
from dpsweep.workers.spec import DataPart, DataSpec

_TEST, _PUBLIC, _KEEP, _PART = 0, 1, 2, 3
"""Number of the random stream of each kind of split; a change of one split leaves the others unchanged."""


def cut(source: Source, spec: DataSpec) -> Dataset:
    """Return the data set of a trial, made from ``source`` in four steps.

    1. Hold out a test set, if the source has none. 2. Split off the public part. 3. Apply ``keep`` to the rest, so that
    a count in ``keep`` is the size of the group in the training set. 4. If the trial is a candidate that trains on one
    of several disjoint parts, select this part, and hold out the last part.

    Examples keep the order of the source. With the same seed, a larger ``keep`` contains a smaller one. Test and public
    sets that are split off here share no user with the rest. If rows may have several owners, a share of the people is
    held out. Rows with owners on both sides belong to neither part. A note counts them.

    Raises: InvalidInput for unknown groups, and for parts that would be empty or larger than the data.
    """
    train, test, notes = source.train, source.test, source.notes
    if test is None:
        train, test, apart = _split_off(train, spec.test_fraction, (spec.split_seed, _TEST), "test_fraction")
        notes = (*notes, *apart)
    public = None
    if spec.public_fraction > 0.0:
        train, public, apart = _split_off(train, spec.public_fraction, (spec.split_seed, _PUBLIC), "public_fraction")
        notes = (*notes, *apart)
    train = _keep(train, source.group_names, spec)
    train, held_out = _select_part(train, spec.part, spec.split_seed) if spec.part else (train, None)
    return Dataset(
        source.name,
        train,
        test,
        public,
        source.group_names,
        source.class_names,
        source.preparation,
        notes,
        held_out,
        source.task,
        source.reasons,
    )


def _select_part(train: Split, part: DataPart, seed: int) -> tuple[Split, Split]:
    """Return the candidate's part of the examples, and the last part.

    The part of an example depends only on the seed, its position and the number of examples. All parts but the last
    have the same size, so that all candidates cost the same. Users are not kept together.
    """
    size = len(train) // part.of
    if size == 0:
        raise InvalidInput(
            f"{part.of - 1} candidates need {part.of} disjoint parts of the training examples, but there are "
            f"{len(train)}; offer fewer candidates"
        )
    order = np.random.default_rng((seed, _PART)).permutation(len(train))
    ours, last = order[part.place * size : (part.place + 1) * size], order[(part.of - 1) * size :]
    return train.select(np.sort(ours)), train.select(np.sort(last))


def _split_off(split: Split, fraction: float, seed: tuple[int, ...], name: str) -> tuple[Split, Split, tuple[str, ...]]:
    """Return the rest, a random part of round(fraction * n) examples, or fewer, to keep all examples of a user
    together, and notes on rows in neither.

    Without users the part is uniformly random.
    """
    if split.user_ids is not None and are_shared(split.user_ids):
        return _hold_out_owners(split, split.user_ids, fraction, seed, name)
    count = round(fraction * len(split))
    if not 0 < count < len(split):
        raise InvalidInput(f"{name} is {fraction}, which takes {count} of {len(split)} examples; leave both parts some")
    generator = np.random.default_rng(seed)
    if split.user_ids is None:
        order = generator.permutation(len(split))
        return split.select(np.sort(order[count:])), split.select(np.sort(order[:count])), ()
    _, user_of = np.unique(split.user_ids.numpy(), return_inverse=True)
    taken = _choose_users(np.bincount(user_of), count, generator)
    if not taken.any():
        raise InvalidInput(
            f"{name} is {fraction}, which takes {count} of {len(split)} examples, but each user "
            "has more, and is kept in one part; set it higher, or name no users"
        )
    return split.select(np.flatnonzero(~taken[user_of])), split.select(np.flatnonzero(taken[user_of])), ()


def _hold_out_owners(
    split: Split, owners: Tensor, fraction: float, seed: tuple[int, ...], name: str
) -> tuple[Split, Split, tuple[str, ...]]:
    """Return the rows without a held-out owner, the rows with no other owner, and a note on the rest."""
    rows, people = ownership(owners)
    _, person_of = np.unique(people, return_inverse=True)
    number = int(person_of.max(initial=-1)) + 1
    is_held_out = np.zeros(number, dtype=bool)
    is_held_out[np.random.default_rng(seed).permutation(number)[: max(1, round(fraction * number))]] = True
    held_out = np.bincount(rows, is_held_out[person_of], len(split))
    of_all = held_out == np.bincount(rows, minlength=len(split))
    if not of_all.any() or (held_out > 0).all():
        short = "whose owners are all held out; set it higher" if not of_all.any() else "to train; set it lower"
        raise InvalidInput(
            f"{name} is {fraction}, the share of people held out; as rows have several owners, that leaves no row "
            f"{short}, or give test_path"
        )
    apart = int(((held_out > 0) & ~of_all).sum())
    said = (
        f"{apart:,} of {len(split):,} rows ({apart / len(split):.1%}) are left out by {name}: some of their owners are "
        "held out, and others are not"
    )
    return split.select(np.flatnonzero(held_out == 0)), split.select(np.flatnonzero(of_all)), (said,) if apart else ()


def _choose_users(sizes: Indices, count: int, generator: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Mask of chosen users: in random order, each is chosen if the total of ``sizes`` then stays within ``count``."""
    taken = np.zeros(len(sizes), dtype=bool)
    for user in generator.permutation(len(sizes)):
        if sizes[user] <= count:
            taken[user] = True
            count -= sizes[user]
    return taken


def _keep(train: Split, group_names: tuple[str, ...], spec: DataSpec) -> Split:
    groups = train.groups.numpy()
    kept = np.ones(len(train), dtype=bool)
    for name, amount in spec.keep.items():
        if name not in group_names:
            raise InvalidInput(f"keep names the unknown group {name!r}; {nearest(name, group_names)}")
        group = group_names.index(name)
        members = np.flatnonzero(groups == group)
        kept[members] = False
        kept[_chosen(members, name, amount, (spec.split_seed, _KEEP, group))] = True
    return train if kept.all() else train.select(np.flatnonzero(kept))


def _chosen(members: Indices, name: str, amount: float | int, seed: tuple[int, ...]) -> Indices:
    """Return a random part of ``members``; ``amount`` is a fraction in (0, 1] if a float, a count if an int."""
    if isinstance(amount, bool):
        raise InvalidInput(f"keep of group {name!r} is {amount}, but must be a fraction or a count")
    if isinstance(amount, int):
        if not 1 <= amount <= len(members):
            raise InvalidInput(
                f"keep of group {name!r} is {amount}, but must be a count from 1 to the size of the group"
            ) from PrivateDetail(f"the group has {len(members)} examples")
        count = amount
    else:
        require_finite(f"keep of group {name!r}", amount, above=0.0, at_most=1.0)
        count = max(1, round(amount * len(members)))
    return np.random.default_rng(seed).permutation(members)[:count]
