"""A sweep of arrays in memory: in this process from memory, on Ray from a private copy that is gone afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

import dpsweep
from dpsweep.orchestration.execution.environment import EMBEDDED
from dpsweep.orchestration.execution.given_data import delete_left_copies, shared_data
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.workers.own_code.imports import GivenData, UserCode

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(200, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
GROUPS = RANDOM.integers(0, 2, 200)
WHOLE: dict[str, Any] = {
    "features": X,
    "labels": Y,
    "groups": GROUPS,
    "users": np.arange(200) // 2,
    "classes": [0, 1],
    "group_names": ["a", "b"],
    "test_fraction": 0.25,
}
BASE: dict[str, Any] = {
    "name": "given",
    "model": "logistic",
    "sampling": {"method": "poisson", "batch_size": 50},
    "epochs": 1,
    "clipping": "flat",
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-4, "accountant": "rdp"},
    "norms": "off",
}


@pytest.mark.parametrize(
    ("data", "test_size"),
    [
        (WHOLE, 50),
        ((X, Y, GROUPS), 40),
        (TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), 40),
        ({"dataset": TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), "test_fraction": 0.1}, 20),
        ({"frame": pd.DataFrame(X, columns=list("abc")).assign(y=Y), "label": "y", "ranges": {"a": [-3, 3]}}, 40),
    ],
)
def test_data_in_memory_are_planned(data: object, test_size: int) -> None:
    plan = dpsweep.plan({**BASE, "data": data})
    assert plan.refusals == ()
    (trial,) = plan.trials
    assert (trial.dataset.train_size, trial.dataset.test_size) == (200 - test_size, test_size)


def test_in_this_process_nothing_is_copied_and_other_data_are_refused(tmp_path: Path) -> None:
    run: dict[str, Any] = {"output": tmp_path, "address": "in-process", "tracking_uri": "none"}
    left = tmp_path / "private" / "given" / "of-a-killed-driver.npz"
    left.parent.mkdir(parents=True)
    left.touch()
    (trial,) = dpsweep.run({**BASE, "data": WHOLE}, **run).trials.values()
    result = trial.result
    assert result is not None
    assert result.group_names == ("a", "b")
    assert not (tmp_path / "private" / "given").exists()
    (again,) = dpsweep.open(tmp_path).trials.values()
    assert (again.predict(X) == trial.predict(X)).all(), "without the data"
    with pytest.raises(dpsweep.InvalidInput, match="its results are those of the earlier data"):
        dpsweep.run({**BASE, "data": {**WHOLE, "labels": 1 - Y}}, **run)
    more = {**BASE, "seeds": [0, 1]}
    with pytest.raises(dpsweep.InvalidInput, match="data"):
        dpsweep.run({**more, "data": {**WHOLE, "features": X + 1}}, **run)
    with pytest.raises(dpsweep.InvalidInput, match="were given in Python and are not kept; give them again"):
        dpsweep.run({**more, "data": {"name": "given", "called": "data", "test_fraction": 0.25}}, **run)


def test_of_the_copies_only_those_of_this_driver_stay(tmp_path: Path) -> None:
    files, code = SweepFiles(str(tmp_path)), UserCode(data=(GivenData("data", content=b"rows"),))
    with shared_data(code, files, EMBEDDED) as there:
        Path(files.given("of-a-killed-driver")).touch()
        delete_left_copies(there, files)
        assert [str(path) for path in Path(files.all_given).iterdir()] == [there.data[0].path]


def test_two_data_sets_need_two_names() -> None:
    with pytest.raises(dpsweep.InvalidInput, match="two data sets are called 'data'; give each another name"):
        dpsweep.plan({**BASE, "data": [(X, Y), (X, 1 - Y)]})


@pytest.mark.long
def test_workers_of_ray_read_a_private_copy(tmp_path: Path) -> None:
    inside = dpsweep.run({**BASE, "data": WHOLE}, output=tmp_path / "a", address="in-process", tracking_uri="none")
    on_ray = dpsweep.run({**BASE, "data": WHOLE}, output=tmp_path / "b", tracking_uri="none")
    (one,), (other,) = inside.trials.values(), on_ray.trials.values()
    assert on_ray.failed == ()
    assert (one.predict(X) == other.predict(X)).all()
    assert list((tmp_path / "b" / "private" / "given").iterdir()) == []
