"""Data in memory as a source: classes, groups and users by their values, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

from dpsweep.accounting.errors import DataCorruption, InvalidInput, full_text
from dpsweep.workers.data import Source, as_bytes, columns_of, source_of_arrays, source_of_frame
from dpsweep.workers.data.given import source_of_bytes
from tests.known import known

SECRET = "secret value"
X = np.arange(12.0).reshape(6, 2)
Y = np.array(["no", "yes", "no", "yes", "no", "yes"])


def same(one: Source, other: Source) -> bool:
    return all(
        getattr(one, field.name) == getattr(other, field.name)
        for field in fields(Source)
        if field.name not in ("train", "test")
    ) and all(
        (a is None) == (b is None) and (a is None or all(torch.equal(getattr(a, k), getattr(b, k)) for k in columns))
        for a, b in ((one.train, other.train), (one.test, other.test))
        for columns in (("features", "labels", "groups", "example_ids"),)
    )


def test_values_become_places_and_what_is_read_off_the_rows_is_said() -> None:
    found = source_of_arrays(X, Y, groups=["b", "a", "b", "a", "b", "a"], users=[7, 7, 8, 8, 9, 9])
    assert (found.class_names, found.group_names) == (("no", "yes"), ("a", "b"))
    assert found.reasons == ("classes_from_rows", "groups_from_rows")
    assert found.train.labels.tolist() == [0, 1] * 3
    assert found.train.groups.tolist() == [1, 0] * 3
    assert known(found.train.user_ids).tolist() == [0, 0, 1, 1, 2, 2]
    assert found.train.features.dtype == torch.float32


def test_declared_names_make_no_estimate() -> None:
    found = source_of_arrays(
        X, Y, groups=[0, 1] * 3, classes=["yes", "no"], group_names=["a", "b"], test=(X, Y, [0] * 6)
    )
    assert found.reasons == ()
    assert found.train.labels.tolist() == [1, 0] * 3
    assert known(found.test).example_ids.tolist() == [6, 7, 8, 9, 10, 11]


def test_groups_may_be_named_by_their_declared_names() -> None:
    found = source_of_arrays(X, Y, groups=["b", "a"] * 3, group_names=["a", "b"])
    assert (found.group_names, found.train.groups.tolist()) == (("a", "b"), [1, 0] * 3)
    assert "groups_from_rows" not in found.reasons
    for indices in ([1.0, 0.0] * 3, [True, False] * 3, np.array([1, 0] * 3, dtype=object)):
        assert source_of_arrays(X, Y, groups=indices, group_names=["a", "b"]).train.groups.tolist() == [1, 0] * 3
    with pytest.raises(InvalidInput, match="some groups are not among the given group_names"):
        source_of_arrays(X, Y, groups=["c", "a"] * 3, group_names=["a", "b"])


def test_numbers_are_targets_of_another_task() -> None:
    found = source_of_arrays(X, np.arange(6.0), task="regression")
    assert (found.train.labels.shape, found.class_names, found.group_names) == ((6, 1), ("target 0",), ("all",))


def test_a_frame_is_read_as_the_file_of_it_would_be() -> None:
    frame = pd.DataFrame({"age": [20, 30, 40, 50], "sex": list("fmfm"), "bought": [0, 1, 0, 1]})
    found = source_of_frame(
        frame, label="bought", group="sex", classes=[0, 1], groups=["f", "m"], ranges={"age": [0, 100]}
    )
    assert (found.class_names, found.group_names) == (("0", "1"), ("f", "m"))
    assert found.train.features[:, 0].tolist() == pytest.approx([0.2, 0.3, 0.4, 0.5])


def test_columns_of_a_frame_are_named_as_pandas_lists_them() -> None:
    frame = pd.DataFrame({"age": [20, 30], "weight": [60, 70], "bought": [0, 1]})
    for names in (frame.columns[:2], frame.columns[:2].to_numpy(), {"age": 1, "weight": 2}.keys()):
        found = source_of_frame(frame, label="bought", features=names, unscaled=names, classes=[0, 1])
        assert found.train.features.tolist() == [[20.0, 60.0], [30.0, 70.0]]
    with pytest.raises(InvalidInput, match="the data frame has no column 'height'"):
        source_of_frame(frame, label="bought", features=pd.Index(["age", "height"]))


@pytest.mark.parametrize(
    "source",
    [
        source_of_arrays(X, Y, users=range(6)),
        source_of_arrays(X.astype(np.int64), Y, test=(X.astype(np.int64), Y)),
    ],
)
def test_bytes_give_the_same_source(source: Source) -> None:
    assert same(source_of_bytes(as_bytes(source)), source)
    assert as_bytes(source_of_bytes(as_bytes(source))) == as_bytes(source)
    with pytest.raises(DataCorruption, match="is damaged; run the sweep again"):
        source_of_bytes(as_bytes(source)[:200])


def test_data_sets_of_torch_are_read_once() -> None:
    pair = columns_of(TensorDataset(torch.from_numpy(X), torch.tensor([0, 1] * 3)))
    assert torch.equal(pair[0], torch.from_numpy(X))

    class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int, int]]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, at: int) -> tuple[torch.Tensor, int, int]:
            return torch.full((2,), float(at)), at % 2, 1

    features, labels, groups = columns_of(Rows())
    assert (features.shape, labels.tolist(), groups.tolist()) == ((3, 2), [0, 1, 0], [1, 1, 1])


def test_what_does_not_fit_is_one_line() -> None:
    with pytest.raises(InvalidInput, match="6 examples and 5 labels"):
        source_of_arrays(X, Y[:5])
    with pytest.raises(InvalidInput, match=r"some labels are missing \(NaN\); leave out their rows"):
        source_of_arrays(X, [0.0, 1.0, float("nan"), 1.0, 0.0, 1.0])
    for missing in (None, float("nan"), pd.NA, pd.NaT):
        for users in ([*"abcab", missing], [["a"], ["b"], ["c"], ["a"], ["b"], ["a", missing]]):
            with pytest.raises(InvalidInput, match=r"some users are missing \(NaN\)"):
                source_of_arrays(X, Y, users=users)
    with pytest.raises(InvalidInput, match=r"some groups are missing \(NaN\)"):
        source_of_arrays(X, Y, groups=pd.Series([*"abcab", None]))
    with pytest.raises(InvalidInput, match="users are numbers beside texts"):
        source_of_arrays(X, Y, users=[1, "1", 2, 2, 3, 3])
    with pytest.raises(InvalidInput, match="some labels are not among the given classes"):
        source_of_arrays(X, Y, classes=["no"])
    with pytest.raises(InvalidInput, match="and the test examples none"):
        source_of_arrays(X, Y, groups=[0] * 6, test=(X, Y))
    with pytest.raises(InvalidInput, match="and the test examples none"):
        source_of_arrays(X, Y, groups=[0] * 6, test=(X, Y, None))
    with pytest.raises(InvalidInput, match="features are of type <U3"):
        source_of_arrays(Y, Y)


@pytest.mark.parametrize(
    ("change", "message", "detail"),
    [
        ({"label": "Y"}, "the data frame has no column 'Y'", "valid: x, y"),
        ({"label": "y", "group": ["y", "sex"]}, "the data frame has no column 'sex'", "valid: x, y"),
        ({"label": "who"}, "no column 'who'; it is an index: call reset_index", "valid: x, y"),
        ({}, "data 'frame' needs label", None),
        ({"label": "y", "lable": "x"}, "unknown key 'lable' of data 'frame'", None),
        ({"label": "y", "frame": {"x": [1]}}, "frame is of type dict; give a data frame of pandas", None),
        ({"label": "y", "mixed": [1, SECRET, 2, 3]}, "cannot be stored as one type", SECRET),
        ({"label": "y", "huge": [10**30] * 4}, "cannot be stored as one type", "too large"),
        ({"label": "y", "complex": [1j] * 4}, "cannot be stored as one type", "complex"),
    ],
)
def test_what_a_frame_lacks_is_said_without_its_values(
    change: dict[str, Any], message: str, detail: str | None
) -> None:
    columns: dict[str, Any] = {name: change.pop(name) for name in ("mixed", "huge", "complex") if name in change}
    values: dict[str, Any] = {"x": [1.0, 2.0, 3.0, 4.0], "y": ["a", "b"] * 2, **columns}
    frame = pd.DataFrame(values, pd.Index(range(4), name="who"))
    with pytest.raises(InvalidInput, match=message) as refused:
        source_of_frame(**{"frame": frame, **change})
    if detail is not None:
        assert detail in full_text(refused.value)
        assert SECRET not in str(refused.value)


def test_a_frame_with_two_columns_of_one_name_is_refused() -> None:
    frame = pd.DataFrame([[1, 2, "a"], [3, 4, "b"]], columns=["x", "x", "y"])
    with pytest.raises(InvalidInput, match="more than one column of the same name; rename them"):
        source_of_frame(frame, label="y")


def test_labels_that_are_no_classes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="labels have several columns, but classification takes one class"):
        source_of_arrays(X, np.zeros((len(X), 2)))
    rows = np.random.default_rng(0).normal(size=(50, 2))
    with pytest.raises(InvalidInput, match=r"most labels of 'given' are different, .* set task: regression"):
        source_of_arrays(rows, rows[:, 0])
    with pytest.raises(InvalidInput, match="most labels of 'given' are different"):
        source_of_frame(pd.DataFrame(rows, columns=["x", "y"]), label="y")
    assert source_of_arrays(rows, rows[:, 0], task="regression").task == "regression"
