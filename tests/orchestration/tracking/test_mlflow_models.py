"""The models and the comparison that MLflow shows of a sweep: what a search finds, what loads, what gets a name."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.best import best
from dpsweep.orchestration.comparison.evidence import gather
from dpsweep.orchestration.comparison.findings import Findings, findings
from dpsweep.orchestration.comparison.metrics import metric
from dpsweep.orchestration.comparison.rate_metrics import WORST_GROUP_METRICS
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.tracking import logged_models
from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri
from dpsweep.orchestration.tracking.logged_models import register_best
from dpsweep.orchestration.tracking.mlflow import MlflowTracker
from dpsweep.orchestration.tracking.plain_comparison import comparison, shared_view
from dpsweep.orchestration.tracking.tracker import TrackingUnavailable
from dpsweep.workers.data import load_dataset
from dpsweep.workers.spec import DataSpec, TrialSpec
from dpsweep.workers.trials.predicted_table import predicted_table
from dpsweep.workers.trials.trained_model import load_trained
from dpsweep.workers.trials.trial import run_trial
from tests.orchestration.sample_outcomes import sweep_of
from tests.orchestration.tracking.recordings import (
    DATA,
    NOTHING,
    SWEEP,
    client_of,
    one,
    opened,
    runs_of,
)
from tests.workers.trial_specs import small_trial

import mlflow.pyfunc  # isort: skip
from mlflow.exceptions import MlflowException  # isort: skip
from tests.known import known


def compared(folder: Path, spec: TrialSpec | None = None) -> tuple[MlflowTracker, Findings, SweepFiles]:
    """Trials with outcomes, recorded, of which one setting has a trained model on disk."""
    trials, outcomes = sweep_of({"none": (0.95, 0.9), "flat": (0.9, 0.8), "dpsgd_f": (0.88, 0.84)}, seeds=2)
    shown = [replace(trial, dataset=DATA, params={"epochs": 3}) for trial in trials]
    files, tracker = SweepFiles(str(folder / "sweep")), opened(folder)
    for trial in shown:
        tracker.log_trial(trial)
    run_trial(spec or small_trial(epochs=1), files.trial("dpsgd_f-0").root)
    return tracker, findings(replace(NOTHING, trials=tuple(shown)), gather(shown, outcomes)), files


def test_the_best_model_is_found_by_a_search_and_loads_with_its_signature(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, found, files = compared(folder)
    for _ in range(2):  # a resumed sweep records nothing twice
        tracker.log_comparison(comparison(found), ["flat and <b>others</b> cannot be told apart."])
    client = client_of(folder)
    experiment = known(client.get_experiment_by_name("dpsweep"))
    assert len(client.search_logged_models([experiment.experiment_id])) == 2, "one per private setting"
    order = [{"field_name": "metrics.setting/worst_group_accuracy", "ascending": False}]
    models = client.search_logged_models([experiment.experiment_id], "metrics.`privacy/epsilon` <= 8", order_by=order)
    fairest = known(found.best("worst_group_accuracy"))
    assert (models[0].tags["dpsweep.trial_key"], models[0].tags["dpsweep.setting"]) == ("dpsgd_f-0", fairest.name)
    numbers = {metric.key: metric for metric in models[0].metrics or []}
    assert numbers["privacy/delta"].value == 1e-5
    assert numbers["fairness/equalized_odds_difference"].dataset_digest == DATA.digest
    assert models[0].params["clipping"] == "dpsgd_f"
    assert models[0].name == fairest.name
    assert "Takes arrays of float32" in models[0].tags["mlflow.note.content"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", embedded_tracking_uri(folder))
    loaded = mlflow.pyfunc.load_model(f"models:/{models[0].model_id}")
    spec = small_trial(epochs=1)
    rows = load_dataset(spec.data).test.features.numpy()
    assert loaded.metadata.signature.inputs.input_types()[0] == rows.dtype
    expected = load_trained(files.trial("dpsgd_f-0"), spec).logits(rows)
    assert (loaded.predict(rows) == expected).all()


def test_a_model_of_a_table_takes_its_rows_without_the_folder_of_its_sweep(folder: Path) -> None:
    people = pd.DataFrame({"age": [20, 30, 40, 50] * 10, "job": ["a", "b"] * 20, "y": ["no", "yes"] * 20, "id": 7})
    people.to_csv(folder / "people.csv")
    read = {"features": ["age", "job"], "ranges": {"age": [0, 100]}, "categories": {"job": ["a", "b"]}}
    data = DataSpec("csv", {"path": str(folder / "people.csv"), "label": "y", "classes": ["no", "yes"], **read})
    spec = small_trial(data=data, epochs=1)
    tracker, found, files = compared(folder, spec)
    expected, _ = predicted_table(load_trained(files.trial("dpsgd_f-0"), spec), people)
    tracker.log_comparison(comparison(found), [])
    uri = embedded_tracking_uri(folder)
    made = register_best(best(found, "worst_group"), SWEEP.sweep_id, files, "people", tracking_uri=uri)
    (model,) = client_of(folder).search_logged_models(["1"], "tags.`dpsweep.trial_key` = 'dpsgd_f-0'")
    assert model.tags["mlflow.note.content"].startswith(
        "Takes rows of a table with the columns age, job. Gives predict"
    )
    shutil.rmtree(files.root)
    (folder / "people.csv").unlink()
    loaded = mlflow.pyfunc.load_model(made.location)
    signature = loaded.metadata.signature
    assert [(each.name, str(each.type)) for each in signature.inputs] == [
        ("age", "DataType.double"),
        ("job", "DataType.string"),
    ]
    assert (
        signature.outputs.input_names() == list(expected) == ["prediction", "probability of no", "probability of yes"]
    )
    assert loaded.input_example == [{"age": 50.0, "job": "a"}], "what is declared, no row"
    assert len(loaded.predict(loaded.input_example)) == 1
    rows = people[["age", "job"]]
    for given in (people, rows.to_dict("records"), rows.to_dict("list")):
        told = loaded.predict(given)
        assert {name: told[name].tolist() for name in told} == {name: each.tolist() for name, each in expected.items()}
    with pytest.raises(MlflowException, match="the data frame has no column 'age'; the model reads age, job"):
        loaded.predict(people[["job"]])
    with pytest.raises(MlflowException, match="it is an index: call reset_index"):
        loaded.predict(people.set_index("age"))
    with pytest.raises(MlflowException, match="the columns do not make a table; give lists of the same length"):
        loaded.predict({"age": [1, 2], "job": ["a"]})
    with pytest.warns(UserWarning, match="1 of 1 row have no prediction: they lack a value .age 1.") as warned:
        assert loaded.predict(pd.DataFrame({"age": [math.nan], "job": ["a"]}))["prediction"].isna().all()
    assert warned[0].filename == __file__


def test_a_model_of_other_data_says_that_it_takes_no_table(folder: Path) -> None:
    tracker, found, files = compared(folder)
    tracker.log_comparison(comparison(found), [])
    uri = embedded_tracking_uri(folder)
    made = register_best(best(found, "worst_group"), SWEEP.sweep_id, files, "people", tracking_uri=uri)
    loaded = mlflow.pyfunc.load_model(made.location)
    assert loaded.metadata.signature.inputs.is_tensor_spec()
    with pytest.raises(MlflowException, match=r"are neither a table whose .* nor texts with a label"):
        loaded.predict(pd.DataFrame({"age": [1.0]}))


def test_the_winner_gets_a_name_and_an_alias_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, found, files = compared(folder)
    tracker.log_comparison(comparison(found), [])
    winner, uri = best(found, "worst_group"), embedded_tracking_uri(folder)
    for _ in range(2):
        made = register_best(winner, SWEEP.sweep_id, files, "people", tracking_uri=uri)
        assert (made.address, made.version) == ("models:/people@champion", "1")
    again = register_best(winner, SWEEP.sweep_id, files, "people", "fairest", uri)
    assert (again.address, again.version) == ("models:/people@fairest", "1")
    client = client_of(folder)
    version = client.get_model_version_by_alias("people", "champion")
    assert version.tags["dpsweep.trial_key"] == winner.trial.key == "dpsgd_f-0"
    assert (version.tags["by"], version.tags["epsilon"]) == ("worst_group_accuracy", "3.00")
    assert " to " in version.tags["interval"]
    spec = small_trial(epochs=1)
    rows = load_dataset(spec.data).test.features.numpy()
    expected = load_trained(files.trial("dpsgd_f-0"), spec).logits(rows)
    assert (mlflow.pyfunc.load_model(made.location).predict(rows) == expected).all(), "no tracking URI is set"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_registry_uri(uri)
    assert (mlflow.pyfunc.load_model(made.address).predict(rows) == expected).all()
    with pytest.raises(InvalidInput, match="MLflow refuses the name 'people' or the alias 'latest'"):
        register_best(winner, SWEEP.sweep_id, files, "people", "latest", uri)
    other = best(found, "accuracy")
    with pytest.raises(InvalidInput, match="keeps no weights of the model of flat-0; give the --tracking-uri"):
        register_best(other, SWEEP.sweep_id, files, "people", tracking_uri=uri)


def test_a_model_too_large_for_mlflow_is_loaded_from_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_models, "LARGEST_MODEL", 100)
    tracker, found, files = compared(folder)
    tracker.log_comparison(comparison(found), [])
    with pytest.raises(InvalidInput, match=r"of dpsgd_f-0 have more than .* MiB .*trials\['dpsgd_f-0'\].model\(\)"):
        register_best(
            best(found, "worst_group"), SWEEP.sweep_id, files, "people", tracking_uri=embedded_tracking_uri(folder)
        )


def test_another_metric_of_the_worst_group_orders_runs_and_models(folder: Path) -> None:
    tracker, found, _ = compared(folder)
    chosen = replace(found, worst_group=WORST_GROUP_METRICS["false_positive_rate"])
    tracker.log_comparison(comparison(chosen), [])
    client = client_of(folder)
    experiment = known(client.get_experiment_by_name("dpsweep"))
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{SWEEP.sweep_id}"])
    name = "metrics.`view/worst_group_false_positive_rate`"
    assert name in view["selectedColumns"]
    corrected = "setting/worst_group_false_positive_rate_corrected"
    assert (view["orderByKey"], view["orderByAsc"]) == (f"metrics.`{corrected}`", True), "the lowest rates first"
    order = [{"field_name": f"metrics.{corrected}", "ascending": True}]
    models = client.search_logged_models([experiment.experiment_id], "metrics.`privacy/epsilon` <= 8", order_by=order)
    fairest = known(chosen.best("worst_group_false_positive_rate"))
    assert models[0].tags["dpsweep.setting"] == fairest.name


def test_no_baselines_weights_and_no_pickle_are_copied(folder: Path) -> None:
    tracker, found, files = compared(folder)
    run_trial(small_trial(epochs=1), files.trial("none-0").root)
    tracker.log_comparison(comparison(found), [])
    stored = {path.name for path in (folder / "artifacts").rglob("*") if path.is_file()}
    assert {"MLmodel", "model.pt", "inputs.pt", "spec.json"} <= stored
    assert len(list((folder / "artifacts").rglob("model.pt"))) == 1
    assert not [name for name in stored if name.endswith((".pkl", ".pickle", ".cloudpickle"))]


def test_the_sweeps_own_run_has_the_headline_and_its_address_opens_the_comparison(folder: Path) -> None:
    tracker, found, files = compared(folder)
    tracker.log_comparison(comparison(found), ["flat and <b>others</b> cannot be told apart."])
    run, best = one(runs_of(client_of(folder)), kind="sweep"), known(found.best("accuracy"))
    mean = known(best.over_seeds(metric("accuracy").value))
    assert run.data.metrics["final/accuracy"] == pytest.approx(mean.mean)
    assert run.data.tags["best_setting"] == best.name
    note = run.data.tags["mlflow.note.content"]
    assert "cannot be told apart" in note
    assert "<b>" not in note.replace("\\<", "")
    assert files.report.split("/")[-1].replace("_", "") in note.replace("\\", "")
    experiment = known(client_of(folder).get_experiment_by_name("dpsweep"))
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{SWEEP.sweep_id}"])
    shown = view["selectedColumns"]
    assert shown == [
        *("attributes.`Created`", "tags.`private`", "params.`clipping`", "params.`seed`", "metrics.`view/epsilon`"),
        *(f"metrics.`view/{each}`" for each in ("worst_group_accuracy", "corrected_worst_group_accuracy")),
        *("metrics.`view/accuracy`", "metrics.`view/gap_of_accuracy`"),
    ], "what varies and the seeds, and no schedule, of which there is one"
    alone = json.loads(shared_view("x", comparison(replace(found, settings=found.private[:1]))))["selectedColumns"]
    assert set(shown) - set(alone) == {"tags.`private`", "params.`clipping`"}
    assert view["searchFilter"].endswith("AND tags.`dpsweep.kind` != 'sweep'"), "it would be a row without numbers"
    parallel, scatter = view["compareRunCharts"]
    assert (parallel["type"], scatter["type"]) == ("PARALLEL", "SCATTER")
    assert parallel["selectedParams"] == ["clipping"], "nothing else differs"
    assert parallel["selectedMetrics"][:2] == ["privacy/epsilon", "fairness/worst_group_accuracy"]
    assert {parallel["metricSectionId"], scatter["metricSectionId"]} == {view["compareRunSections"][0]["uuid"]}
    bounds = {"flat": 0.5, "dpsgd_f": 2.0}
    settings = [
        replace(
            each,
            trials=tuple(replace(t, params={"spec.clipping.params.bound": bounds[each.clipping]}) for t in each.trials),
        )
        for each in found.private
    ]
    charts = json.loads(shared_view("x", comparison(replace(found, settings=tuple(settings)))))["compareRunCharts"]
    assert charts[0]["selectedParams"] == ["clipping", "spec.clipping.params.bound"]
    memory = {"spec.clipping.params.bound": 4.0, "spec.clipping.params.count_memory": 0.9}
    first, *others = settings
    with_memory = replace(first, trials=tuple(replace(t, params=memory) for t in first.trials))
    charts = json.loads(shared_view("x", comparison(replace(found, settings=(with_memory, *others)))))[
        "compareRunCharts"
    ]
    assert charts[0]["selectedParams"] == ["clipping", "spec.clipping.params.bound"], "all have these"
    assert view["runsHiddenMode"] == "SHOW_ALL", "not only the first ten"
    assert view["isAccordionReordered"], "the charts of the comparison come before those that MLflow adds"
    assert tracker.address(SWEEP.sweep_id) == (
        f"#/experiments/{experiment.experiment_id}/runs?workflowType=machine_learning&"
        f"viewStateShareKey={SWEEP.sweep_id}&compareRunsMode=TABLE"
    )
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_the_columns_of_the_comparison_are_short_and_rounded_and_name_every_run_of_it(folder: Path) -> None:
    tracker, found, _ = compared(folder)
    tracker.log_comparison(comparison(found), [])
    tracker.close()
    client = client_of(folder)
    experiment = known(client.get_experiment_by_name("dpsweep"))
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{SWEEP.sweep_id}"])
    shown = client.search_runs([experiment.experiment_id], view["searchFilter"])
    assert len(shown) == len(found.settings) * 3, "two trials and their mean for each setting"
    names = {name.split("`")[1] for name in view["selectedColumns"] if name.startswith("metrics.")}
    assert len({name.partition("/")[2][:4] for name in names}) == len(names), "MLflow shows no more of a heading"
    order, kinds = view["orderByKey"].split("`")[1], {"trial": set[float | None](), "average": set[float | None]()}
    for run in shown:
        kinds[run.data.tags["dpsweep.kind"]].add(run.data.metrics.get(order))
    assert kinds["average"] == kinds["trial"], "a mean stands with its trials"
    for run in shown:
        values = {name: run.data.metrics[name] for name in names & run.data.metrics.keys()}
        assert {"view/accuracy", "view/worst_group_accuracy"} <= values.keys()
        assert all(len(f"{value:.10g}") <= 7 for value in values.values())
        assert values["view/accuracy"] == pytest.approx(run.data.metrics["final/accuracy"], abs=5e-5)
        assert values.get("view/epsilon", 3.0) >= run.data.metrics.get("privacy/epsilon", 3.0)
        assert (run.data.tags["private"] == "false") == ("view/epsilon" not in values)


def test_a_damaged_store_is_one_line_with_the_way_out(folder: Path, tmp_path: Path) -> None:
    tracker, found, files = compared(folder)
    tracker.log_comparison(comparison(found), [])
    whole, damaged = (folder / "mlflow.db").read_bytes(), tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "mlflow.db").write_bytes(whole[:100] + b"\xff" * (len(whole) - 100))
    uri = embedded_tracking_uri(damaged)
    with pytest.raises(TrackingUnavailable, match=r"cannot register a model in MLflow at .*; the file is damaged: del"):
        register_best(best(found), SWEEP.sweep_id, files, "people", tracking_uri=uri)
    with pytest.raises(TrackingUnavailable, match=r"cannot use MLflow at .*; the file is damaged: delete it, and"):
        MlflowTracker(uri, artifact_root=str(damaged / "artifacts"))
