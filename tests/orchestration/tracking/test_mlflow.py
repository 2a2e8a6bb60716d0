"""MLflow as a user finds it afterwards: layout, idempotence, crashes, servers, and what must never be in it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accounting.errors import InvalidInput
from accounting.schedules import SCHEDULES
from orchestration.comparison.best import best
from orchestration.comparison.evidence import NO_EVIDENCE, gather
from orchestration.comparison.findings import Findings, findings
from orchestration.comparison.rate_metrics import GROUP_METRICS, WORST_GROUP_METRICS
from orchestration.comparison.values import accuracy
from orchestration.records.layout import SweepFiles
from orchestration.records.published import Label, PublishedDataset, PublishedSweep, PublishedTrial
from orchestration.records.release_modes import Disclosure
from orchestration.records.states import TrialState
from orchestration.report.catalogue import figures_for_mlflow
from orchestration.tracking.embedded import client_of as tracking_client
from orchestration.tracking.embedded import embedded_tracking_uri
from orchestration.tracking.mlflow import MlflowTracker
from orchestration.tracking.models import shared_view
from orchestration.tracking.protocol import TrackedSweep
from orchestration.tracking.registry import register_best
from tests.orchestration.sample_outcomes import sweep_of
from tests.orchestration.sample_sweeps import EPOCHS, sample_sweep, sample_trial
from tests.workers.trial_specs import small_trial
from workers.clipping import CLIPPING
from workers.data import load_dataset
from workers.trained import load_trained
from workers.trial import run_trial

import mlflow.pyfunc  # isort: skip
from mlflow import MlflowClient  # isort: skip  (after orchestration.tracking.mlflow, which keeps it quiet)
from mlflow.entities import Run  # isort: skip

SWEEP = TrackedSweep("sweep-1", "quickstart", "name: quickstart\n", "runs/quickstart", {"python": "3.11"})
NOTHING = replace(sample_sweep("none"), trials=())
DATA = PublishedDataset("digits", "9a1f", "scikit-learn", {"train_size": 1438})


def opened(folder: Path) -> MlflowTracker:
    tracker = MlflowTracker(embedded_tracking_uri(folder), artifact_root=str(folder / "artifacts"))
    tracker.open_sweep(replace(SWEEP, root=str(folder / "sweep")))
    return tracker


def tracked(shown: PublishedTrial) -> PublishedTrial:
    first = shown.history[0].noise_multiplier if shown.history else 0.0
    params: dict[str, Label] = {"epochs": EPOCHS, "noise.initial_noise_multiplier": first, "model": "mlp"}
    tags = {"baseline": "none-none-0"}
    return replace(shown, params=params, dataset=DATA, tags=tags, started=1.7e9, ended=1.7e9 + 10.0)


def some_trials(disclosure: Disclosure = "none") -> list[PublishedTrial]:
    """Two settings of two seeds each, a baseline, and a failure."""
    sweep = sample_sweep(disclosure)
    chosen = [trial for trial in sweep.trials if trial.labels["clipping"] in ("none", "flat", "automatic")]
    return [tracked(trial) for trial in chosen if trial.labels["schedule"] != "exponential"]


def record(tracker: MlflowTracker, trials: list[PublishedTrial], data: PublishedSweep = NOTHING) -> None:
    for trial in trials:
        tracker.log_trial(trial)
    drawn = figures_for_mlflow(data)
    tracker.log_report("<html></html>", data, drawn)
    tracker.close()


def client_of(folder: Path) -> MlflowClient:
    return MlflowClient(embedded_tracking_uri(folder))


def runs_of(client: MlflowClient, experiment_name: str = "dpsweep") -> list[Run]:
    experiment = client.get_experiment_by_name(experiment_name)
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def one(runs: list[Run], **tags: str) -> Run:
    (found,) = [run for run in runs if all(run.data.tags.get(f"dpsweep.{key}") == tag for key, tag in tags.items())]
    return found


def content(client: MlflowClient, experiment_name: str = "dpsweep") -> dict[str, Any]:
    """Everything recorded, without times: what must be the same after recording it again."""
    recorded = {}
    for run in runs_of(client, experiment_name):
        history = {
            name: sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))
            for name in run.data.metrics
        }
        inputs = [item.dataset.digest for item in run.inputs.dataset_inputs] if run.inputs else []
        recorded[run.info.run_id] = (run.info.status, run.data.params, run.data.tags, history, inputs)
    return recorded


def test_one_run_for_the_sweep_its_trials_and_its_averages_below(folder: Path) -> None:
    trials = some_trials()
    record(opened(folder), trials, replace(NOTHING, trials=tuple(trials)))
    runs = runs_of(client_of(folder))
    sweep = one(runs, kind="sweep")
    assert Counter(run.data.tags["dpsweep.kind"] for run in runs) == {"sweep": 1, "trial": 5, "average": 2}
    assert all(run.data.tags["mlflow.parentRunId"] == sweep.info.run_id for run in runs if run is not sweep)
    assert (sweep.data.metrics["trials/finished"], sweep.data.metrics["trials/failed"]) == (4, 1)
    paths = {item.path for item in client_of(folder).list_artifacts(sweep.info.run_id)}
    assert paths == {"sweep.yaml", "manifest.json", "report.html", "figures"}


def test_a_trial_shows_parameters_scalars_series_groups_and_data(folder: Path) -> None:
    trial = tracked(sample_trial("dpsgd_f", "exponential", disclosure="none"))
    record(opened(folder), [trial])
    client = client_of(folder)
    run = one(runs_of(client), kind="trial")
    assert run.info.run_name == "dpsgd_f · exponential · seed 0"
    assert (run.info.start_time, run.info.end_time) == (1_700_000_000_000, 1_700_000_010_000)
    assert float(run.data.params["noise.initial_noise_multiplier"]) == trial.history[0].noise_multiplier
    assert {"clipping", "schedule", "seed", "epochs"} <= run.data.params.keys()
    scalars = {name for name in run.data.metrics if name.startswith(("final/", "privacy/", "fairness/"))}
    assert {"final/accuracy", "final/loss", "privacy/epsilon", "privacy/delta", "privacy/epsilon_group_of_4"} <= scalars
    assert {"fairness/accuracy_change", "fairness/worst_group_accuracy", "fairness/unequal_cost"} <= scalars
    assert trial.privacy is not None
    assert run.data.metrics["privacy/epsilon"] == trial.privacy.epsilon
    series = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "noise_multiplier")}
    assert series == {epoch.step: epoch.noise_multiplier for epoch in trial.history}
    assert len(client.get_metric_history(run.info.run_id, "clipping_bound/digit 8")) == EPOCHS
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "groups.json")).read_text())
    assert table["columns"] == [
        "group",
        *(metric.name for metric in GROUP_METRICS if metric.task in (None, "classification")),
    ]
    assert trial.quality is not None
    assert [row[0] for row in table["data"]] == [group.name for group in trial.quality.groups]
    assert run.inputs is not None
    assert [item.dataset.digest for item in run.inputs.dataset_inputs] == [DATA.digest]


def test_every_group_has_a_series_of_its_own(folder: Path) -> None:
    """Whatever a data set calls its groups; names that MLflow takes are kept as they are."""
    kept = ["x", "a/b", "a_b", "Größe 8", "v1.0", "...x"]
    changed = ["", ".", "..", "../x", "/x", "x/", "a//b", "a/./b", "a:b", "a?b", "a\nb", "__", "x" * 400, "x" * 401]
    bounds = {"all": 1.0, **{name: 2.0 + place for place, name in enumerate([*kept, *changed])}}
    shown = sample_trial("flat", "constant")
    history = tuple(replace(epoch, clipping_bounds=bounds) for epoch in shown.history)
    record(opened(folder), [tracked(replace(shown, history=history))])
    found = one(runs_of(client_of(folder)), kind="trial").data.metrics
    series = {name: value for name, value in found.items() if name.startswith("clipping_bound")}
    assert sorted(series.values()) == sorted(bounds.values())
    assert series["clipping_bound"] == 1.0
    assert all(series[f"clipping_bound/{name}"] == bounds[name] for name in kept)


def test_an_infinite_epsilon_is_a_tag_and_no_metric(folder: Path) -> None:
    record(opened(folder), [tracked(sample_trial("none", "none"))])
    run = one(runs_of(client_of(folder)), kind="trial")
    assert run.data.tags["private"] == "false"
    assert not [name for name in run.data.metrics if name.startswith("privacy/")]
    assert all(math.isfinite(value) for value in run.data.metrics.values())


def test_averages_are_those_of_the_seeds(folder: Path) -> None:
    trials = some_trials()
    record(opened(folder), trials)
    average = one(runs_of(client_of(folder)), kind="average", setting="flat · constant")
    seeds = [trial for trial in trials if trial.labels["clipping"] == "flat"]
    accuracies = [trial.quality.main or 0.0 for trial in seeds if trial.quality is not None]
    assert average.data.metrics["final/accuracy"] == pytest.approx(sum(accuracies) / 2)
    deviation = abs(accuracies[0] - accuracies[1]) / math.sqrt(2)
    assert average.data.metrics["deviation/final/accuracy"] == pytest.approx(deviation)
    assert "seed" not in average.data.params
    assert (average.data.params["clipping"], average.data.tags["seeds"]) == ("flat", "2")


def test_recording_again_changes_nothing(folder: Path) -> None:
    trials = some_trials()
    record(opened(folder), trials)
    before = content(client_of(folder))
    record(opened(folder), trials)
    assert content(client_of(folder)) == before


def test_the_run_of_a_sweep_says_how_its_last_driver_ended(folder: Path) -> None:
    def outcome() -> str:
        return one(runs_of(client_of(folder)), kind="sweep").data.tags["dpsweep.outcome"]

    opened(folder)
    assert outcome() == "running"
    tracker = opened(folder)  # the driver before was killed
    assert outcome() == "running"
    tracker.close("KILLED")
    assert outcome() == "interrupted"
    opened(folder).close("FINISHED")
    assert outcome() == "finished"


def test_a_trial_grows_while_it_runs(folder: Path) -> None:
    whole = tracked(sample_trial(disclosure="none"))
    tracker = opened(folder)
    for epochs in (3, 10):
        seen = tuple(replace(epoch, clipping_bounds={}) for epoch in whole.history[:epochs])
        shown = replace(whole, state=TrialState.TRAINING, history=seen, quality=None)
        tracker.log_trial(replace(shown, ended=None))
        run = one(runs_of(client_of(folder)), kind="trial")
        assert run.info.status == "RUNNING"
        assert len(client_of(folder).get_metric_history(run.info.run_id, "noise_multiplier")) == epochs
    tracker = opened(folder)
    assert one(runs_of(client_of(folder)), kind="trial").data.tags["dpsweep.outcome"] == "interrupted"
    tracker.log_trial(replace(whole, state=TrialState.TRAINING, quality=None, ended=None))
    assert one(runs_of(client_of(folder)), kind="trial").info.status == "RUNNING", "resumed"
    bounds = [replace(epoch, clipping_bounds={"all": 2.0}) for epoch in whole.history]
    tracker.log_trial(replace(whole, history=tuple(bounds)))
    run = one(runs_of(client_of(folder)), kind="trial")
    assert (run.info.status, run.data.tags["dpsweep.outcome"]) == ("FINISHED", "finished")
    assert len(client_of(folder).get_metric_history(run.info.run_id, "clipping_bound")) == EPOCHS
    points = client_of(folder).get_metric_history(run.info.run_id, "noise_multiplier")
    assert sorted(point.step for point in points) == [epoch.step for epoch in whole.history]


def test_a_failed_trial_is_continued_in_its_run(folder: Path) -> None:
    whole = tracked(sample_trial(disclosure="none"))
    failed = replace(
        whole, state=TrialState.FAILED, error="out of memory", privacy=None, quality=None, individuals=None, history=()
    )
    record(opened(folder), [failed])
    before = one(runs_of(client_of(folder)), kind="trial")
    assert (before.info.status, before.data.tags["dpsweep.outcome"]) == ("FAILED", "failed")
    assert before.data.tags["mlflow.note.content"] == "Failed: out of memory"
    assert float(before.data.params["noise.initial_noise_multiplier"]) == 2.0
    record(opened(folder), [replace(whole, params={**whole.params, "train_size": 1438})])
    after = one(runs_of(client_of(folder)), kind="trial")
    assert (after.info.run_id, after.info.status) == (before.info.run_id, "FINISHED")
    assert after.data.tags["mlflow.note.content"] == ""
    assert after.data.params["train_size"] == "1438"


def test_a_stopped_trial_has_what_it_cost_but_nothing_final(folder: Path) -> None:
    whole = tracked(sample_trial(disclosure="none"))
    stopped = replace(whole, state=TrialState.STOPPED, error="by the scheduler after epoch 3 of 30")
    record(opened(folder), [stopped, tracked(sample_trial(seed=1, disclosure="none"))])
    runs = runs_of(client_of(folder))
    run = one(runs, kind="trial", outcome="stopped")
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.note.content"].startswith("Stopped: by the scheduler after epoch 3 of 30")
    assert stopped.privacy is not None
    assert run.data.metrics["privacy/epsilon"] == stopped.privacy.epsilon
    assert run.data.metrics["test_accuracy"] == stopped.history[-1].metrics["test_accuracy"]
    assert not {"final/accuracy", "fairness/worst_group_accuracy"} & run.data.metrics.keys()
    assert one(runs, kind="sweep").data.metrics["trials/stopped"] == 1
    assert "average" not in {run.data.tags["dpsweep.kind"] for run in runs}, "a stopped seed is in no mean"


def test_changed_parameters_make_a_new_run_instead_of_a_second_one(folder: Path) -> None:
    trial = tracked(sample_trial(disclosure="none"))
    record(opened(folder), [trial])
    record(opened(folder), [replace(trial, params={**trial.params, "epochs": 7})])
    assert one(runs_of(client_of(folder)), kind="trial").data.params["epochs"] == "7"


def test_a_changed_number_replaces_the_old_one(folder: Path) -> None:
    """A baseline that completes later adds changes; a corrected smaller value must win over the larger old one."""
    trial = tracked(sample_trial(disclosure="none"))
    record(opened(folder), [trial])
    assert trial.quality is not None
    quality = replace(trial.quality, accuracy=0.1, groups=trial.quality.groups[:2])
    record(opened(folder), [replace(trial, quality=quality)])
    run = one(runs_of(client_of(folder)), kind="trial")
    assert run.data.metrics["final/accuracy"] == 0.1
    table = json.loads(Path(client_of(folder).download_artifacts(run.info.run_id, "groups.json")).read_text())
    assert len(table["data"]) == 2


@pytest.mark.parametrize(("disclosure", "sensitive"), [("private", False), ("raw", True)])
def test_exact_statistics_make_runs_sensitive(folder: Path, disclosure: Disclosure, sensitive: bool) -> None:
    trials = [tracked(sample_trial(seed=seed, disclosure=disclosure)) for seed in (0, 1)]
    tracker = opened(folder)
    for trial in trials:
        tracker.log_trial(trial)
    tracker.log_report("", replace(sample_sweep(disclosure), trials=tuple(trials)), {})
    tracker.close()
    runs = runs_of(client_of(folder))
    assert {run.data.tags.get("sensitive") for run in runs} == {"true" if sensitive else None}
    assert all("privacy/mean_epsilon_i" in run.data.metrics for run in runs if run.data.tags["dpsweep.kind"] != "sweep")


def test_withheld_statistics_are_nowhere_in_the_store(folder: Path) -> None:
    record(opened(folder), some_trials("none"))
    stored = [path for path in folder.rglob("*") if path.is_file() and path.name != "report.html"]
    assert stored
    for path in stored:
        assert b"epsilon_i" not in path.read_bytes().replace(b"epsilon_i_kind", b""), path


WRITER = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from tests.orchestration.tracking.test_mlflow import opened, tracked
from tests.orchestration.sample_sweeps import sample_trial
tracker = opened(Path({folder!r}))
for seed in range(100):
    print(seed, flush=True)
    tracker.log_trial(tracked(sample_trial(seed=seed, disclosure="none")))
"""


