"""Sweeps opened from Python: trials, results, models, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpsweep
from dpsweep.orchestration.comparison.record import rows
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.execution.completion import Times, complete_trial
from dpsweep.orchestration.library import _in_python
from dpsweep.orchestration.store.layout import SweepFiles, output_files
from dpsweep.orchestration.sweeps.manifest import new_manifest, write_manifest
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import allowed_again, permitted
from dpsweep.workers.data import load_dataset
from dpsweep.workers.trials.trial import run_trial
from tests.orchestration.sample_grids import small

MODEL = """
from torch import nn

def narrow(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""
PRIVACY = {"noise_multiplier": 2.0, "delta": 1e-5, "accountant": "rdp"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of three trials, of which two are complete: with DP-PCA, and a model beside the sweep file."""
    beside, folder = tmp_path_factory.mktemp("beside"), tmp_path_factory.mktemp("sweep")
    (beside / "library_models.py").write_text(MODEL)
    text = small(
        model=["library_models:narrow", "logistic"],
        preprocessing={"name": "dp_pca", "dimensions": 64},
        clipping="flat",
        noise="constant",
        seeds=0,
        epochs=1,
        privacy=PRIVACY,
        accounting={"group_sizes": [1, 4]},
    )
    sweep, files = parse_sweep(text), SweepFiles(str(folder))
    write_manifest(files, new_manifest(sweep, text))
    code = permitted(sweep, beside)
    for planned in plan_sweep(sweep, code).trials:
        trial = files.trial(planned.key)
        run_trial(planned.spec, trial.root, code=code, releases=planned.releases)
        complete_trial(planned, trial, sweep, Times(0.0, 1.0))
    (folder / "code").symlink_to(beside)
    return folder


def test_results_are_those_of_results_json(folder: Path) -> None:
    sweep = dpsweep.open(folder)
    table = sweep.results(all_columns=True)
    stored = rows(stored_record(SweepFiles(str(folder))))
    assert list(table["key"]) == list(sweep.trials) == [row["key"] for row in stored]
    for (_, found), row in zip(table.iterrows(), stored, strict=True):
        assert found["epsilon"] == row["epsilon"]
        assert found["groups.4.epsilon"] == row["groups"][1]["epsilon"]
        assert found["labels.clipping"] == "flat"
        assert found["group_accuracies.3"] == row["group_accuracies"]["3"]
    assert sweep.failed == ()
    assert Path(sweep.report()).is_file()
    written = json.loads((folder / "results.json").read_text())
    assert all(row.pop("setting") for row in written), "the setting of a trial, with intervals"
    assert written == json.loads(json.dumps(stored))


def test_differences_are_those_of_the_report(folder: Path) -> None:
    sweep = dpsweep.open(folder)
    sweep.report()
    table = sweep.differences()
    stored = json.loads((folder / "comparison.json").read_text())
    assert table.attrs["level"] == stored["level"] == 0.95
    assert set(table["one"]) | set(table["other"]) == set(sweep.results(all_columns=True)["setting.name"])
    for (_, found), each in zip(table.iterrows(), stored["differences"], strict=True):
        assert [found[name] for name in ("one", "other", "metric", "verdict")] == [
            each[name] for name in ("one", "other", "metric", "verdict")
        ]
        assert [found["difference"], found["low"], found["high"]] == [
            each["interval"][end] for end in ("value", "low", "high")
        ]
    assert set(table["verdict"]) == {"unknown (one seed)"}


def test_predictions_reproduce_the_evaluation_and_own_code_must_be_allowed(folder: Path) -> None:
    closed = dpsweep.open(folder)
    own, named = closed.trials.values()
    with pytest.raises(dpsweep.InvalidInput, match="'library_models' is not among the code that may be run"):
        own.model()
    opened = dpsweep.open(folder, allow_code=[str(folder / "code" / "library_models.py")])
    for trial in (named, opened.trials[own.key]):
        test = load_dataset(trial.spec.data).test
        logits = trial.predict(test.features.numpy())
        result: Any = trial.result
        assert (logits.argmax(1) == test.labels.numpy()).mean() == result.evaluation.accuracy
        assert not trial.model().training
        epsilons = trial.epsilons()
        assert len(epsilons.upper) == trial.trace.dataset_size == result.training.train_size
        assert epsilons.lower is None or np.all(epsilons.lower <= epsilons.upper)


@pytest.mark.parametrize(
    ("location", "allowed", "source"),
    [
        ("library_models", "library_models.py", ""),
        ("package.library_models", "package/library_models.py", ""),
        ("package", "package/__init__.py", ""),
        ("library_models.py", "library_models.py", "library_models.py"),
        ("package/library_models.py", "package/library_models.py", "package/library_models.py"),
        ("package.library_models", "library_models.py", None),
        ("models", "library_models.py", None),
        ("os", "library_models.py", None),
    ],
)
def test_a_file_is_meant_by_every_name_that_its_path_ends_with(
    tmp_path: Path, location: str, allowed: str, source: str | None
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / allowed).write_text(MODEL)
    sweep = parse_sweep(small(model=f"{location}:narrow"))
    found = [module.source for module in allowed_again(sweep, [str(tmp_path / allowed)]).modules]
    assert found == ([] if source is None else [str(tmp_path / source)])


def test_errors_name_parameters_and_on_the_command_line_flags(folder: Path, tmp_path: Path) -> None:
    text = small(name="parameters", model="elsewhere:net")
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(dpsweep.InvalidInput, match=r"elsewhere' is no module .* add allow_code=\['elsewhere'\]"):
        dpsweep.run(text, output=tmp_path)
    with pytest.raises(dpsweep.InvalidInput, match=r"^`output` .* is a file, .* another folder with `output`"):
        dpsweep.run(small(name="parameters"), output=taken)
    with pytest.raises(dpsweep.InvalidInput, match=r"--output .* another folder with --output"):
        output_files(str(taken), "parameters")
    with pytest.raises(dpsweep.InvalidInput, match=r"retry is 'all'; give a list, such as \['all'\]"):
        dpsweep.run(small(name="parameters"), output=tmp_path, retry="all")
    model = next(iter(dpsweep.open(folder).trials.values())).model
    with pytest.raises(dpsweep.InvalidInput, match=r"allow_code=\['FILE\.py'\]$"):
        model()
    said = "`dpsweep account --delta 1`; --retry all, --from DIR, --max-gpu-hours"
    assert _in_python(said) == "`dpsweep account --delta 1`; retry=['all'], `sources` DIR, `max_gpu_hours`"


def test_what_is_not_finished_or_damaged_is_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(dpsweep.InvalidInput, match="holds no sweep; name the folder"):
        dpsweep.open(tmp_path)
    trial = list(dpsweep.open(folder).trials.values())[1]
    model = folder / "trials" / trial.key / "model.pt"
    content = model.read_bytes()
    model.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    try:
        with pytest.raises(dpsweep.DataCorruption, match="its sha256 differs from the one noted when training ended"):
            trial.predict(np.zeros((1, 1, 8, 8), dtype=np.uint8))
    finally:
        model.write_bytes(content)
    result = model.with_name("result.json")
    hidden = result.rename(result.with_name("hidden.json"))
    try:
        unfinished = dpsweep.open(folder).trials[trial.key]
        assert str(unfinished.state) == "pending"
        for use in (unfinished.model, lambda: unfinished.trace):
            with pytest.raises(dpsweep.InvalidInput, match=f"trial {trial.key} is pending, not finished; resume"):
                use()
    finally:
        hidden.rename(result)


def test_a_sweep_is_a_file_a_text_or_a_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All the same plan; what a text names lies in the working directory, what a file names beside it."""
    content: dict[str, Any] = {
        "name": "three",
        "data": {"name": "breast_cancer"},
        "model": "three_models.py:make",
        "sampling": {"method": "poisson", "batch_size": 64},
        "epochs": 1,
        "clipping": "flat",
        "privacy": PRIVACY,
    }
    (tmp_path / "three_models.py").write_text(MODEL.replace("narrow", "make").replace("64", "feature_shape[0]"))
    file = tmp_path / "three.yaml"
    file.write_text(json.dumps(content, indent=1).replace("1e-05", "0.00001"))
    planned = dpsweep.plan(file)
    assert planned.refusals == ()
    monkeypatch.chdir(tmp_path)
    assert dpsweep.plan(content) == planned
    assert dpsweep.plan(file.read_text()) == planned
    with pytest.raises(dpsweep.InvalidInput, match=r"model is <object objec.*give a name, a function or a class"):
        dpsweep.plan({**content, "model": object()})
    endless: dict[str, Any] = {}
    endless["of"] = endless
    with pytest.raises(dpsweep.InvalidInput, match="hold themselves, or nest too deeply"):
        dpsweep.plan({**content, "data": {"name": "breast_cancer", **endless}})
    with pytest.raises(dpsweep.InvalidInput, match="given as list; give the path of its file, its text, or a mapping"):
        dpsweep.plan([file])  # type: ignore[arg-type]


def test_the_private_report_alone_counts_gradients_that_were_not_finite(tmp_path: Path) -> None:
    features = np.eye(2, dtype=np.float32).repeat(40, axis=0)
    features[:5] = np.nan
    sweep = {
        "name": "lost",
        "data": (features, np.arange(2).repeat(40)),
        "model": "logistic",
        "sampling": {"method": "shuffle", "batch_size": 20},
        "epochs": 2,
        "clipping": "flat",
        "privacy": {**PRIVACY, "noise_multiplier": 4.0},
    }
    dpsweep.run(sweep, output=str(tmp_path / "out"), address="in-process", tracking_uri="none")
    files = SweepFiles(str(tmp_path / "out"))
    told = "gradients of examples that were not finite, and weighed nothing in their steps: "
    for shared in (files.report, files.results):
        assert told not in Path(shared).read_text().lower()
    (train,) = re.findall(rf"{told}(\d+)", Path(files.private_report).read_text(), re.IGNORECASE)
    assert 0 < int(train) <= 10, "some of five rows are held out for testing"
