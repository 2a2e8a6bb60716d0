"""MLflow as a user finds it afterwards: layout, idempotence, crashes, and what must never be in it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from dpsweep.accounting.mechanism.schedules import NOISES
from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE
from dpsweep.orchestration.comparison.findings import findings
from dpsweep.orchestration.comparison.rate_metrics import GROUP_METRICS
from dpsweep.orchestration.comparison.sanity import without_changes
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.release_modes import Disclosure
from dpsweep.orchestration.tracking.embedded import client_of as tracking_client
from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri
from dpsweep.orchestration.tracking.plain_comparison import comparison
from dpsweep.orchestration.tracking.runs import MlflowRuns
from dpsweep.orchestration.tracking.tracker import TrackingUnavailable
from dpsweep.workers.clipping import CLIPPING
from tests.orchestration.sample_sweeps import EPOCHS, sample_sweep, sample_trial
from tests.orchestration.tracking.recordings import (
    DATA,
    NOTHING,
    client_of,
    one,
    opened,
    pages,
    record,
    runs_of,
    some_trials,
    tracked,
)
from tests.warm import FORKS

from mlflow import MlflowClient  # isort: skip  (after dpsweep.orchestration.tracking.mlflow, which keeps it quiet)
from tests.known import known


def test_one_run_for_the_sweep_its_trials_and_its_averages_below(folder: Path) -> None:
    trials = some_trials()
    record(opened(folder), trials, replace(NOTHING, trials=tuple(trials)))
    runs = runs_of(client_of(folder))
    sweep = one(runs, kind="sweep")
    assert Counter(run.data.tags["dpsweep.kind"] for run in runs) == {"sweep": 1, "trial": 5, "average": 2}
    assert all(run.data.tags["mlflow.parentRunId"] == sweep.info.run_id for run in runs if run is not sweep)
    assert {run.data.tags["sweep"] for run in runs} == {"quickstart"}, "a table may show several sweeps"
    assert (sweep.data.metrics["trials/finished"], sweep.data.metrics["trials/failed"]) == (4, 1)
    paths = {item.path for item in client_of(folder).list_artifacts(sweep.info.run_id)}
    assert paths == {"sweep.yaml", "manifest.json", "report.html", "groups.json", "figures"}


def test_a_trial_shows_parameters_scalars_series_groups_and_data(folder: Path) -> None:
    trial = tracked(sample_trial("dpsgd_f", "exponential", disclosure="none"))
    data, tracker = replace(NOTHING, trials=(trial,)), opened(folder)
    tracker.compare_by(comparison(findings(data, NO_EVIDENCE)))
    record(tracker, [trial], data)
    client = client_of(folder)
    run, sweep = (one(runs_of(client), kind=kind) for kind in ("trial", "sweep"))
    assert run.info.run_name == "dpsgd_f · exponential · seed 0"
    assert (run.info.start_time, run.info.end_time) == (1_700_000_000_000, 1_700_000_010_000)
    assert float(run.data.params["noise.initial_noise_multiplier"]) == trial.history[0].noise_multiplier
    assert {"clipping", "schedule", "seed", "epochs"} <= run.data.params.keys()
    scalars = {name for name in run.data.metrics if name.startswith(("final/", "privacy/", "fairness/"))}
    assert {"final/accuracy", "final/loss", "privacy/epsilon", "privacy/delta", "privacy/epsilon_group_of_4"} <= scalars
    assert {"fairness/accuracy_change", "fairness/worst_group_accuracy", "fairness/unequal_cost"} <= scalars
    assert run.data.metrics["privacy/epsilon"] == known(trial.privacy).epsilon
    series = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "noise_multiplier")}
    assert series == {epoch.step: epoch.noise_multiplier for epoch in trial.history}
    assert len(client.get_metric_history(run.info.run_id, "clipping_bound/digit 8")) == EPOCHS
    table = json.loads(Path(client.download_artifacts(sweep.info.run_id, "groups.json")).read_text())
    assert table["columns"] == [
        *("trial", "clipping", "group"),
        *(metric.name for metric in GROUP_METRICS if metric.task in (None, "classification")),
    ]
    assert trial.quality is not None
    assert [tuple(row[:3]) for row in table["data"]] == [
        (trial.key, "dpsgd_f", group.name) for group in trial.quality.groups
    ]
    assert sweep.inputs is not None
    assert [item.dataset.digest for item in sweep.inputs.dataset_inputs] == [DATA.digest]
    assert run.data.tags["dpsweep.data"] == f"{DATA.name} {DATA.digest}"


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
    assert run.data.metrics["privacy/epsilon"] == known(stopped.privacy).epsilon
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
    record(opened(folder), [trial], replace(NOTHING, trials=(trial,)))
    assert trial.quality is not None
    quality = replace(trial.quality, accuracy=0.1, groups=trial.quality.groups[:2])
    changed = replace(trial, quality=quality)
    record(opened(folder), [changed], replace(NOTHING, trials=(changed,)))
    run = one(runs_of(client_of(folder)), kind="trial")
    assert run.data.metrics["final/accuracy"] == 0.1
    sweep = one(runs_of(client_of(folder)), kind="sweep")
    table = json.loads(Path(client_of(folder).download_artifacts(sweep.info.run_id, "groups.json")).read_text())
    assert len(table["data"]) == 2


@pytest.mark.parametrize(("disclosure", "sensitive"), [("private", False), ("raw", True)])
def test_exact_statistics_make_runs_sensitive(folder: Path, disclosure: Disclosure, sensitive: bool) -> None:
    trials = [tracked(sample_trial(seed=seed, disclosure=disclosure)) for seed in (0, 1)]
    tracker = opened(folder)
    for trial in trials:
        tracker.log_trial(trial)
    with pages("<html></html>") as attached:
        tracker.log_report(attached, replace(sample_sweep(disclosure), trials=tuple(trials)))
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


def write_for_long(folder: Path, told: Connection) -> None:
    """What a driver does, telling the seed of each trial before it records it."""
    tracker = opened(folder)
    for seed in range(100):
        told.send(seed)
        tracker.log_trial(tracked(sample_trial(seed=seed, disclosure="none")))


def test_a_killed_driver_leaves_nothing_double_and_nothing_running(folder: Path) -> None:
    here, there = FORKS.Pipe(duplex=False)
    driver = FORKS.Process(target=write_for_long, args=(folder, there))
    driver.start()
    while here.recv() < 4:
        pass
    time.sleep(0.05)
    driver.kill()
    driver.join()
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


def test_trials_whose_sweep_was_deleted_hang_below_the_new_one(folder: Path) -> None:
    trials = some_trials()
    record(opened(folder), trials)
    before = one(runs_of(client_of(folder)), kind="sweep").info.run_id
    client_of(folder).delete_run(before)
    record(opened(folder), trials)
    runs = runs_of(client_of(folder))
    sweep = one(runs, kind="sweep").info.run_id
    assert sweep != before
    assert {run.data.tags.get("mlflow.parentRunId", sweep) for run in runs} == {sweep}


@pytest.mark.parametrize("text", ["plain", "it's", 'say "a"', 'it\'s "a"', "a' OR 'b"])
def test_a_run_whose_answer_was_lost_is_found_by_any_name(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, create, made = tracked(sample_trial(disclosure="none")), MlflowRuns.create, list[str]()

    def answers_late(self: MlflowRuns, name: str, tags: Mapping[str, str], started: float | None = None) -> str:
        made.append(create(self, name, tags, started))
        if len(made) == 1:
            raise TrackingUnavailable("no answer")
        return made[-1]

    tracker, named = opened(folder), replace(trial, key=text)
    monkeypatch.setattr(MlflowRuns, "create", answers_late)
    with pytest.raises(TrackingUnavailable):
        tracker.log_trial(named)
    assert tracker.log_trial(named) == made[0]
    assert len(made) == 1


def test_a_run_that_a_server_makes_long_after_it_was_given_up_is_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, held_up = MlflowRuns.create, list[Callable[[], str]]()

    def held(self: MlflowRuns, name: str, tags: Mapping[str, str], started: float | None = None) -> str:
        if held_up:
            return create(self, name, tags, started)
        held_up.append(lambda: create(self, name, tags, started))
        raise TrackingUnavailable("no answer")

    trial, tracker = tracked(sample_trial(disclosure="none")), opened(folder)
    monkeypatch.setattr(MlflowRuns, "create", held)
    with pytest.raises(TrackingUnavailable):
        tracker.log_trial(trial)
    kept, late = tracker.log_trial(trial), held_up[0]()
    tracker.close()
    runs = [run.info.run_id for run in runs_of(client_of(folder)) if run.data.tags["dpsweep.kind"] == "trial"]
    assert runs == [kept]
    assert late != kept


def test_an_experiment_that_another_sweep_has_just_made_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(folder)
    ask, answers = MlflowClient.get_experiment_by_name, [None]
    monkeypatch.setattr(
        MlflowClient, "get_experiment_by_name", lambda *asked: answers.pop() if answers else ask(*asked)
    )
    opened(folder).close()
    assert not answers
    assert {each.name for each in client_of(folder).search_experiments()} <= {"Default", "dpsweep"}


def test_a_fresh_store_is_made_quietly(tmp_path: Path) -> None:
    """No migration log, no telemetry, nothing on the terminal that is not dpsweep's own."""
    code = (
        "import sys; from dpsweep.orchestration.tracking.mlflow import MlflowTracker, TrackedSweep\n"
        "tracker = MlflowTracker(f'sqlite:///{sys.argv[1]}/new folder/mlflow.db', artifact_root=sys.argv[1])\n"
        "tracker.open_sweep(TrackedSweep('a', 'a', '', sys.argv[1])); tracker.close()\n"
        "from mlflow.telemetry.utils import is_telemetry_disabled; assert is_telemetry_disabled()"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "DO_NOT"))}
    finished = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, env=environment
    )
    assert (finished.stdout, finished.stderr) == ("", "")


