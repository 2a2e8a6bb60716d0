"""Test split, public split and imbalance by group."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import Dataset, Source, make_split
from dpsweep.workers.data.base import cut
from dpsweep.workers.spec import DataSpec
from tests.workers.private_details import assert_private


def source(examples: int = 200, groups: int = 4) -> Source:
    labels = np.arange(examples) % groups
    names = tuple("abcdefgh"[:groups])
    features = np.arange(examples, dtype=np.float32)[:, None]
    return Source("counting", make_split(features, labels, user_ids=np.arange(examples) // 5), None, names, names)


def ids(dataset: Dataset) -> list[set[int]]:
    parts = (dataset.train, dataset.test, dataset.public)
    return [set() if part is None else set(part.example_ids.tolist()) for part in parts]


@settings(max_examples=50, deadline=None)
@given(
    test=st.floats(0.05, 0.5),
    public=st.floats(0.05, 0.5),
    keep=st.one_of(st.floats(0.1, 1.0), st.integers(1, 8)),
    seed=st.integers(0, 2**31),
)
def test_cuts_are_disjoint_and_complete_but_for_keep(test: float, public: float, keep: float, seed: int) -> None:
    spec = DataSpec("counting", keep={"c": keep}, test_fraction=test, public_fraction=public, split_seed=seed)
    dataset = cut(source(), spec)
    train, held_out, open_part = ids(dataset)
    assert not train & held_out
    assert not train & open_part
    assert not held_out & open_part
    whole = cut(source(), DataSpec("counting", test_fraction=test, public_fraction=public, split_seed=seed))
    dropped = set(range(200)) - train - held_out - open_part
    assert all(example % 4 == 2 for example in dropped)
    assert len(dropped) == len(whole.train) - len(dataset.train)
    assert ids(whole)[1:] == [held_out, open_part]


def test_keep_takes_a_count_or_a_fraction() -> None:
    by_count = cut(source(), DataSpec("counting", keep={"a": 7, "b": 0.5}))
    whole = cut(source(), DataSpec("counting"))
    before, after = whole.train.groups.bincount().tolist(), by_count.train.groups.bincount().tolist()
    assert after == [7, round(before[1] / 2), before[2], before[3]]


def test_a_larger_keep_contains_a_smaller_one() -> None:
    small, large = (cut(source(), DataSpec("counting", keep={"a": count})) for count in (5, 15))
    assert ids(small)[0] < ids(large)[0]


def test_order_of_the_source_is_kept() -> None:
    dataset = cut(source(), DataSpec("counting", keep={"d": 3}, public_fraction=0.2))
    assert torch.equal(dataset.train.example_ids, dataset.train.example_ids.sort().values)


def test_seeds_give_other_cuts() -> None:
    one, other = (cut(source(), DataSpec("counting", split_seed=seed)) for seed in (0, 1))
    assert ids(one)[1] != ids(other)[1]


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=100, max_size=130),
    test=st.floats(0.1, 0.5),
    public=st.floats(0.1, 0.5),
    seed=st.integers(0, 2**31),
)
def test_a_user_is_in_one_split(sizes: list[int], test: float, public: float, seed: int) -> None:
    users = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)) - 7, sizes))
    features = np.arange(len(users), dtype=np.float32)[:, None]
    whole = Source("owned", make_split(features, features[:, 0] % 2, user_ids=users), None, ("a", "b"), ("a", "b"))
    spec = DataSpec("owned", test_fraction=test, public_fraction=public, split_seed=seed)
    dataset = cut(whole, spec)
    assert dataset.public is not None
    splits = (dataset.train, dataset.test, dataset.public)
    owners = [set(split.user_ids.tolist()) for split in splits if split.user_ids is not None]
    assert sum(map(len, owners)) == len(set.union(*owners)) == len(sizes)
    assert sorted(i for split in splits for i in split.example_ids.tolist()) == list(range(len(users)))
    for split in splits:
        assert torch.equal(split.example_ids, split.example_ids.sort().values)
        assert split.user_ids is not None
        assert split.user_ids.tolist() == users[split.example_ids].tolist()
    for part, wanted in (
        (dataset.test, test * len(users)),
        (dataset.public, public * (len(users) - len(dataset.test))),
    ):
        assert wanted - 5 < len(part) <= round(wanted)
    assert ids(cut(whole, spec)) == ids(dataset)


def test_cuts_without_users_are_what_they_were() -> None:
    labels = np.arange(20) % 2
    rows = Source("plain", make_split(np.eye(20, dtype=np.float32), labels), None, ("a", "b"), ("a", "b"))
    dataset = cut(rows, DataSpec("plain", public_fraction=0.25, keep={"a": 3}, split_seed=5))
    assert ids(dataset) == [{0, 1, 5, 8, 11, 12, 17, 19}, {9, 18, 3, 7}, {10, 13, 14, 15}]


def test_a_part_smaller_than_every_user_is_refused() -> None:
    users = np.arange(20) % 2
    rows = Source("two", make_split(np.eye(20, dtype=np.float32), users, user_ids=users), None, ("a", "b"), ("a", "b"))
    message = "test_fraction is 0.2, which takes 4 of 20 examples, but each user has more, .* set it higher, or"
    with pytest.raises(InvalidInput, match=message):
        cut(rows, DataSpec("two"))
    dataset = cut(rows, DataSpec("two", test_fraction=0.5))
    assert (len(dataset.train), len(dataset.test)) == (10, 10)


@pytest.mark.parametrize("owners", [np.zeros(20, dtype=np.int64), np.tile([0, -1], (20, 1))], ids=["one", "lists"])
def test_rows_of_a_single_user_cannot_be_divided(owners: npt.NDArray[np.int64]) -> None:
    split = make_split(np.eye(20, dtype=np.float32), np.arange(20) % 2, user_ids=owners)
    for fraction in (0.2, 0.5):
        with pytest.raises(InvalidInput, match="all rows that it divides are one user's; name another column"):
            cut(Source("one", split, None, ("a", "b"), ("a", "b")), DataSpec("one", test_fraction=fraction))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (DataSpec("counting", keep={"A": 3}), "unknown group 'A'; .*valid: a, b, c, d"),
        (DataSpec("counting", keep={"a": 1000}), "keep of group 'a' is 1000, but must be a count from 1 to the size"),
        (DataSpec("counting", keep={"a": 0}), "keep of group 'a' is 0, but must be a count from 1 to"),
        (DataSpec("counting", keep={"a": 1.5}), "at most 1.0"),
        (DataSpec("counting", keep={"a": float("nan")}), "finite"),
        (DataSpec("counting", keep={"a": True}), "keep of group 'a' is True, but must be a fraction or a count"),
        (DataSpec("counting", test_fraction=0.001), "takes 0 of 200 examples"),
    ],
)
def test_impossible_cuts_are_refused(spec: DataSpec, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        cut(source(), spec)


def test_the_size_of_a_group_that_is_too_small_is_private() -> None:
    with pytest.raises(InvalidInput) as refused:
        cut(source(), DataSpec("counting", keep={"a": 1000}))
    assert_private(refused.value, "the group has 40 examples")


@pytest.mark.parametrize(
    ("labels", "groups", "message", "detail"),
    [
        ([0, 2], [0, 0], "labels of 'wrong' must index its 2 names: be .* from 0 to 1", "range from 0 to 2"),
        ([0, 1], [-1, 0], "groups of 'wrong' must index its 1 names: be .* from 0 to 0", "range from -1 to 0"),
    ],
)
def test_indices_beyond_the_names_are_refused_and_private(
    labels: list[int], groups: list[int], message: str, detail: str
) -> None:
    split = make_split(np.zeros((2, 3), dtype=np.float32), labels, groups)
    with pytest.raises(InvalidInput, match=message) as refused:
        Source("wrong", split, None, ("a",), ("x", "y"))
    assert_private(refused.value, detail)


def test_ids_that_occur_twice_are_refused() -> None:
    split = make_split(np.zeros((2, 3), dtype=np.float32), [0, 1], [0, 0], example_ids=[7, 7])
    with pytest.raises(InvalidInput, match="example_ids of 'wrong' are not unique"):
        Source("wrong", split, None, ("a",), ("x", "y"))


@pytest.mark.parametrize(
    ("classes", "groups", "message", "detail"),
    [
        (("x",), ("a", "b"), "classes of 'wrong' must be at least 2, all different", "('x',)"),
        (("x", "x"), ("a", "b"), "classes of 'wrong' must be at least 2, all different", "('x', 'x')"),
        (("x", "y"), ("a", "a"), "groups of 'wrong' must be at least 1, all different", "('a', 'a')"),
        (("x", "y"), (), "groups of 'wrong' must be at least 1, all different", "()"),
    ],
)
def test_names_that_tell_nothing_apart_are_refused_and_private(
    classes: tuple[str, ...], groups: tuple[str, ...], message: str, detail: str
) -> None:
    split = make_split(np.zeros((2, 3), dtype=np.float32), [0, 0])
    with pytest.raises(InvalidInput, match=message) as refused:
        Source("wrong", split, None, groups, classes)
    assert_private(refused.value, detail)


def test_an_empty_part_is_refused() -> None:
    some, none = make_split(np.zeros((2, 3), dtype=np.float32), [0, 1]), make_split(np.zeros((0, 3), np.float32), [])
    for train, test in ((none, None), (some, none)):
        with pytest.raises(InvalidInput, match="neither may be empty"):
            Source("wrong", train, test, ("a", "b"), ("x", "y"))


@pytest.mark.parametrize("labels", [[0.5, 1.0], [0.0, np.nan], ["0", "1"], [0, 2**64]])
def test_labels_that_are_not_whole_numbers_are_refused(labels: list[Any]) -> None:
    with pytest.raises(InvalidInput, match="must be whole numbers of at most 64 bits"):
        make_split(np.zeros((2, 3), dtype=np.float32), labels)


@pytest.mark.parametrize("ids", [[-5, 2**62], [2**62, 2**62 + 1]])
def test_ids_keep_all_their_digits(ids: list[int]) -> None:
    split = make_split(np.zeros((2, 3), dtype=np.float32), [True, False], example_ids=ids, user_ids=ids)
    assert split.example_ids.tolist() == ids
    assert split.labels.tolist() == [1, 0]


def test_training_and_test_ids_of_a_source_differ() -> None:
    split = make_split(np.zeros((2, 3), dtype=np.float32), [0, 1])
    with pytest.raises(InvalidInput, match="not unique over training and test"):
        Source("twice", split, split, ("a", "b"), ("a", "b"))


def test_a_split_with_columns_of_other_lengths_is_refused() -> None:
    with pytest.raises(InvalidInput, match="labels has shape"):
        make_split(np.zeros((3, 2), dtype=np.float32), [0, 1])
