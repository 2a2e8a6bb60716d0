"""The plan of a sweep, made without training: noise, steps, worst-case epsilon and stored bytes of every trial.

The planner builds the `Trace` with the functions that the trainer uses, so the calibrated mechanism is the one that
will be accounted. A trial that cannot run is refused with a reason; if any trial is refused, none starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

import torch
from torch import nn

from dpsweep.accounting.calibration.planned_runs import PROCESSES, Calibration, Solver, TrialMechanism, solve_all
from dpsweep.accounting.errors import DpsweepError, InvalidInput, Unreachable, private_text, public_text, without_locals
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import weakened
from dpsweep.accounting.mechanism.trace import Release, Trace
from dpsweep.accounting.pld import rounds_or_chain
from dpsweep.orchestration.store.release_modes import RELEASED, shown_error
from dpsweep.orchestration.sweeps.grid import NO_PAST, GridPoint, Past, grid
from dpsweep.orchestration.sweeps.plan_remarks import note_of_candidates, notes_of_own_parts, own_parts, warnings_of
from dpsweep.orchestration.sweeps.planned import Plan, PlannedTrial, Refusal, reasons_of, worst_cases
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.sections import require_defined
from dpsweep.orchestration.sweeps.tune import require_selectable
from dpsweep.orchestration.sweeps.tuning_stages import require_optuna, while_tuning, why_unlike
from dpsweep.workers.clipping import ClippingMethod, PublicFacts, make_clipping, rehearse
from dpsweep.workers.data import Dataset, describe, load_dataset
from dpsweep.workers.dataset_description import DatasetDescription
from dpsweep.workers.machine.checkpoint import fingerprint
from dpsweep.workers.machine.devices import torch_defaults
from dpsweep.workers.own_code.imports import NO_CODE, UserCode, is_import_path
from dpsweep.workers.sampling.users import planned_population, require_per_user
from dpsweep.workers.spec import DataSpec, NormSpec, Shard, TrialSpec
from dpsweep.workers.training.gradient_canaries import require_directions
from dpsweep.workers.training.optimizers import make_average, make_learning_rate_schedule, make_optimizer
from dpsweep.workers.training.preprocessing import planned_releases
from dpsweep.workers.training.trial_mechanism import (
    affordable_epochs,
    check_spec,
    mechanism_of,
    with_chosen_norms,
    with_noise,
)
from dpsweep.workers.trials.divisible import require_divisible
from dpsweep.workers.trials.exposure import require_room
from dpsweep.workers.trials.feasibility import StepSpec, TriedModel, check_feasible, excerpt

_BYTES_PER_ROW = 8 + 4 + 4 + 4 + 4
"""example_id int64; group int32; norm, contribution and loss float32."""
_BYTES_PER_SNAPSHOT = 8192
"""Overhead of a snapshot on disk: its folder, and its file without the rows."""
K = TypeVar("K")
V = TypeVar("V")


@torch_defaults()
def plan_sweep(
    sweep: SweepSpec, code: UserCode | None = NO_CODE, past: Past = NO_PAST, solver: Solver = PROCESSES
) -> Plan:
    """Plan every trial. Reads the data (for its size and groups) and runs each model on a few rows; trains nothing.

    For a sweep with ``tune``, plans the trials of the tuning.

    `code`: the user's own modules that may be imported. If None, no user code runs: the user's models are not tried
    (with a warning). Trials with the user's data sources or clipping methods are then refused, because their cost
    cannot be computed. `past`: history of the stored sweep that is continued. `solver`: runs many calibrations, for
    example in several processes. Raises: InvalidInput for a grid that `grid` refuses.
    """
    if sweep.tune is not None and sweep.adapted is None:
        require_optuna(sweep.tune)
        tuning = plan_sweep(while_tuning(sweep), code, past, solver)
        of_candidates = (note_of_candidates(sweep, tuning.trials),) if tuning.trials else ()
        return replace(_alike(sweep, tuning), notes=(*tuning.notes, *of_candidates))
    planner, points = _Planner(sweep, code, past.calibrations), grid(sweep, past)

    def attempted(point: GridPoint, step: Callable[[], V]) -> V | Refusal:
        try:
            return step()
        except (Exception, SystemExit) as error:  # user code raises what it likes, and its text may quote the data
            return Refusal(point.key, shown_error(error, sweep.disclosure), private_text(error))

    checked = [attempted(point, partial(planner.checked, point)) for point in points if point.is_asked]
    planner.calibrate([each for each in checked if isinstance(each, _Checked)], solver)
    outcomes = [
        each if isinstance(each, Refusal) else attempted(each.point, partial(planner.planned, each)) for each in checked
    ]
    planned, (shares, of_models) = [each for each in outcomes if isinstance(each, PlannedTrial)], planner.told()
    warnings = (*warnings_of(sweep, planned), *of_models)
    notes = (*(notes_of_own_parts(planned) if code is None else ()), *shares)
    refused = tuple(each for each in outcomes if isinstance(each, Refusal))
    former = tuple(point for point in points if not point.is_asked)
    return Plan(tuple(planned), refused, warnings, planner.multipliers, former, notes)


@dataclass(frozen=True)
class _Checked:
    """A trial whose components can run, before calibration. digest: of its data. calibration: the one that it needs,
    if any, and a digest of its inputs.
    """

    point: GridPoint
    dataset: DatasetDescription
    digest: str
    method: ClippingMethod
    mechanism: TrialMechanism
    parameters: int | None
    calibration: tuple[str, Calibration] | None


@dataclass(frozen=True)
class _Planner:
    """Plans the trials of one sweep; results that several trials share are computed once.

    Each table is keyed by all inputs of its values. The tables live as long as the planner, so the next plan reads the
    data again. Trials that differ only in the seed share calibration and costs; trials with the same combination of
    components share the check that it can train, including its error.
    """

    sweep: SweepSpec
    code: UserCode | None
    calibrations: Mapping[str, float]
    """Calibrated noise multipliers of an earlier plan, by the keys of `multipliers`."""
    datasets: dict[DataSpec, tuple[DatasetDescription, Dataset, str]] = field(default_factory=dict)
    """Description of each data set, a few of its rows, and its digest."""
    tried: dict[tuple[DataSpec, StepSpec], DpsweepError | TriedModel] = field(default_factory=dict)
    """By data and combination: the error if it cannot train, otherwise notes about its model."""
    multipliers: dict[str, float] = field(default_factory=dict)
    """Calibrated noise multipliers, by digest of mechanism, epochs, target epsilon, delta and accountant."""
    unsolved: dict[str, DpsweepError] = field(default_factory=dict)
    """Errors of calibrations without a result, by the same keys."""
    costs: dict[tuple[Trace, float], tuple[PrivacyEstimate, ...]] = field(default_factory=dict)
    """Results of `worst_cases` by trace and delta."""

    def checked(self, point: GridPoint) -> _Checked:
        """Check the components of a trial. Raises the error for which it is refused."""
        trial = point.spec
        if self.code is None and is_import_path(trial.data.name):
            raise InvalidInput(
                f"data source {trial.data.name!r} is the user's own code, which is not run here, and noise, steps and "
                "epsilon depend on the size of the data; plan it without --no-code, or give the size to `dpsweep "
                "epsilon`"
            )
        if self.code is None and is_import_path(trial.clipping.name):
            raise InvalidInput(
                f"clipping method {trial.clipping.name!r} is the user's own code, which is not run here, and what it "
                "asks of every batch is part of the cost; plan it without --no-code"
            )
        with _named("data"):
            dataset, rows, digest = self._loaded(trial.data)
        require_one_task(self.sweep, [each for each, *_ in self.datasets.values()], dataset)
        is_tried = self.code is not None or not own_parts(trial)
        shard = self.sweep.reserved(trial).shard
        size = planned_population(trial, dataset)
        with _told_together() as told:
            with told():
                parameters = self._check_combination(trial, shard, rows) if is_tried else None
            with told():
                method = _clipping(trial, dataset, self.code or NO_CODE)
                mechanism = mechanism_of(trial, method, size, point.releases)
            _check_updates(trial, told)
        if shard is not None:
            require_divisible(trial, shard)
        before = (*planned_releases(trial.preprocessing), *point.releases)
        require_per_user(trial, [release.name for release in before])
        require_room(trial.attacks.exposure, rows, dataset.train_size)
        if trial.audit is not None and not trial.audit.leaves_out_rows and parameters is not None:
            require_directions(trial.audit.canaries, parameters)
        calibration = None
        if point.target_epsilon is not None:
            run = (trial.epochs, point.target_epsilon, trial.delta, self.sweep.privacy.accountant)
            calibration = fingerprint(mechanism, mechanism.filter, *run), Calibration(mechanism, *run)
        return _Checked(point, dataset, digest, method, mechanism, parameters, calibration)

    def calibrate(self, trials: Sequence[_Checked], solver: Solver) -> None:
        """Find the noise multiplier of every distinct target of these trials; reuses the ones of an earlier plan."""
        asked = dict(each.calibration for each in trials if each.calibration is not None)
        for key, each in asked.items():
            stored = self.calibrations.get(key)
            if stored is not None and each.is_solved_by(stored):
                self.multipliers[key] = stored
        missing = {key: each for key, each in asked.items() if key not in self.multipliers}
        found = zip(missing, solve_all(list(missing.values()), solver), strict=True)
        self.multipliers.update({key: sigma for key, sigma in found if sigma is not None})

    def planned(self, checked: _Checked) -> PlannedTrial:
        """Return the plan of a trial after `calibrate`. Raises the error for which it is refused."""
        point, trial, dataset = checked.point, checked.point.spec, checked.dataset
        method, mechanism = checked.method, checked.mechanism
        if checked.calibration is not None:
            key, search = checked.calibration
            sigma = self._multiplier(key, search)
            trial = with_noise(trial, method.example_budget, sigma, search.target_epsilon)
            method = make_clipping(trial.clipping, self.code or NO_CODE)
            mechanism = mechanism_of(trial, method, mechanism.dataset_size, point.releases)
        trial = with_chosen_norms(trial, mechanism, method)
        check_spec(trial, mechanism, method, dataset.public_size)
        _require_own_entries(trial, mechanism, point.releases)
        epochs = affordable_epochs(trial, mechanism, ())
        if epochs == 0:
            raise Unreachable("the budget does not pay for one epoch; raise it, or the noise multiplier")
        trace = mechanism.trace(epochs)
        spent = _once(self.costs, (trace, trial.delta), lambda: worst_cases(trace, trial.delta, self.sweep))
        _require_groups(trace, self.sweep.accounting.group_sizes)
        reasons = reasons_of(self.sweep, trial, dataset.reasons)
        claimed = [weakened(each, reasons) for each in spent]
        return PlannedTrial(
            point=replace(point, spec=trial),
            trace=trace,
            worst_case=claimed[0],
            others=tuple(claimed[1:]),
            shard_bytes=_shard_bytes(trial.norms, epochs, trace.steps, dataset.train_size),
            dataset=dataset,
            data_digest=checked.digest,
            reasons=reasons,
            parameters=checked.parameters,
        )

    def _loaded(self, data: DataSpec) -> tuple[DatasetDescription, Dataset, str]:
        if self.code is None:  # a sweep that is not trusted: nothing is written where it says
            data = replace(data, params={key: value for key, value in data.params.items() if key != "cache"})

        def load() -> tuple[DatasetDescription, Dataset, str]:
            dataset = load_dataset(data, self.code or NO_CODE)
            caps = self.sweep.privacy.max_records_per_user or ()
            return describe(dataset, caps), excerpt(dataset), dataset.digest()

        return _once(self.datasets, data, load)

    def _check_combination(self, trial: TrialSpec, shard: Shard | None, rows: Dataset) -> int:
        """Try preprocessing, model, loss and augmentation together on rows of the data. Return the number of trainable
        parameters.
        """
        combination = StepSpec(
            trial.model,
            trial.loss,
            trial.preprocessing,
            trial.augmentation,
            trial.execution.autocast,
            self.sweep.without_gradient,
            shard,
        )

        def attempt() -> DpsweepError | TriedModel:
            try:
                return check_feasible(combination, rows, self.code or NO_CODE)
            except DpsweepError as error:
                return without_locals(error)

        outcome = _once(self.tried, (trial.data, combination), attempt)
        if isinstance(outcome, DpsweepError):
            raise outcome.with_traceback(None)
        return outcome.parameters

    def _multiplier(self, key: str, search: Calibration) -> float:
        """Return the calibrated noise multiplier. Raises the error for which there is none, which is found once."""
        if key in self.unsolved:
            raise self.unsolved[key].with_traceback(None)
        try:
            return _once(self.multipliers, key, search.solve)
        except DpsweepError as error:
            self.unsolved[key] = without_locals(error)
            raise

    def told(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return notes on which parameters of the models train, and warnings about models and the use of a GPU."""
        models = [known for known in self.tried.values() if isinstance(known, TriedModel)]
        shares = dict.fromkeys(each for model in models for each in model.share)
        surprises = dict.fromkeys(each for model in models for each in model.surprises)
        if any(each.gpus for each in self.sweep.resources) and self.sweep.execution.micro_batch_size is None:
            surprises[_NOT_RECORDED] = None
        return tuple(shares), tuple(surprises)


