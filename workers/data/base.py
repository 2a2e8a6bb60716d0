"""Data sets: splits of examples with labels, groups and stable ids."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput, PrivateDetail, require_choice, require_finite
from dpsweep.accounting.mechanism.reasons import FROM_ROWS, Reason, union
from dpsweep.accounting.registry import nearest
from dpsweep.workers.data.mapped import ColumnFiles
from dpsweep.workers.data.owners import are_shared, first_owners, ownership
from dpsweep.workers.data.preparations import AS_STORED, Preparation
from dpsweep.workers.own_code.imports import blamed_on
from dpsweep.workers.spec import DataPart, DataSpec
from dpsweep.workers.tasks import labelled, require_indices, task_called

_TRIED_EXAMPLES: Final = 8
"""Number of examples on which a preparation is tried."""
_ROUNDING: Final = 1e-4
"""Tolerated difference between a feature prepared alone and in a batch, relative to the feature's largest value."""


def require_one_by_one(source: str, prepare: Callable[[Tensor], Tensor], features: Tensor) -> None:
    """Raise InvalidInput when a preparation fails, changes its input, or mixes examples of a batch.

    Clipping bounds the influence of an example only through its own gradient, so examples must not be mixed. The
    preparation is tried on a few examples spread over all of ``features``, because neighbouring ones can be alike.
    """
    what = f"the preparation of {source!r}"
    count = min(_TRIED_EXAMPLES, len(features))
    rows = features[torch.arange(count) * (len(features) - 1) // max(count - 1, 1)]
    given = rows.clone()
    with blamed_on(source, "the preparation of"), torch.no_grad():
        together, alone = prepare(given), [prepare(rows[at : at + 1].clone()) for at in range(count)]
    for prepared, examples in ((together, count), *((row, 1) for row in alone)):
        _require_features(what, prepared, examples)
    if not torch.equal(_bytes(given), _bytes(rows)):
        raise InvalidInput(f"{what} changes the features that it is given; have it return others")
    if any(row.shape[1:] != together.shape[1:] for row in alone) or not _agree(together, torch.cat(alone)):
        raise InvalidInput(
            f"{what} gives an example other features alone than beside others; it may neither mix examples nor draw "
            "at random: use fixed numbers, such as a published mean, not those of the batch"
        )


def _require_features(what: str, prepared: object, examples: int) -> None:
    if not isinstance(prepared, Tensor):
        raise InvalidInput(f"{what} returns {type(prepared).__name__}, but must return a tensor")
    if prepared.ndim == 0 or len(prepared) != examples:
        raise InvalidInput(
            f"{what} returns shape {tuple(prepared.shape)} for a batch of {examples}, but must return [{examples}, ...]"
        )
    if prepared.dtype not in (torch.float32, torch.int64):
        raise InvalidInput(
            f"{what} returns {prepared.dtype}, but must return float32, or int64 for tokens; end it in .float()"
        )


def _agree(one: Tensor, other: Tensor) -> bool:
    one, other = one.double(), other.double()
    scale = one.nan_to_num(0.0, 0.0, 0.0).abs().amax(0)
    equal = torch.isclose(one, other, rtol=_ROUNDING, atol=0.0, equal_nan=True)
    return bool((equal | ((one - other).abs() <= _ROUNDING * scale)).all())


def _bytes(features: Tensor) -> Tensor:
    return features.contiguous().view(torch.uint8)


Indices = npt.NDArray[np.int64]
_LABEL_TYPES: Final = (torch.int64, torch.float32, torch.int32, torch.int16)


@dataclass(frozen=True)
class Split:
    """Examples of one split; every tensor has the same length n.

    `features`: [n, ...] in their stored type (uint8 images, float32 rows, int32 or int64 tokens).
    `labels`: [n, ...], in the form of the data set's task (`dpsweep.workers.tasks`); for classification int64 [n],
    indices into its class names. Labels of tokens and pixels may be int32 or int16; `as_targets` converts them batch by
    batch.
    `groups`: int64 [n], indices into its group names.
    `example_ids`: int64 [n], positions in the source; unique within the data set, and the same in every run.
    `user_ids`: int64 [n], the owner of each example if the source names one, or [n, k] if it may have up to k
    (`dpsweep.workers.data.owners`). All examples of a user stay in the same split, except where candidates train on
    disjoint parts.
    `place`: location of memory-mapped features, and labels if they are mapped too; None if in memory.
    `flaws`: of texts, bool [n, 2]: whether each was cut, and whether it has no token.
    """

    features: Tensor
    labels: Tensor
    groups: Tensor
    example_ids: Tensor
    user_ids: Tensor | None = None
    place: ColumnFiles | None = None
    flaws: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.features) or self.labels.dtype not in _LABEL_TYPES:
            raise InvalidInput(
                f"labels has shape {tuple(self.labels.shape)} and type {self.labels.dtype}, but must be int64 or "
                "float32 (or, of tokens and pixels, int32 or int16) with one entry for each of the "
                f"{len(self.features)} examples"
            )
        columns = {"groups": self.groups, "example_ids": self.example_ids}
        if self.user_ids is not None:
            columns["user_ids"] = first_owners(self.user_ids)
        for name, column in columns.items():
            if column.shape != (len(self.features),) or column.dtype != torch.int64:
                raise InvalidInput(
                    f"{name} has shape {tuple(column.shape)} and type {column.dtype}, "
                    f"but must be int64 with one entry for each of the {len(self.features)} examples"
                )

    def __len__(self) -> int:
        return len(self.features)

    def select(self, indices: Indices) -> Split:
        """Return the examples at ``indices``, in that order."""
        at = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        users, flaws = (None if each is None else each[at] for each in (self.user_ids, self.flaws))
        place, features, labels = None, self.features, self.labels
        if self.place is None:
            features, labels = features.index_select(0, at), labels.index_select(0, at)
        else:
            place, (features, labels) = self.place.select((features, labels), at)
        return Split(features, labels, self.groups[at], self.example_ids[at], users, place, flaws)