def test_a_killed_driver_leaves_nothing_double_and_nothing_running(folder: Path) -> None:
    code = WRITER.format(here=str(Path(__file__).parents[3]), folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.strip() == "4":
                break
        time.sleep(0.05)
        os.kill(driver.pid, signal.SIGKILL)
    statuses = Counter(run.info.status for run in runs_of(client_of(folder)))
    assert statuses["RUNNING"] >= 1
    tracker = opened(folder)
    assert [run.data.tags["dpsweep.kind"] for run in runs_of(client_of(folder)) if run.info.status == "RUNNING"] == [
        "sweep"
    ]
    record(tracker, [tracked(sample_trial(seed=seed, disclosure="none")) for seed in range(6)])
    client = client_of(folder)
    runs = runs_of(client)
    keys = Counter(run.data.tags.get("dpsweep.trial_key") for run in runs if run.data.tags["dpsweep.kind"] == "trial")
    assert len(keys) == 6
    assert set(keys.values()) == {1}
    assert {run.info.status for run in runs} == {"FINISHED"}
    for run in (run for run in runs if run.data.tags["dpsweep.kind"] == "trial"):
        assert len(client.get_metric_history(run.info.run_id, "noise_multiplier")) == EPOCHS


def test_a_fresh_store_is_made_quietly(tmp_path: Path) -> None:
    """No migration log, no telemetry, nothing on the terminal that is not dpsweep's own."""
    code = (
        "import sys; from orchestration.tracking.mlflow import MlflowTracker, TrackedSweep\n"
        "tracker = MlflowTracker(f'sqlite:///{sys.argv[1]}/new folder/mlflow.db', artifact_root=sys.argv[1])\n"
        "tracker.open_sweep(TrackedSweep('a', 'a', '', sys.argv[1])); tracker.close()\n"
        "from mlflow.telemetry.utils import is_telemetry_disabled; assert is_telemetry_disabled()"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "DO_NOT"))}
    finished = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, env=environment
    )
    assert (finished.stdout, finished.stderr) == ("", "")


