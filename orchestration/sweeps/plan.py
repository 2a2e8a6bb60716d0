"""What a sweep would do, without training: every trial with its noise, steps, worst-case cost and bytes.

The planner builds the `Trace` that the trainer will write, through the same functions, so what it calibrates is
what will be accounted. A trial that cannot run gets the reason instead; nothing starts while one is refused.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from pydantic import TypeAdapter
from torch import nn

from accounting.accountants import account
from accounting.calibration import calibrate_noise_multiplier
from accounting.errors import DpsweepError, InvalidInput, Unreachable, private_text, public_text, without_locals
from accounting.estimates import PrivacyEstimate
from accounting.mechanism import Release, Trace
from accounting.registry import build
from accounting.release import ReleaseSpec
from accounting.schedules import with_initial
from orchestration.records.failures import shown
from orchestration.sweeps.grid import GridPoint, grid
from orchestration.sweeps.schema import SweepSpec
from workers import clipping
from workers.data import Dataset, DatasetDescription, describe, load_dataset
from workers.feasibility import Combination, check_feasible, excerpt
from workers.imports import NO_CODE, UserCode, is_import_path
from workers.mechanism import TrialMechanism, affordable_epochs
from workers.optimizers import make_average, make_learning_rate_schedule, make_optimizer
from workers.spec import Component, DataSpec, NormSpec, TrialSpec
from workers.training import check_spec

_BYTES_PER_ROW = 8 + 4 + 4 + 4 + 4
"""example_id int64; group int32; norm, contribution and loss float32."""
_BYTES_PER_SNAPSHOT = 8192
"""A folder, and what a file takes beside its rows."""
_DATA = TypeAdapter(DataSpec)
_COMBINATION = TypeAdapter(Combination)


@dataclass(frozen=True)
class Costs:
    """Worst cases of one run: by the sweep's accountant, by further ones, and for groups of every size asked for."""

    worst_case: PrivacyEstimate
    others: tuple[PrivacyEstimate, ...]
    groups: tuple[PrivacyEstimate, ...]


@dataclass(frozen=True)
class PlannedTrial:
    """A trial that can run. The spec of ``point`` has its calibrated noise multiplier.

    trace: what the trainer will have run at most; releases: what is released besides training, part of the trace.
    costs: the worst cases of the trace. shard_bytes: what the norm shards take before compression.
    """

    point: GridPoint
    trace: Trace
    costs: Costs
    releases: tuple[Release, ...]
    shard_bytes: int
    dataset: DatasetDescription

    @property
    def key(self) -> str:
        return self.point.key

    @property
    def spec(self) -> TrialSpec:
        return self.point.spec


@dataclass(frozen=True)
class Refusal:
    """A trial that cannot run, and why.

    hidden: text and traceback that the reason leaves out because they may quote the data; for the private folder.
    """

    key: str
    reason: str
    hidden: str | None = None


@dataclass(frozen=True)
class Plan:
    trials: tuple[PlannedTrial, ...]
    refusals: tuple[Refusal, ...]
    warnings: tuple[str, ...]

    def reasons(self) -> list[str]:
        """Each distinct reason for a refusal on a line of its own, with the trials that it refuses."""
        keys: dict[str, list[str]] = {}
        for refusal in self.refusals:
            keys.setdefault(refusal.reason, []).append(refusal.key)
        return [f"{' '.join(reason.split())} (trials: {', '.join(refused)})" for reason, refused in keys.items()]


def plan_sweep(sweep: SweepSpec, code: UserCode | None = NO_CODE) -> Plan:
    """Plan every trial. Reads the data (for its size and groups) and tries each model on a few rows; trains nothing.

    code: what of the user's own may be imported. None leaves the user's code alone: a model of theirs is not tried, as
    a warning says, and trials on a data source of theirs are refused, because nothing is known without its size.
    """
    _misfit.cache_clear()  # a file that a refusal named may have been mended since
    release = release_spec(sweep.release)
    planned: list[PlannedTrial] = []
    refused: list[Refusal] = []
    for point in grid(sweep):
        try:
            planned.append(_plan_trial(point, sweep, release, code))
        except (Exception, SystemExit) as error:  # user code raises what it likes, and its text may quote the data
            refused.append(Refusal(point.key, shown(error, sweep.disclosure), private_text(error)))
    untried = _untried(planned) if code is None else ()
    return Plan(tuple(planned), tuple(refused), (*_warnings(planned), *untried))


def release_spec(release: Component) -> ReleaseSpec | None:
    """How statistics of the training examples' epsilons are released; None where none are, or exact ones."""
    modes: Mapping[str, Callable[..., ReleaseSpec | None]] = {
        "none": lambda: None,
        "private": ReleaseSpec,
        "raw": lambda: None,
    }
    return build(modes, release.name, release.params, "release")