def as_targets(labels: Tensor) -> Tensor:
    """Return stored labels in the type that losses and tasks take: int64 or float32."""
    return labels if labels.is_floating_point() else labels.long()


@dataclass(frozen=True)
class Source:
    """All data of a source, before any split. `test`: None if the source has no test set.

    `class_names`: names of the outputs of a model: classes, targets, labels or tokens, depending on the task. `task`: a
    name in `dpsweep.workers.tasks.TASKS`; it determines the form of labels.

    `notes`: facts about the data that readers of the results must know (pixels that differ from the original, dropped
    rows). Names and notes may be lists; a single note may be a string. `reasons`: what was read off the rows without
    noise, by names of `dpsweep.accounting.mechanism.reasons`, for which every epsilon is an estimate.
    `columns`: how a table is read, if it is declared, as plain values of a
    `dpsweep.workers.data.row_readers.RowReader`.

    Raises: InvalidInput when names, labels, groups, ids or shapes are inconsistent, and when the preparation of an
    example depends on other examples.
    """

    name: str
    train: Split
    test: Split | None
    group_names: tuple[str, ...]
    class_names: tuple[str, ...]
    preparation: Preparation = AS_STORED
    notes: tuple[str, ...] = ()
    task: str = "classification"
    reasons: tuple[Reason, ...] = ()
    columns: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reasons", union([_of_rows(self.reasons)]))
        task, splits = task_called(self.task), [self.train] if self.test is None else [self.train, self.test]
        if not isinstance(self.name, str):
            raise InvalidInput(f"the name of a source is {self.name!r}, but must be a string")
        notes = (self.notes,) if isinstance(self.notes, str) else self.notes
        for field, values in (("group_names", self.group_names), ("class_names", self.class_names), ("notes", notes)):
            object.__setattr__(self, field, _texts(f"{field} of {self.name!r}", values))
        if len(self.class_names) == 1 and "classes_from_rows" in self.reasons:
            raise InvalidInput(
                f"all labels of {self.name!r} are the same, but {self.task} needs at least {task.least_names} classes; "
                "name another label, add rows of other classes, or declare all `classes`"
            ) from PrivateDetail(repr(self.class_names))
        examples = sum(map(len, splits))
        if len(self.class_names) > max(_MANY_CLASSES, examples / 2) and "classes_from_rows" in self.reasons:
            raise InvalidInput(
                f"most labels of {self.name!r} are different, so that no class can be learnt from others of its kind; "
                "name another label, declare `classes`, or set task: regression for numbers"
            ) from PrivateDetail(f"there are {len(self.class_names)} labels of {examples} examples")
        _check_names(f"classes of {self.name!r}", self.class_names, task.least_names)
        _check_names(f"groups of {self.name!r}", self.group_names, at_least=1)
        if not all(map(len, splits)):
            sizes = " and ".join(str(len(split)) for split in splits)
            raise InvalidInput(
                f"the training and test set of {self.name!r} have {sizes} examples; neither may be empty"
            )
        if len({(split.features.shape[1:], split.features.dtype) for split in splits}) > 1:
            shapes = " and ".join(f"{tuple(split.features.shape[1:])} of {split.features.dtype}" for split in splits)
            raise InvalidInput(f"training and test examples of {self.name!r} differ: {shapes}")
        for split in splits:
            task.check_labels(f"labels of {self.name!r}", split.labels, self.class_names)
            require_indices(f"groups of {self.name!r}", split.groups, self.group_names)
        ids = torch.cat([split.example_ids for split in splits])
        if len(ids.unique()) < len(ids):
            raise InvalidInput(
                f"example_ids of {self.name!r} are not unique over training and test split; give each example its own"
            )
        require_one_by_one(self.name, self.preparation, self.train.features)