@pytest.mark.parametrize("names", [SCHEDULES, CLIPPING], ids=["schedules", "clipping"])
def test_categorical_values_differ_in_what_mlflow_shows_of_them(names: dict[str, object]) -> None:
    """The parallel-coordinates plot cuts category names after ten characters."""
    assert len({name[:10] for name in names}) == len(names) > 3


def compared(folder: Path) -> tuple[MlflowTracker, Findings, SweepFiles]:
    """Trials with outcomes, recorded, of which one setting has a trained model on disk."""
    trials, outcomes = sweep_of({"none": (0.95, 0.9), "flat": (0.9, 0.8), "dpsgd_f": (0.88, 0.84)}, seeds=2)
    shown = [replace(trial, dataset=DATA, params={"epochs": 3}) for trial in trials]
    files, tracker = SweepFiles(str(folder / "sweep")), opened(folder)
    for trial in shown:
        tracker.log_trial(trial)
    run_trial(small_trial(epochs=1), files.trial("dpsgd_f-0").root)
    return tracker, findings(replace(NOTHING, trials=tuple(shown)), gather(shown, outcomes)), files


def test_the_best_model_is_found_by_a_search_and_loads_with_its_signature(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, found, files = compared(folder)
    for _ in range(2):  # a resumed sweep records nothing twice
        tracker.log_comparison(found, ["flat and <b>others</b> cannot be told apart."])
    client = client_of(folder)
    experiment = client.get_experiment_by_name("dpsweep")
    assert experiment is not None
    assert len(client.search_logged_models([experiment.experiment_id])) == 6, "one per trial"
    order = [{"field_name": "metrics.setting/worst_group_accuracy", "ascending": False}]
    models = client.search_logged_models([experiment.experiment_id], "metrics.`privacy/epsilon` <= 8", order_by=order)
    fairest = found.best("worst_group_accuracy")
    assert fairest is not None
    assert (models[0].tags["dpsweep.trial_key"], models[0].tags["dpsweep.setting"]) == ("dpsgd_f-0", fairest.name)
    numbers = {metric.key: metric for metric in models[0].metrics or []}
    assert numbers["privacy/delta"].value == 1e-5
    assert numbers["fairness/equalized_odds_difference"].dataset_digest == DATA.digest
    assert models[0].params["clipping"] == "dpsgd_f"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", embedded_tracking_uri(folder))
    loaded = mlflow.pyfunc.load_model(f"models:/{models[0].model_id}")
    spec = small_trial(epochs=1)
    rows = load_dataset(spec.data).test.features.numpy()
    assert loaded.metadata.signature.inputs.input_types()[0] == rows.dtype
    expected = load_trained(files.trial("dpsgd_f-0"), spec).logits(rows)
    assert (loaded.predict(rows) == expected).all()


def test_the_winner_gets_a_name_and_an_alias_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, found, files = compared(folder)
    tracker.log_comparison(found, [])
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
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_registry_uri(uri)
    spec = small_trial(epochs=1)
    rows = load_dataset(spec.data).test.features.numpy()
    expected = load_trained(files.trial("dpsgd_f-0"), spec).logits(rows)
    assert (mlflow.pyfunc.load_model(made.address).predict(rows) == expected).all()
    with pytest.raises(InvalidInput, match="MLflow refuses the name 'people' or the alias 'latest'"):
        register_best(winner, SWEEP.sweep_id, files, "people", "latest", uri)
    other = best(found, "accuracy")
    with pytest.raises(InvalidInput, match="keeps no weights of the model of flat-0; give the --tracking-uri"):
        register_best(other, SWEEP.sweep_id, files, "people", tracking_uri=uri)


def test_another_metric_of_the_worst_group_orders_runs_and_models(folder: Path) -> None:
    tracker, found, _ = compared(folder)
    chosen = replace(found, worst_group=WORST_GROUP_METRICS["false_positive_rate"])
    tracker.log_comparison(chosen, [])
    client = client_of(folder)
    experiment = client.get_experiment_by_name("dpsweep")
    assert experiment is not None
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{SWEEP.sweep_id}"])
    name = "metrics.`fairness/worst_group_false_positive_rate`"
    assert name in view["selectedColumns"]
    assert (view["orderByKey"], view["orderByAsc"]) == (name, True), "the lowest of the highest rates first"
    order = [{"field_name": "metrics.setting/worst_group_false_positive_rate", "ascending": True}]
    models = client.search_logged_models([experiment.experiment_id], "metrics.`privacy/epsilon` <= 8", order_by=order)
    fairest = chosen.best("worst_group_false_positive_rate")
    assert fairest is not None
    assert models[0].tags["dpsweep.setting"] == fairest.name


def test_no_baselines_weights_and_no_pickle_are_copied(folder: Path) -> None:
    tracker, found, files = compared(folder)
    run_trial(small_trial(epochs=1), files.trial("none-0").root)
    tracker.log_comparison(found, [])
    stored = {path.name for path in (folder / "artifacts").rglob("*") if path.is_file()}
    assert {"MLmodel", "model.pt", "inputs.pt", "spec.json"} <= stored
    assert len(list((folder / "artifacts").rglob("model.pt"))) == 1
    assert not [name for name in stored if name.endswith((".pkl", ".pickle", ".cloudpickle"))]


class CountingClient:
    """MLflow's client, and how often it was asked for something."""

    def __init__(self, client: MlflowClient) -> None:
        self.requests: Counter[str] = Counter()
        self._client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.requests[name] += 1
            return method(*args, **kwargs)

        return counted


def requests_of(folder: Path, settings: int) -> Counter[str]:
    """Those of recording a whole sweep of ``settings`` bounds at two seeds each."""
    counting = CountingClient(tracking_client(embedded_tracking_uri(folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orchestration.tracking.mlflow.client_of", lambda uri: counting)
        tracker = opened(folder)
    places = [(0.1 * place, seed) for place in range(1, settings + 1) for seed in (0, 1)]
    trials = [tracked(sample_trial("flat", "constant", seed, disclosure="none", bound=bound)) for bound, seed in places]
    data = replace(NOTHING, trials=tuple(trials))
    for trial in trials:
        tracker.log_trial(trial)
    tracker.log_comparison(findings(data, NO_EVIDENCE), ["said"])
    tracker.close()
    return counting.requests


def test_each_further_trial_takes_a_bounded_number_of_requests(folder: Path, tmp_path: Path) -> None:
    """So a thousand trials take a thousand times that: nothing asks for all trials again and again."""
    few, more = requests_of(folder, 2), requests_of(tmp_path / "more", 8)
    per_trial = (more.total() - few.total()) / (2 * 8 - 2 * 2)
    assert per_trial <= 9
    assert few["search_runs"] == more["search_runs"] == 1
    assert few["search_logged_models"] == more["search_logged_models"] == 1


def test_the_sweeps_own_run_has_the_headline_and_its_address_opens_the_comparison(folder: Path) -> None:
    tracker, found, files = compared(folder)
    tracker.log_comparison(found, ["flat and <b>others</b> cannot be told apart."])
    run, best = one(runs_of(client_of(folder)), kind="sweep"), found.best("accuracy")
    assert best is not None
    mean = best.over_seeds(accuracy)
    assert mean is not None
    assert run.data.metrics["final/accuracy"] == pytest.approx(mean.mean)
    assert run.data.tags["best_setting"] == best.name
    note = run.data.tags["mlflow.note.content"]
    assert "cannot be told apart" in note
    assert "<b>" not in note.replace("\\<", "")
    assert files.report.split("/")[-1].replace("_", "") in note.replace("\\", "")
    experiment = client_of(folder).get_experiment_by_name("dpsweep")
    assert experiment is not None
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{SWEEP.sweep_id}"])
    assert "metrics.`fairness/worst_group_accuracy`" in view["selectedColumns"]
    parallel, scatter = view["compareRunCharts"]
    assert (parallel["type"], scatter["type"]) == ("PARALLEL", "SCATTER")
    assert parallel["selectedParams"] == ["clipping", "schedule"], "nothing else differs"
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
    charts = json.loads(shared_view("x", replace(found, settings=tuple(settings))))["compareRunCharts"]
    assert charts[0]["selectedParams"] == ["clipping", "schedule", "spec.clipping.params.bound"]
    memory = {"spec.clipping.params.bound": 4.0, "spec.clipping.params.count_memory": 0.9}
    first, *others = settings
    with_memory = replace(first, trials=tuple(replace(t, params=memory) for t in first.trials))
    charts = json.loads(shared_view("x", replace(found, settings=(with_memory, *others))))["compareRunCharts"]
    assert charts[0]["selectedParams"] == ["clipping", "schedule", "spec.clipping.params.bound"], "all have these"
    assert view["runsHiddenMode"] == "SHOW_ALL", "not only the first ten"
    assert view["isAccordionReordered"], "the charts of the comparison come before those that MLflow adds"
    assert tracker.address == (
        f"#/experiments/{experiment.experiment_id}/runs?viewStateShareKey={SWEEP.sweep_id}&compareRunsMode=TABLE"
    )