def _plan_trial(point: GridPoint, sweep: SweepSpec, release: ReleaseSpec | None, code: UserCode | None) -> PlannedTrial:
    trial = point.spec
    if code is None and is_import_path(trial.data.name):
        raise InvalidInput(
            f"data source {trial.data.name!r} is the user's own code, which is not run here, and noise, steps and "
            "epsilon depend on the size of the data; plan it without --no-code, or give the size to `dpsweep epsilon`"
        )
    with _named("data"):
        dataset, _ = _loaded(_DATA.dump_json(trial.data), code or NO_CODE)
    if code is not None or not is_import_path(trial.model.name):
        _check_combination(trial, code or NO_CODE)
    _check_components(trial)
    after_training = release.releases() if release and trial.is_private else ()
    mechanism = TrialMechanism.of(trial, dataset.train_size, after_training)
    if point.target_epsilon is not None:
        sigma = _calibrated(mechanism, trial.epochs, point.target_epsilon, trial.delta, sweep.privacy.accountant)
        trial = replace(trial, noise=replace(trial.noise, initial_noise_multiplier=sigma))
        mechanism = _with_noise(mechanism, sigma)
    check_spec(trial, mechanism, dataset.public_size)
    epochs = affordable_epochs(trial, mechanism, ())
    if epochs == 0:
        raise Unreachable("the budget does not pay for one epoch; raise it, or the noise multiplier")
    trace = mechanism.trace(epochs)
    return PlannedTrial(
        point=replace(point, spec=trial),
        trace=trace,
        costs=costs(trace, trial.delta, sweep),
        releases=after_training,
        shard_bytes=_shard_bytes(trial.norms, epochs, trace.steps, dataset.train_size),
        dataset=dataset,
    )


def _with_noise(mechanism: TrialMechanism, initial_noise_multiplier: float) -> TrialMechanism:
    return replace(mechanism, schedule=with_initial(mechanism.schedule, initial_noise_multiplier))


@functools.cache
def _calibrated(mechanism: TrialMechanism, epochs: int, target_epsilon: float, delta: float, accountant: str) -> float:
    """Seeds share their mechanism, so each distinct one is calibrated once."""
    return calibrate_noise_multiplier(
        lambda sigma: _with_noise(mechanism, sigma).trace(epochs), target_epsilon, delta, accountant
    )


def costs(trace: Trace, delta: float, sweep: SweepSpec) -> Costs:
    """What a run costs in the worst case, by everything that the sweep asks for.

    Groups of more than one are accounted by privacy loss distributions: no other accountant covers sampled groups.
    """
    accountant, sizes = sweep.privacy.accountant, sweep.accounting.group_sizes
    single = _account(trace, delta, accountant)
    return Costs(
        worst_case=single,
        others=tuple(_account(trace, delta, other) for other in sweep.accounting.also),
        groups=tuple(_account(trace, delta, "pld", size) if size > 1 else single for size in sizes),
    )


@functools.cache
def _account(trace: Trace, delta: float, accountant: str, group_size: int = 1) -> PrivacyEstimate:
    """Once for each distinct mechanism: seeds share theirs, and so do the plan and the result."""
    return account(trace, delta, accountant, group_size)


@functools.cache
def _loaded(data: bytes, code: UserCode) -> tuple[DatasetDescription, Dataset]:
    """What a data set is, and a few of its rows."""
    dataset = load_dataset(_DATA.validate_json(data), code)
    return describe(dataset), excerpt(dataset)


def _check_combination(trial: TrialSpec, code: UserCode) -> None:
    """Try data, preprocessing, model, loss and augmentation together."""
    combination = Combination(trial.model, trial.loss, trial.preprocessing, trial.augmentation)
    reason = _misfit(_DATA.dump_json(trial.data), _COMBINATION.dump_json(combination), code)
    if reason is not None:
        raise reason.with_traceback(None)


def _check_components(trial: TrialSpec) -> None:
    """Build every other component once, so that a wrong name or parameter is found before anything starts."""
    parameters = {"weight": nn.Parameter(torch.zeros(1))}
    clipping.make_clipping(trial.clipping)
    make_optimizer(trial.optimizer, parameters)
    make_learning_rate_schedule(trial.learning_rate_schedule, total_steps=1, steps_per_epoch=1)
    if trial.averaging is not None:
        make_average(trial.averaging, parameters)


@functools.cache
def _misfit(data: bytes, combination: bytes, code: UserCode) -> DpsweepError | None:
    """Why no trial of this combination can take a step; its trials share the answer, also a refusal."""
    _, rows = _loaded(data, code)
    try:
        check_feasible(_COMBINATION.validate_json(combination), rows, code)
    except DpsweepError as error:
        return without_locals(error)
    return None


@contextlib.contextmanager
def _named(axis: str) -> Iterator[None]:
    """A parameter of the wrong type fails deep inside a component; say which one it was."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{axis}: {public_text(error)}") from error


def _shard_bytes(norms: NormSpec, epochs: int, steps: int, examples: int) -> int:
    """What the norms of every example take, and those of the examples that are tracked at every step."""
    often = norms.refreshes_per_epoch
    snapshots = steps if often == "every_step" else min(steps, math.ceil(often * epochs))
    everyone = snapshots * (examples * _BYTES_PER_ROW + _BYTES_PER_SNAPSHOT)
    tracked = min(norms.exact_examples, examples)
    return everyone + (steps * (tracked * _BYTES_PER_ROW + _BYTES_PER_SNAPSHOT) if tracked else 0)


def _warnings(trials: list[PlannedTrial]) -> tuple[str, ...]:
    worst = {
        trial.dataset.train_size: trial.spec.delta
        for trial in trials
        if trial.spec.is_private and trial.spec.delta >= 1.0 / trial.dataset.train_size
    }
    return tuple(
        f"delta is {delta:g}, but with {size} training examples it should be well below 1/n = {1.0 / size:.2g}: "
        "a mechanism that publishes a random example whole would pass"
        for size, delta in worst.items()
    )


def _untried(trials: list[PlannedTrial]) -> tuple[str, ...]:
    names = sorted({trial.spec.model.name for trial in trials if is_import_path(trial.spec.model.name)})
    return tuple(
        f"model {name!r} is the user's own code, which is not run here: it was not tried on rows of the data, nor the "
        "preprocessing, loss and augmentation that it is combined with"
        for name in names
    )