_MANY_CLASSES: Final = 20
"""Number of undeclared classes up to which a few rows may all be of different ones."""


def _of_rows(reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """Return the reasons of a source. Raises: InvalidInput for one that says nothing of rows."""
    return tuple(require_choice("a reason of a source", reason, FROM_ROWS) for reason in reasons)


def repeated(values: Collection[str]) -> str | None:
    """Return the first value that occurs more than once, or None."""
    return next((value for value, count in Counter(values).items() if count > 1), None)


def _texts(what: str, values: Iterable[object]) -> tuple[str, ...]:
    """``values`` as a tuple of strings. Raises: InvalidInput for other types, as 0 would be read back as '0'."""
    if isinstance(values, list | tuple) and all(isinstance(value, str) for value in values):
        return tuple(str(value) for value in values)
    raise InvalidInput(f"{what} must be a tuple of strings; put others in quotes") from PrivateDetail(repr(values))


def _check_names(what: str, names: tuple[str, ...], at_least: int) -> None:
    if len(names) < at_least or repeated(names) is not None:
        raise InvalidInput(f"{what} must be at least {at_least}, all different") from PrivateDetail(repr(names))


def numbered(what: str, count: int) -> tuple[str, ...]:
    """Return neutral names ("group 1", "group 2", ...) in place of names that were read from the examples.

    >>> numbered("group", 2)
    ('group 1', 'group 2')
    """
    return tuple(f"{what} {place}" for place in range(1, count + 1))


@dataclass(frozen=True)
class Dataset:
    """Data of one trial, in disjoint splits.

    `public`: examples that are treated as public; no guarantee covers them. `held_out`: private examples that the trial
    is not trained on, used to choose among candidates. `reasons`, `columns`: as in `Source`.
    """

    name: str
    train: Split
    test: Split
    public: Split | None
    group_names: tuple[str, ...]
    class_names: tuple[str, ...]
    preparation: Preparation = AS_STORED
    notes: tuple[str, ...] = ()
    held_out: Split | None = None
    task: str = "classification"
    reasons: tuple[Reason, ...] = ()
    columns: Mapping[str, Any] | None = None

    def prepare(self, features: Tensor) -> Tensor:
        """Return stored features [b, ...] as the model's input: float32, or int64 for tokens.

        A model may change its input in place; it shares no memory with ``features``.
        """
        inputs = self.preparation(features)
        stored = inputs.untyped_storage().data_ptr() == features.untyped_storage().data_ptr()
        return inputs.clone() if stored else inputs

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one prepared example, without the batch dimension."""
        return tuple(self.prepare(self.train.features[:1]).shape[1:])

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def num_groups(self) -> int:
        return len(self.group_names)

    def digest(self) -> str:
        """Return sha256 of all examples. Private data, because a guess of a row can be tested against it."""
        digest = hashlib.sha256()
        for split in (self.train, self.test, self.public, self.held_out):
            if split is not None:
                users = () if split.user_ids is None else (split.user_ids,)
                for column in (split.features, split.labels, split.groups, split.example_ids, *users):
                    digest.update(column.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def make_split(
    features: npt.NDArray[np.generic] | Tensor,
    labels: npt.ArrayLike,
    groups: npt.ArrayLike | None = None,
    *,
    first_id: int = 0,
    example_ids: npt.ArrayLike | None = None,
    user_ids: npt.ArrayLike | None = None,
) -> Split:
    """Return a split from arrays. Ids default to first_id, first_id + 1, ...

    `labels`: classes [n], or labels of other tasks [n, ...], where floats become float32, and int16 and int32 are kept.
    `groups`: by default the labels [n], or one group for labels with more axes.

    Raises: InvalidInput for columns that are not whole numbers, or have another length than ``features``.
    """
    stored = features if isinstance(features, Tensor) else torch.from_numpy(np.array(features, order="C"))
    ids = np.arange(first_id, first_id + len(stored)) if example_ids is None else example_ids
    found = _labels(labels)
    default = found if found.ndim == 1 else torch.zeros(len(found), dtype=torch.int64)
    return Split(
        features=stored,
        labels=found,
        groups=default if groups is None else _int64(groups),
        example_ids=_int64(ids),
        user_ids=None if user_ids is None else _int64(user_ids),
    )


def _labels(values: npt.ArrayLike) -> Tensor:
    array = np.asarray(values)
    if array.ndim > 1 and array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float32))
    return torch.from_numpy(array) if array.ndim > 1 and array.dtype in (np.int16, np.int32) else _int64(values)


def _int64(values: npt.ArrayLike) -> Tensor:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        whole = np.asarray(values).astype(np.int64)
        if np.array_equal(whole, values):
            return torch.from_numpy(whole)
    raise InvalidInput("labels, groups, example_ids and user_ids must be whole numbers of at most 64 bits")


_TEST, _PUBLIC, _KEEP, _PART = 0, 1, 2, 3
"""Number of the random stream of each kind of split; a change of one split leaves the others unchanged."""


def cut(source: Source, spec: DataSpec) -> Dataset:
    """Return the data set of a trial, made from ``source`` in four steps.

    1. Hold out a test set, if the source has none. 2. Split off the public part. 3. Apply ``keep`` to the rest, so that
    a count in ``keep`` is the size of the group in the training set. 4. If the trial is a candidate that trains on one
    of several disjoint parts, select this part, and hold out the last part.

    Examples keep the order of the source. With the same seed, a larger ``keep`` contains a smaller one. Test and public
    sets that are split off here share no user with the rest. If rows may have several owners, a share of the people is
    held out. Rows with owners on both sides belong to neither part. A note counts them,
    and test examples without a label that is counted.

    Raises: InvalidInput for unknown groups, and for parts that would be empty or larger than the data.
    """
    train, test, notes = source.train, source.test, source.notes
    if test is None:
        train, test, apart = _split_off(train, spec.test_fraction, (spec.split_seed, _TEST), "test_fraction")
        notes += apart
    notes += _unlabelled(test)
    public = None
    if spec.public_fraction > 0.0:
        train, public, apart = _split_off(train, spec.public_fraction, (spec.split_seed, _PUBLIC), "public_fraction")
        notes += apart
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
        source.columns,
    )


def _unlabelled(test: Split) -> tuple[str, ...]:
    """Return a note on test examples that have no loss. Raises: InvalidInput where none has one."""
    lost = len(test) - int(np.count_nonzero(labelled(test.labels)))
    if lost and lost == len(test):
        raise InvalidInput(
            "no test example has a label that is counted, such as a token to predict, so nothing would measure the "
            "model; give others"
        )
    said = f"{lost:,} of {len(test):,} test examples have no label that is counted, and so no loss"
    return (said,) if lost else ()


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
    people, user_of = np.unique(split.user_ids.numpy(), return_inverse=True)
    _require_several(len(people), name)
    taken = _choose_users(np.bincount(user_of), count, generator)
    if not taken.any():
        raise InvalidInput(
            f"{name} is {fraction}, which takes {count} of {len(split)} examples, but each user "
            "has more, and is kept in one part; set it higher, or name no users"
        )
    return split.select(np.flatnonzero(~taken[user_of])), split.select(np.flatnonzero(taken[user_of])), ()


def _require_several(users: int, name: str) -> None:
    """Raises: InvalidInput for a single user, whose rows cannot be divided."""
    if users < 2:
        raise InvalidInput(
            f"{name} holds out whole users, but all rows that it divides are one user's; name another column as user, "
            "or none"
        )


def _hold_out_owners(
    split: Split, owners: Tensor, fraction: float, seed: tuple[int, ...], name: str
) -> tuple[Split, Split, tuple[str, ...]]:
    """Return the rows without a held-out owner, the rows with no other owner, and a note on the rest."""
    rows, people = ownership(owners)
    _, person_of = np.unique(people, return_inverse=True)
    number = int(person_of.max(initial=-1)) + 1
    _require_several(number, name)
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
