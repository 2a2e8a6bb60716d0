"""The joined record of a sweep, and its published forms: the report's data, MLflow's trials, results.json."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from dpsweep.accounting.mechanism.reasons import FROM_ROWS, Reason, in_words, union, weakened
from dpsweep.orchestration.comparison import publishing
from dpsweep.orchestration.comparison.ledger import Composition, composed
from dpsweep.orchestration.comparison.metrics import known_metrics, known_of_groups
from dpsweep.orchestration.comparison.parameters import asked, dataset_of, found_sizes, parameters
from dpsweep.orchestration.comparison.rate_metrics import WORST_GROUP_METRICS
from dpsweep.orchestration.comparison.sanity import is_reference, with_known_changes
from dpsweep.orchestration.comparison.settings import finished_settings
from dpsweep.orchestration.comparison.tuning_notes import published_tuning, tuning_note
from dpsweep.orchestration.store.attempts import Attempt
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import (
    PublishedAccount,
    PublishedAudit,
    PublishedQuality,
    PublishedSweep,
    PublishedTrial,
    TrialState,
)
from dpsweep.orchestration.store.release_modes import EXACT, Disclosure, release_mode
from dpsweep.orchestration.store.results import (
    StoppedTrial,
    StoredResult,
    TrialResult,
    all_weakened,
    read_exact_statistics,
)
from dpsweep.orchestration.store.status import TrialStatus
from dpsweep.orchestration.sweeps.grid import GridPoint
from dpsweep.orchestration.sweeps.manifest import Manifest
from dpsweep.orchestration.sweeps.planned import reasons_of
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.evaluation.attack_results import read_attacks
from dpsweep.workers.evaluation.scores import Evaluation
from dpsweep.workers.own_code.own_record import notes_on_weights
from dpsweep.workers.tasks import task_called
from dpsweep.workers.training.counters import read_counters

NO_LONGER_ASKED = "kept, though the sweep file no longer asks for it"
Result = TypeVar("Result", TrialResult, StoppedTrial)
Stored = TypeVar("Stored", bound=StoredResult)


def claimed(result: Stored, reasons: Iterable[Reason]) -> Stored:
    """Return ``result`` with every epsilon and bound on attacks as an estimate for these reasons and for its own."""
    found = union((result.reasons, reasons))
    if not found or not result.spec.is_private:
        return result
    individuals = result.individuals and weakened(result.individuals, found)
    return replace(all_weakened(result, found), reasons=found, individuals=individuals)


def _claimed_account(account: PublishedAccount, reasons: Iterable[Reason]) -> PublishedAccount:
    """Return ``account``, but with its epsilons as estimates for these reasons, if there are any."""
    found = weakened(account, reasons)
    return replace(found, individual_kind="estimate") if found.reasons else found


def told(trials: Iterable[PublishedTrial]) -> tuple[str, ...]:
    """Return a sentence for each reason why epsilons are estimates; says how many trials it concerns unless it is
    all.
    """
    private = [trial for trial in trials if trial.privacy is not None and trial.privacy.is_private]
    reasons, found = union(trial.reasons for trial in private), []
    for reason, words in zip(reasons, in_words(reasons), strict=True):
        count = sum(reason in trial.reasons for trial in private)
        found.append(words if count == len(private) else f"{count} of {len(private)} private trials: {words}")
    return tuple(found)


def shared_notes(trials: Iterable[PublishedTrial]) -> tuple[str, ...]:
    """Return the notes that every trial with results has, such as how many rows of the data are left out."""
    noted = [trial.notes for trial in trials if trial.quality is not None]
    return tuple(note for note in dict.fromkeys(itertools.chain(*noted)) if all(note in notes for notes in noted))


def _seen(result: Result, owned: SweepFiles | None) -> Result:
    """Return the result as stored, or as `SweepRecord.data` says of ``owned``: with exact statistics, attacks and
    counters. Raises: DataCorruption for damaged files.
    """
    if owned is None:
        return result
    trial = owned.trial(result.key)
    next_step = f"delete {trial.result} and resume, which rebuilds both"
    statistics = read_exact_statistics(trial.private_summary, next_step)
    if isinstance(result, StoppedTrial):
        return replace(result, individuals=statistics)
    attacks, counters = read_attacks(trial.attacks), read_counters(trial.private_training)
    return replace(result, individuals=statistics, attacks=attacks, counters=counters)


@dataclass(frozen=True)
class SweepRecord:
    """A sweep with its manifest, its grid of trials (``points``) and the state of each.

    `statuses`: by trial key; a trial without one has not started.
    `attempts`: releases of each trial, by its key.
    `accounts`, `audits`: results of `dpsweep account` and `dpsweep audit`, by trial key; shown only where exact
    statistics are.
    `candidates`: releases of the candidates of an unaccounted tuning, by setting.
    """

    manifest: Manifest
    sweep: SweepSpec
    points: tuple[GridPoint, ...]
    statuses: Mapping[str, TrialStatus]
    attempts: Mapping[str, tuple[Attempt, ...]]
    accounts: Mapping[str, tuple[PublishedAccount, ...]] = field(default_factory=dict)
    candidates: Mapping[str, tuple[Attempt, ...]] = field(default_factory=dict)
    audits: Mapping[str, tuple[PublishedAudit, ...]] = field(default_factory=dict)

    @property
    def disclosure(self) -> Disclosure:
        """Return the sweep's release mode."""
        return self.sweep.disclosure

    @cached_property
    def _added(self) -> frozenset[str]:
        return frozenset(self.manifest.added)

    @property
    def failed(self) -> bool:
        """Return whether any trial failed."""
        return any(status.state is TrialState.FAILED for status in self.statuses.values())

    def status(self, key: str) -> TrialStatus:
        """Return the status of the trial called ``key``, its result as what may be claimed of it in this sweep.

        Pending if it has not started. A trial that was trained before the file asked for a selection that nothing
        accounts for, or in another sweep, is weakened by it all the same.
        """
        found = self.statuses.get(key, TrialStatus(key, total_steps=0))
        result = found.result
        return found if result is None else replace(found, result=claimed(result, self.reasons_of(result)))

    def reasons_of(self, result: StoredResult) -> tuple[Reason, ...]:
        """Return why every epsilon of a trial of this sweep is an estimate."""
        of_data = result.training.reasons if isinstance(result, TrialResult) else ()
        return union((result.reasons, reasons_of(self.sweep, result.spec, set(of_data).intersection(FROM_ROWS))))

    def finished(self, key: str | None) -> TrialResult | None:
        """Return the result of the trial if it trained to its end, else None."""
        result = self.status(key or "").result
        return result if isinstance(result, TrialResult) else None

    @cached_property
    def _baselines(self) -> Mapping[str, tuple[GridPoint, ...]]:
        """Return the finished non-private trials by data, model and seed, the best setting by its main score first.

        Only settings that have learnt something count. Private trials are compared with the best baseline, because the
        difference to a diverged one would say nothing about privacy.
        """
        runs: dict[str, list[Evaluation]] = {}
        for point in self.points:
            result = None if point.is_private else self.finished(point.key)
            if result is not None:
                runs.setdefault(_setting_of(point), []).append(result.evaluation)
        mean = {name: statistics.fmean(each.main for each in of) for name, of in runs.items() if is_reference(of)}
        found: dict[str, list[GridPoint]] = {}
        for point in self.points:
            if not point.is_private and _setting_of(point) in mean and self.finished(point.key):
                found.setdefault(_comparable(point), []).append(point)
        return {
            name: tuple(sorted(points, key=lambda point: -mean[_setting_of(point)])) for name, points in found.items()
        }

    def baseline(self, point: GridPoint) -> str | None:
        """Return the key of the baseline that a private trial is compared with: the best one with its data, model and
        seed.

        None if each has learnt nothing.
        """
        known = self._baselines.get(_comparable(point), ()) if point.baseline else ()
        if known:
            return known[0].key
        return None if self.finished(point.baseline) else point.baseline

    def trial(self, point: GridPoint, owned: SweepFiles | None = None) -> PublishedTrial:
        """Return one trial as published, compared with its baseline if both are finished. owned: as of `data`."""
        result, outcome = self.finished(point.key), self._outcome(point, owned)
        is_exact = owned is not None or release_mode(self.disclosure).statistics == "exact"
        reasons = outcome.reasons
        spec = result.spec if result else point.spec
        note, asked = tuning_note(self.sweep, point), () if point.is_asked else (NO_LONGER_ASKED,)
        return replace(
            outcome,
            is_asked=point.is_asked,
            is_added=self.sweep.compare.looks > 0 or point.key in self._added,
            tuning=published_tuning(self.sweep, point),
            notes=(*outcome.notes, *notes_on_weights(spec), *asked, *((note,) if note else ())),
            params={**parameters(spec, point.labels), **(found_sizes(result.training) if result else {})},
            dataset=dataset_of(spec.data, result.training) if result else None,
            attempts=self.attempts.get(point.key, ()),
            candidates=self.candidates.get(point.setting, ()) if point.is_private else (),
            accounts=self._accounts(point.key, reasons) if is_exact else (),
            audits=self.audits.get(point.key, ()) if is_exact else (),
            tags={
                "baseline": self.baseline(point) or "",
                **({"tuning": self.sweep.tune.privacy} if self.sweep.tune else {}),
                **({"device": outcome.device.device, "device_name": outcome.device.name} if outcome.device else {}),
                **({"sensitive": "true"} if release_mode(self.disclosure).is_sensitive else {}),
            },
        )

    def _accounts(self, key: str, reasons: tuple[Reason, ...]) -> tuple[PublishedAccount, ...]:
        return tuple(_claimed_account(account, reasons) for account in self.accounts.get(key, ()))

    def _outcome(self, point: GridPoint, owned: SweepFiles | None) -> PublishedTrial:
        status = self.status(point.key)
        match status.result:
            case TrialResult() as result:
                seen = claimed(_seen(result, owned), result.reasons)
                return publishing.finished(point, seen, self.finished(self.baseline(point)))
            case StoppedTrial() as result:
                return publishing.stopped(point, claimed(_seen(result, owned), result.reasons))
        return publishing.unfinished(point, status)

    def data(self, owned: SweepFiles | None = None) -> PublishedSweep:
        """Return the whole sweep as published under its release mode.

        owned: the sweep's files, for a page with exact statistics, which only the owner of the data may see.
        """
        return self._disclosed if owned is None else self._published(owned)

    @cached_property
    def _disclosed(self) -> PublishedSweep:
        """Return the sweep under its release mode, which many readers ask for."""
        return self._published(None)

    def _published(self, owned: SweepFiles | None) -> PublishedSweep:
        return PublishedSweep(
            name=self.sweep.name,
            trials=tuple(self.trial(point, owned) for point in self.points),
            delta=self.sweep.privacy.delta,
            disclosure=self.disclosure if owned is None else EXACT,
            created=self.manifest.created,
            provenance=self.manifest.provenance(),
            worst_group=self.worst_group,
            looks=self.sweep.compare.looks,
        )

    @property
    def worst_group(self) -> str:
        """Return the group metric whose worst value compares settings; by default the main score of the task."""
        results = (status.result for status in self.statuses.values())
        task = next((result.evaluation.task for result in results if result is not None), "classification")
        return self.sweep.compare.worst_group or task_called(task).main