_NOT_RECORDED: Final = (
    "execution.micro_batch_size is null: on a GPU, passes over micro-batches of one size start in one call; set a size "
    "that batches seldom exceed, with last_micro_batch: padded"
)


def _require_groups(trace: Trace, sizes: Sequence[int]) -> None:
    """Raises: UnsupportedMechanism for groups of a size that no bound covers, which would be found after training."""
    for size in sizes:
        if size > 1 and trace.is_private:
            rounds_or_chain(replace(trace, selection=None), size)


def _once(table: dict[K, V], key: K, compute: Callable[[], V]) -> V:
    if key not in table:
        table[key] = compute()
    return table[key]


Told = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def _told_together() -> Iterator[Told]:
    """Yield a context that notes an `InvalidInput`, and raise all that were noted as one, to be mended at once."""
    found = list[InvalidInput]()

    @contextlib.contextmanager
    def told() -> Iterator[None]:
        try:
            yield
        except InvalidInput as error:
            found.append(error)

    yield told
    if len(found) == 1:
        raise found[0]
    if found:
        raise InvalidInput("; ".join(dict.fromkeys(map(public_text, found)))) from found[0]


def _clipping(trial: TrialSpec, dataset: DatasetDescription, code: UserCode) -> ClippingMethod:
    """Return the clipping method; one of the user's own is rehearsed."""
    method = make_clipping(trial.clipping, code)
    if is_import_path(trial.clipping.name):
        layers = ("first layer", "last layer")
        batch_size = trial.sampling.expected_size(dataset.train_size)
        rehearse(method, PublicFacts(dataset.group_names, layers, dataset.train_size, batch_size))
    return method


