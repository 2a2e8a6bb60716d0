"""A trained model says of a table, in the table's words, what its trial's evaluation found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import load_dataset
from dpsweep.workers.spec import Component, DataSpec, TrialSpec
from dpsweep.workers.trials.predicted_table import predicted_table
from dpsweep.workers.trials.trained_model import TrainedModel, load_trained
from dpsweep.workers.trials.trial import run_trial
from tests.workers.data_folders import make_texts, make_tokenizer
from tests.workers.trial_specs import small_trial

DRAW = np.random.default_rng(0)
AGES = DRAW.integers(18, 80, 200)
PEOPLE = pd.DataFrame(
    {
        "age": AGES,
        "job": DRAW.choice(["baker", "smith"], 200),
        "late": np.where(AGES > 50, -1, 1),
        "owes": 10.0 * AGES,
        "a": AGES > 40,
        "b": AGES > 60,
    }
)
READ: dict[str, Any] = {
    "features": ["age", "job"],
    "ranges": {"age": [0, 100]},
    "categories": {"job": ["baker", "smith"]},
}
TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "classification": ({"label": "late", "classes": [-1, 1]}, "cross_entropy"),
    "hinge": ({"label": "late", "classes": [-1, 1]}, "hinge"),
    "regression": (
        {"label": "owes", "task": "regression", "ranges": {**READ["ranges"], "owes": [0, 1000]}},
        "mse",
    ),
    "multi_label": ({"label": ["a", "b"], "task": "multi_label"}, "binary_cross_entropy"),
}


def trained(folder: Path, task: str) -> tuple[TrialSpec, TrialFiles, TrainedModel]:
    declared, loss = TASKS[task]
    PEOPLE.to_parquet(folder / "people.parquet")
    data = DataSpec("parquet", {"path": str(folder / "people.parquet"), **READ, **declared}, test_fraction=0.4)
    spec = small_trial(data=data, loss=Component(loss), epochs=3)
    files = TrialFiles(str(folder / "trial"))
    run_trial(spec, files.root)
    return spec, files, load_trained(files, spec)


@pytest.mark.parametrize("task", TASKS)
def test_predictions_are_those_of_the_evaluation(tmp_path: Path, task: str) -> None:
    spec, _, model = trained(tmp_path, task)
    (tmp_path / "people.parquet").rename(tmp_path / "new.parquet")
    found, notes = predicted_table(model, tmp_path / "new.parquet")
    assert notes == ()
    (tmp_path / "new.parquet").rename(tmp_path / "people.parquet")
    test = load_dataset(spec.data).test
    logits = model.logits(test.features)
    rows = test.example_ids.numpy()
    match task:
        case "regression":
            assert list(found) == ["owes"]
            assert found["owes"][rows] == pytest.approx(1000.0 * logits[:, 0], rel=1e-5)
        case "multi_label":
            assert (found["b"][rows] == (logits[:, 1] > 0)).all()
            assert found["probability of a"][rows] == pytest.approx(1.0 / (1.0 + np.exp(-logits[:, 0])), rel=1e-5)
        case _:
            names = np.array(["-1", "1"])
            assert (found["prediction"][rows] == names[logits.argmax(1)]).all()
            kind = "output for" if task == "hinge" else "probability of"
            assert list(found) == ["prediction", f"{kind} -1", f"{kind} 1"]
            if task == "classification":
                assert found["probability of -1"] + found["probability of 1"] == pytest.approx(1.0)


def test_a_frame_with_missing_values_keeps_its_rows(tmp_path: Path) -> None:
    _, files, model = trained(tmp_path, "classification")
    whole, _ = predicted_table(model, PEOPLE[["job", "age"]])
    holes = PEOPLE[["job", "age"]].head(3).astype({"age": "float"})
    holes.loc[1, "age"] = None
    found, notes = predicted_table(model, holes)
    assert found["prediction"][1] is None
    assert np.isnan(found["probability of 1"][1])
    assert found["prediction"][[0, 2]].tolist() == whole["prediction"][[0, 2]].tolist()
    assert notes == ("1 of 3 rows have no prediction: they lack a value (age 1)",)
    with pytest.raises(InvalidInput, match=r"do not scale to .0, 1.; give the table itself to `predict_table`"):
        model.logits(np.array([[55.0, 1.0, 0.0]]))
    with pytest.raises(InvalidInput, match="the table is of type int; give the path of a file, or a data frame"):
        predicted_table(model, 3)
    stored = torch.load(files.inputs)
    for forged in ("{", json.dumps({"features": ["age"]}), json.dumps({**json.loads(stored["columns"]), "hashed": 3})):
        torch.save({**stored, "columns": forged}, files.inputs)
        with pytest.raises(DataCorruption, match=r"inputs\.pt is damaged; restore it"):
            load_trained(files, model.spec)


def test_data_that_are_no_declared_table_are_refused(tmp_path: Path) -> None:
    spec = small_trial(epochs=1)
    run_trial(spec, str(tmp_path))
    with pytest.raises(
        InvalidInput, match="are neither a table whose `ranges` and `categories` are all declared, nor texts"
    ):
        predicted_table(load_trained(TrialFiles(str(tmp_path)), spec), PEOPLE)


def test_texts_are_read_by_the_tokenizer_that_the_trial_keeps(tmp_path: Path) -> None:
    make_texts(tmp_path / "texts.csv")
    make_tokenizer(tmp_path / "tokenizer.json")
    params = {"path": str(tmp_path / "texts.csv"), "text": "body", "tokenizer": str(tmp_path / "tokenizer.json")}
    declared = {"max_length": 6, "label": "mood", "classes": ["neg", "pos"]}
    spec = small_trial(
        data=DataSpec("text", {**params, **declared}),
        model=Component("transformer", {"width": 8, "heads": 2, "depth": 1}),
        epochs=1,
    )
    run_trial(spec, str(tmp_path / "trial"))
    test = load_dataset(spec.data).test
    (tmp_path / "tokenizer.json").unlink()
    model = load_trained(TrialFiles(str(tmp_path / "trial")), spec)
    logits, rows = model.logits(test.features), test.example_ids.numpy()
    frame = pd.read_csv(tmp_path / "texts.csv")
    for table in (tmp_path / "texts.csv", frame[["body"]]):
        found, notes = predicted_table(model, table)
        assert (found["prediction"][rows] == np.array(["neg", "pos"])[logits.argmax(1)]).all()
        assert all("are cut to 6 tokens" in note for note in notes)
    frame.loc[0, "body"] = None
    found, notes = predicted_table(model, frame)
    assert found["prediction"][0] is None
    assert notes[0] == f"1 of {len(frame)} rows have no prediction: they lack a text (body)"
    with pytest.raises(InvalidInput, match="the data frame has no column 'body'; the model reads body"):
        predicted_table(model, frame[["mood"]])
    with pytest.raises(InvalidInput, match="holds int64, but must hold text"):
        predicted_table(model, pd.DataFrame({"body": [1, 2]}))


def test_targets_of_texts_are_in_the_unit_of_their_table(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer.json")
    frame = pd.read_csv(make_texts(tmp_path / "texts.csv"))
    frame["pay"] = np.arange(len(frame)) % 30 + 20
    frame.to_csv(tmp_path / "texts.csv", index=False)
    params = {"path": str(tmp_path / "texts.csv"), "text": "body", "tokenizer": str(tmp_path / "tokenizer.json")}
    spec = small_trial(
        data=DataSpec("text", {**params, "label": "pay", "task": "regression", "ranges": {"pay": [20, 50]}}),
        model=Component("transformer", {"width": 8, "heads": 2, "depth": 1}),
        loss=Component("mse"),
        epochs=1,
    )
    run_trial(spec, str(tmp_path / "trial"))
    model, test = load_trained(TrialFiles(str(tmp_path / "trial")), spec), load_dataset(spec.data).test
    found, _ = predicted_table(model, tmp_path / "texts.csv")
    expected = 20.0 + 30.0 * model.logits(test.features)[:, 0]
    assert found["pay"][test.example_ids.numpy()] == pytest.approx(expected, rel=1e-5)
