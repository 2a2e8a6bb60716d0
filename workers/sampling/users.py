"""Training that protects users: at most m rows of each are kept, and either rows or users are sampled.

``els``, example sampling: Poisson batches of rows, or their random allocation, each row clipped. A user is a group of
at most m rows.

``uls``, user sampling: Poisson batches of users, or their random allocation. The gradient of a user is the mean over
their kept rows. It is clipped once, so that any change of all rows of one user moves the sum of a batch by at most the
sensitivity.

The trial draws the m rows of each user uniformly at random and independently of all other users, and keeps them over
the whole run. Given the draws of the others, adding or removing a user adds or removes at most m rows, or one user.
Every epsilon holds on average over the draws too, because hockey-stick divergences are jointly convex; the guarantee
does not need the draw to be secret.

Rows with several owners are covered by ``els`` under the adjacency ``fixed_graph`` alone, in which both data sets
assign the same owners to the same rows. Rows are chosen by that (`dpsweep.workers.data.owners.greedily_kept`), so both
data sets keep the same rows, at most m of each owner.

The number of rows (``els``) or of users (``uls``) that remain is public, as the number of rows is elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput, PrivateDetail
from dpsweep.accounting.mechanism.samplings import RANDOM_ALLOCATION
from dpsweep.workers.data import Dataset, Split, are_shared, rows_of_owners, rows_per_user, shared_users
from dpsweep.workers.dataset_description import DatasetDescription, RowsKept, RowsPerUser
from dpsweep.workers.sampling.rows_per_user import RELEASE
from dpsweep.workers.sampling.samplers import RowDraws, RowNumbers, make_row_draws
from dpsweep.workers.spec import AttackSpec, TrialSpec, UserSampling, UserSpec
from dpsweep.workers.tasks.losses import Loss

PER_USER: Final = ("none", "flat", "per_layer", "automatic", "quantile")
"""Clipping methods that are proven per user: each weight, and each answer on a batch, follows from one norm alone."""


METHODS: Final = ("poisson", RANDOM_ALLOCATION)
"""Samplings that are proven per user: of users, of rows as groups in Poisson batches, and over chains of rows."""


def rows_kept(histogram: RowsPerUser, most: int) -> int:
    """Return how many rows remain if each user keeps at most ``most``."""
    return sum(min(rows, most) * users for rows, users in histogram)


def population(users: UserSpec | None, rows: int, histogram: RowsPerUser, kept: RowsKept | None = None) -> int:
    """Return the size of the population that is sampled: rows, rows that users keep, or users.

    rows: number of training examples.
    histogram: of `rows_per_user`.
    kept: by the cap, if rows may have several owners.
    Raises: InvalidInput if the data name no users.
    """
    if users is None:
        return rows
    if not histogram:
        raise InvalidInput(
            "privacy.unit is user, but the data name no users: give data.user, the column of a table or of texts that "
            "says whose row it is, or user_ids of make_split in a source of your own"
        )
    match users.sampling:
        case "els":
            return rows_kept(histogram, users.max_records) if kept is None else dict(kept)[users.max_records]
        case "uls":
            return sum(count for _, count in histogram)
        case _:
            assert_never(users.sampling)


def sampled(sampling: UserSampling) -> str:
    """Return the word for the members of the population that is sampled."""
    words: Mapping[UserSampling, str] = {"els": "rows", "uls": "users"}
    return words[sampling]


def _require_strangers(spec: TrialSpec, shared: int) -> None:
    """Raise `InvalidInput` if the trial protects users and people who train own test examples, too.

    shared: of `shared_users`. Measures of test data would show these people, and no epsilon covers that.
    """
    if spec.users is not None and shared:
        raise InvalidInput(
            "privacy.unit is user, but people of the training data own rows of the test data, too: measures of these "
            "rows show people who train, which no epsilon covers; take their rows out of the test table, or leave out "
            "test_path, so that data.test_fraction holds out whole people"
        ) from PrivateDetail(f"{shared} people own rows of both")


def _require_owners(spec: TrialSpec, is_shared: bool) -> None:
    """Raise `InvalidInput` if the trial protects users, rows may have several (``is_shared``), and no epsilon of theirs
    is proven here.
    """
    if spec.users is None or not is_shared:
        return
    match spec.users.sampling:
        case "els":
            pass
        case "uls":
            raise InvalidInput(
                "rows have several owners, so that a user has no gradient of their own, and user_sampling uls is not "
                "proven; use els"
            )
        case _:
            assert_never(spec.users.sampling)
    if spec.adjacency != "fixed_graph":
        raise InvalidInput(
            "rows have several owners: whoever is added or removed changes which rows others keep, so that no epsilon "
            "is proven. Set privacy.adjacency: fixed_graph, which takes as known who owns which row and protects what "
            "the rows hold, or name one owner of each row (docs/users.md)"
        )


def planned_population(spec: TrialSpec, data: DatasetDescription) -> int:
    """Return `population` of a trial on the described data.

    Raises: InvalidInput if the data name no users, people who train own test examples, too, or rows have several owners
    and no epsilon of theirs is proven here.
    """
    _require_owners(spec, data.rows_kept is not None)
    _require_strangers(spec, data.shared_users)
    return population(spec.users, data.train_size, data.rows_per_user, data.rows_kept)


def population_of(spec: TrialSpec, dataset: Dataset) -> int:
    """Return `planned_population` of a trial on a data set whose users still have all of their rows."""
    if spec.users is None:
        return len(dataset.train)
    owners, most, kept = dataset.train.user_ids, spec.users.max_records, None
    _require_owners(spec, are_shared(owners))
    _require_strangers(spec, shared_users(dataset))
    if owners is not None and are_shared(owners):
        kept = ((most, len(rows_of_owners(owners, most))),)
    return population(spec.users, len(dataset.train), rows_per_user(dataset.train), kept)


def with_rows_of_users(spec: TrialSpec, dataset: Dataset, state: Any = None) -> tuple[Dataset, Any]:
    """Return the data set with at most ``max_records`` random rows of each user, and the state that draws them again.

    state: what an earlier call returned, of a checkpoint; None draws again. As it is, and None, without users. None
    also if rows may have several owners, whose rows are the same in every trial.
    """
    ids = dataset.train.user_ids
    if spec.users is None or ids is None:
        return dataset, None
    if are_shared(ids):
        return replace(dataset, train=dataset.train.select(rows_of_owners(ids, spec.users.max_records))), None
    draws = make_row_draws(spec.known_seed, "rows of users")
    if state is not None:
        draws.restore(state)
    before = draws.state()
    kept = kept_rows(ids.numpy(), spec.users.max_records, draws)
    return replace(dataset, train=dataset.train.select(kept)), before


def kept_rows(user_ids: npt.NDArray[np.int64], most: int, draws: RowDraws) -> RowNumbers:
    """Return up to ``most`` rows of each user, ascending: a uniformly random subset, independent for each user."""
    order = draws.order(len(user_ids))
    by_user = order[np.argsort(user_ids[order], kind="stable")]
    sorted_ids = user_ids[by_user]
    first = np.flatnonzero(np.concatenate([[True], sorted_ids[1:] != sorted_ids[:-1]]))
    place = np.arange(len(by_user)) - np.repeat(first, np.diff(np.append(first, len(by_user))))
    return np.sort(by_user[place < most])


def slots_of(split: Split, most: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the rows of each user, int64 [users, most], and their weights, float64 of the same shape.

    Users are ascending by id. The mean of ``most`` losses with these weights is the mean over the user's r rows: each
    has the weight most / r. A user with fewer rows fills up with their own copies first row at weight 0, so that
    nothing of others enters. No user may have more than ``most`` rows.
    """
    assert split.user_ids is not None, "users are sampled only where the data name them"
    _, user_of, counts = np.unique(split.user_ids.numpy(), return_inverse=True, return_counts=True)
    assert counts.max() <= most, "each user keeps at most so many rows"
    rows = np.argsort(user_of, kind="stable")
    first = np.cumsum(counts) - counts
    place = np.arange(most)
    own = place < counts[:, None]
    return rows[first[:, None] + np.where(own, place, 0)], np.where(own, most / counts[:, None], 0.0)