def _comparable(point: GridPoint) -> str:
    """Return what a trial shares with the baselines that it is compared with: data, model and the sweep's seed.

    The best candidate of a private selection was trained with another seed.
    """
    return json.dumps([asdict(point.spec.data), asdict(point.spec.model), point.labels["seed"]], sort_keys=True)


def _setting_of(point: GridPoint) -> str:
    """Return all parameters except the seeds, which the runs of one setting share."""
    flat = asked(point)
    return json.dumps({name: flat[name] for name in flat if name not in ("seed", "data.split_seed")}, sort_keys=True)


def rows(record: SweepRecord, settings: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return one row of plain values per trial, as ``--json`` prints them; an infinite epsilon is None, and ``private``
    False.

    settings: by the key of a trial, its setting with intervals (`findings.of_trials`). In a row, ``composed`` is the
    composed cost of all attempts at the trial, of all seeds of its setting, and of the whole sweep.
    """
    settings = settings or {}
    unknown_cost = next((setting["unknown_cost"] for setting in settings.values()), "")
    trials = with_known_changes(record.data(), unknown_cost).trials
    sweep, seeds = composed(trials), dict[str, Composition | None]()
    for setting in finished_settings(trials):
        seeds |= dict.fromkeys((trial.key for trial in setting.trials), composed(setting.trials))
    return [
        _row(trial, record.status(trial.key).result, record.worst_group)
        | ({"setting": settings[trial.key]} if trial.key in settings else {})
        | ({"composed": _together(trial, seeds.get(trial.key), sweep)} if trial.attempts else {})
        for trial in trials
    ]


def _together(trial: PublishedTrial, seeds: Composition | None, sweep: Composition | None) -> dict[str, dict[str, Any]]:
    found = {"trial": composed([trial]), "seeds": seeds, "sweep": sweep}
    return {scope: composition.as_dict() for scope, composition in found.items() if composition is not None}


def _row(trial: PublishedTrial, result: StoredResult | None, worst_group: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": trial.key,
        "labels": dict(trial.labels),
        "asked": trial.is_asked,
        "status": trial.state.word,
        "error": trial.error,
        **({"tuning": trial.tags["tuning"], "notes": list(trial.notes)} if "tuning" in trial.tags else {}),
    }
    if trial.device is not None:
        row |= {"device": trial.device.device, "device_name": trial.device.name}
    if result is None or trial.quality is None:
        return row
    return {
        **row,
        **known_metrics(trial),
        **result.worst_case.as_dict(),
        "groups": [estimate.as_dict() for estimate in result.groups],
        "risks": [risk.as_dict() for risk in result.risks],
        "noise_source": result.spec.noise_source,
        "noise_multiplier": result.spec.noise.initial_noise_multiplier,
        "noise_strategy": result.spec.noise.strategy,
        "steps": result.steps,
        "worst_group": ", ".join(WORST_GROUP_METRICS[worst_group].whose(trial)) or None,
        "worst_group_by": worst_group,
        "by_group": known_of_groups(trial),
        **({"audits": list(map(asdict, trial.every_audit))} if trial.every_audit else {}),
        **_of_task(trial.quality),
    }


def _of_task(quality: PublishedQuality) -> dict[str, Any]:
    """Return the entries of a row that only classification has, or only other tasks."""
    if quality.accuracy is None:
        return {"task": quality.task, **({"parts": quality.parts} if quality.parts else {})}
    accuracies = {group.name: group.accuracy for group in quality.groups}
    return {"group_accuracies": accuracies, "confusion": _confusion(quality)}


def _confusion(quality: PublishedQuality) -> dict[str, list[list[int]]]:
    """Return counts of test examples by group, label and predicted class; "" stands for all groups."""
    found = {"": quality.counts, **{group.name: group.counts for group in quality.groups}}
    return {name: counts.matrix.astype(int).tolist() for name, counts in found.items() if counts is not None}


def parse_failures(table: Iterable[Mapping[str, Any]]) -> dict[str, TrialStatus]:
    """Return the failed trials in the rows of an earlier run's results.json; trial folders do not record failures."""
    return {
        row["key"]: TrialStatus(row["key"], total_steps=0, state=TrialState.FAILED, error=row["error"])
        for row in table
        if row["status"] == TrialState.FAILED.word
    }