def _check_updates(trial: TrialSpec, told: Told) -> None:
    """Build optimizer, learning rate schedule and averaging, to report wrong parameters early."""
    parameters = {"weight": nn.Parameter(torch.zeros(1))}
    with told():
        make_optimizer(trial.optimizer, parameters)
    with told():
        schedule = trial.learning_rate_schedule
        make_learning_rate_schedule(schedule, total_steps=1, steps_per_epoch=1)
        if (warm_up := schedule.params.get("warmup_epochs", 0.0)) > trial.epochs:
            raise InvalidInput(
                f"learning-rate schedule {schedule.name!r}: warmup_epochs is {warm_up:g}, but epochs is "
                f"{trial.epochs}; warm up for at most as many"
            )
    with told():
        if trial.averaging is not None:
            make_average(trial.averaging, parameters)


@contextlib.contextmanager
def _named(axis: str) -> Iterator[None]:
    """Turn a TypeError or ValueError of a component's parameters into `InvalidInput` that names the ``axis``."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{axis}: {public_text(error)}") from error


def _require_own_entries(trial: TrialSpec, mechanism: TrialMechanism, statistics: tuple[Release, ...]) -> None:
    """Refuse released statistics of epsilons if one example also decides when the norms of others are measured.

    Their noise covers that one example changes its own epsilon only (`dpsweep.accounting.jobs.release`).
    """
    if statistics and trial.norms.are_off:
        raise InvalidInput(
            f"release: {RELEASED} releases statistics of the epsilons of single examples, which are not computed with "
            f"{mechanism.words} (norms.refreshes_per_epoch: off); take release: none, or sampling poisson with "
            "independent noise"
        )
    if statistics and trial.norms.when_sampled and mechanism.sampling.displaced:
        raise InvalidInput(
            f"release: {RELEASED} covers what one example changes in its own epsilon, but with "
            f"{mechanism.sampling.words} and norms.refreshes_per_epoch: when_sampled it also changes which others are "
            "in a batch, and so their norms; take norms.refreshes_per_epoch: auto or a number, or sampling poisson "
            "without max_batch_size"
        )


def _shard_bytes(norms: NormSpec, epochs: int, steps: int, examples: int) -> int:
    """Return the bytes of stored norms: of all examples at every refresh, and of the ``exact_examples`` at every
    step.
    """
    everyone = norms.snapshots(epochs, steps) * (examples * _BYTES_PER_ROW + _BYTES_PER_SNAPSHOT)
    tracked = min(norms.exact_examples, examples)
    return everyone + (steps * (tracked * _BYTES_PER_ROW + _BYTES_PER_SNAPSHOT) if tracked else 0)


def _alike(sweep: SweepSpec, tuning: Plan) -> Plan:
    """Return the plan of a tuning; refused if the trials of a setting differ too much for a private selection
    (`why_unlike`).
    """
    reason = why_unlike(tuning.trials) if sweep.tune and sweep.tune.is_selection else None
    return replace(tuning, refusals=(*tuning.refusals, Refusal("all", reason))) if reason else tuning


def require_one_task(sweep: SweepSpec, known: Iterable[DatasetDescription], dataset: DatasetDescription) -> None:
    """Raise InvalidInput if other data of the sweep have another task, or if the sweep uses metrics that it lacks.

    known: descriptions of the sweep's data loaded so far.
    """
    other = next((each for each in known if each.task != dataset.task), None)
    if other is not None:
        raise InvalidInput(
            f"the data {other.name} are for {other.task}, but {dataset.name} for {dataset.task}, whose numbers cannot "
            "be compared; give each a sweep of its own"
        )
    require_defined(sweep.compare, dataset.name, len(dataset.class_names), dataset.task)
    if sweep.compare.worst_group == "user_accuracy" and dataset.test_users is None:
        raise InvalidInput(
            f"compare.worst_group is user_accuracy, but the test examples of {dataset.name} name no users; name them "
            "(data.user), or choose accuracy"
        )
    require_selectable(sweep.tune, dataset.task)