def with_weights(labels: Tensor, weights: Tensor) -> Tensor:
    """Return labels [b, ...] and weights [b] in one float64 tensor [b, 1 + labels of a row], which holds both exactly.

    Class indices and tokens are whole numbers below 2^53.
    """
    return torch.cat([weights[:, None], labels.reshape(len(labels), -1).double()], dim=1)


def loss_of(users: UserSpec, loss: Loss, labels: Tensor) -> Loss:
    """Return ``loss`` for the targets of the sampled population; those of users are made by `with_weights`.

    labels: of the training split; their form is that of the targets.
    """
    shape, kind = labels.shape[1:], torch.float32 if labels.is_floating_point() else torch.int64

    def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
        weights, own = targets.tensor_split((1,), dim=1)
        losses = loss(outputs, own.reshape(-1, *shape).to(kind))
        return losses * weights.squeeze(1).to(losses)

    match users.sampling:
        case "els":
            return loss
        case "uls":
            return weighted
        case _:
            assert_never(users.sampling)


def require_per_user(spec: TrialSpec, releases: Iterable[str]) -> None:
    """Raise `InvalidInput` for a trial with parts that have no proven epsilon, or no meaning, per user; it names them
    all. releases: names of the releases of the trial besides its steps.
    """
    users = spec.users
    if users is None:
        return
    released = ", ".join(name for name in releases if name != RELEASE)
    refused = {
        f"sampling.method {spec.sampling.method} ({' or '.join(METHODS)})": spec.sampling.method not in METHODS,
        "sampling.max_batch_size": spec.sampling.max_batch_size is not None,
        f"clipping {spec.clipping.name} (one of {', '.join(PER_USER)})": spec.clipping.name not in PER_USER,
        f"norms.refreshes_per_epoch {spec.norms.refreshes_per_epoch} (epsilons of single examples; auto or off)": (
            spec.norms.refreshes_per_epoch not in ("auto", "off")
        ),
        "norms.exact_examples": spec.norms.exact_examples > 0,
        "attacks (they attack single examples)": spec.attacks != AttackSpec(),
        "audit of rows (they are single examples; give kind: gradient)": (
            spec.audit is not None and spec.audit.leaves_out_rows
        ),
        "tune with a private selection": spec.selection is not None or spec.data.part is not None,
        f"adjacency {spec.adjacency} (add_remove, or fixed_graph)": spec.adjacency
        not in (None, "add_remove", "fixed_graph"),
        **_refused_by_way(users.sampling, spec, released),
    }
    found = [what for what, is_so in refused.items() if is_so]
    if found:
        raise InvalidInput(
            f"privacy.unit is user with user_sampling {users.sampling}, which does not cover {'; '.join(found)}; "
            "leave it out, or choose unit: example"
        )


def _refused_by_way(sampling: UserSampling, spec: TrialSpec, released: str) -> dict[str, bool]:
    """Return what this way of sampling does not cover, and whether the trial has it."""
    match sampling:
        case "els":
            return {}
        case "uls":
            return {
                f"{released}, released from rows": bool(released),
                "adjacency fixed_graph (it takes owners of rows as known; els)": spec.adjacency == "fixed_graph",
                "augmentation": spec.augmentation is not None,
            }
        case _:
            assert_never(sampling)