@pytest.mark.parametrize("names", [NOISES, CLIPPING], ids=["noise", "clipping"])
def test_categorical_values_differ_in_what_mlflow_shows_of_them(names: dict[str, object]) -> None:
    """The parallel-coordinates plot cuts category names after ten characters."""
    assert len({name[:10] for name in names}) == len(names) > 3


def test_no_run_shows_a_change_that_its_baseline_does_not_bear(folder: Path) -> None:
    """Neither before the whole sweep is known, nor where more seeds show that what was recorded says nothing."""
    trials = some_trials()
    found = comparison(findings(replace(NOTHING, trials=tuple(trials)), NO_EVIDENCE))

    def changes() -> list[float]:
        return [
            value for run in runs_of(client_of(folder)) for name, value in run.data.metrics.items() if "change" in name
        ]

    tracker = opened(folder)
    for trial in trials:
        tracker.log_trial(trial)
    assert changes() == []
    tracker.log_comparison(found, ["said"])
    tracker.close()
    assert len(changes()) > 4
    assert not any(map(math.isnan, changes()))
    anew = opened(folder)
    for trial in trials:
        anew.log_trial(trial)
    lost = comparison(findings(replace(NOTHING, trials=without_changes(trials)), NO_EVIDENCE))
    anew.log_comparison(replace(lost, knows_cost=False), ["said"])
    anew.close()
    assert all(map(math.isnan, changes()))


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
        patch.setattr("dpsweep.orchestration.tracking.mlflow.client_of", lambda uri: counting)
        tracker = opened(folder)
    places = [(0.1 * place, seed) for place in range(1, settings + 1) for seed in (0, 1)]
    trials = [tracked(sample_trial("flat", "constant", seed, disclosure="none", bound=bound)) for bound, seed in places]
    found = findings(replace(NOTHING, trials=tuple(trials)), NO_EVIDENCE)
    tracker.compare_by(comparison(found))
    for trial in trials:
        tracker.log_trial(trial)
    tracker.log_comparison(comparison(found), ["said"])
    tracker.close()
    return counting.requests


@pytest.mark.long
def test_each_further_trial_takes_a_bounded_number_of_requests(folder: Path, tmp_path: Path) -> None:
    """So a thousand trials take a thousand times that: nothing asks for all trials again and again."""
    few, more = requests_of(folder, 1), requests_of(tmp_path / "more", 4)
    per_trial = (more.total() - few.total()) / (2 * 4 - 2 * 1)
    assert per_trial <= 3 + 0.5 * (3 + 5), "three for the trial; for each two an average, and a logged model"
    assert few["search_runs"] == more["search_runs"] == 1
    assert few["search_logged_models"] == more["search_logged_models"] == 1
