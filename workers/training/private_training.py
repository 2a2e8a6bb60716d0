"""A training loop of one's own around the steps of a trial: the same clipping, sampling, noise, trace and epsilons."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.calibration.planned_runs import Calibration
from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.accounting.individual import individual_epsilons, individual_reasons
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate, why_too_large
from dpsweep.accounting.mechanism.noise_strategies import INDEPENDENT
from dpsweep.accounting.mechanism.reasons import Reason, union, weakened
from dpsweep.accounting.mechanism.samplings import SAMPLINGS, Adjacency
from dpsweep.accounting.mechanism.schedules import reads_accuracies, split_schedule
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.pld import CertifiedEpsilon, epsilon_of_examples
from dpsweep.accounting.records.epsilon_files import Epsilons
from dpsweep.accounting.records.shards import NormSnapshot
from dpsweep.accounting.registry import build
from dpsweep.workers.clipping import CLIPPING, ClippingMethod, PublicFacts, make_clipping, own_clipping, rehearse
from dpsweep.workers.data import Dataset, Split, as_tensor, columns_of, groups_of, preparation_as_stored
from dpsweep.workers.dataset_description import NO_GROUPS
from dpsweep.workers.gradients.checks import precision_named
from dpsweep.workers.gradients.modes import RandomState, modes_of, set_modes
from dpsweep.workers.machine.checkpoint import fingerprint
from dpsweep.workers.machine.devices import rounding_of, torch_defaults
from dpsweep.workers.noise.noise_sources import make_noise_source
from dpsweep.workers.own_code.code_digests import code_behind
from dpsweep.workers.spec import (
    Component,
    DataSpec,
    ExecutionSpec,
    NoiseSpec,
    NormSpec,
    Refreshes,
    SamplingSpec,
    TrialSpec,
)
from dpsweep.workers.tasks.losses import Loss, build_loss, of_each_row
from dpsweep.workers.training.batch_gradients import TrainingRecipe
from dpsweep.workers.training.history import reasons_of_trial
from dpsweep.workers.training.norm_recorder import NormStores
from dpsweep.workers.training.optimizers import Optimizer, Parameters, make_optimizer
from dpsweep.workers.training.outside_steps import OutsideSteps
from dpsweep.workers.training.reproducible import explained, reproducible
from dpsweep.workers.training.torch_optimizers import TorchOptimizer
from dpsweep.workers.training.trainer import Trainer
from dpsweep.workers.training.trial_mechanism import mechanism_of, with_noise

_ADDRESS = re.compile(" at 0x[0-9a-f]+")
NamedPart = str | Mapping[str, Any]
"""A registered part as sweep files name it: ``"flat"``, or ``{"name": "flat", "bound": 0.5}``."""


@dataclass(frozen=True)
class Batch:
    """Training examples that were drawn for one step; private data, as is their number.

    step, epoch: counted from 0. rows: positions in the data, int64 [b], ascending.
    """

    step: int
    epoch: int
    rows: Tensor
    _inputs: Callable[[Tensor], tuple[Tensor, Tensor]] = field(repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def features(self) -> Tensor:
        """The examples [b, ...] as the model takes them, on its device."""
        return self._inputs(self.rows)[0]

    @property
    def labels(self) -> Tensor:
        """Their labels [b, ...], on the device of the model."""
        return self._inputs(self.rows)[1]


class PrivateTraining:
    """Trains a model with differential privacy, one batch at a time.

    >>> model = nn.Linear(2, 2)
    >>> engine = PrivateTraining(
    ...     model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.5),
    ...     (np.eye(2).repeat(50, axis=0), np.arange(2).repeat(50)), sampling=20,
    ...     epochs=2, target_epsilon=3.0, delta=1e-3,
    ... )
    >>> for batch in engine:
    ...     engine.step(batch)
    >>> engine.steps, 2.9 < engine.epsilon <= 3.0, engine.privacy().kind
    (10, True, 'guarantee')
    """

    @torch_defaults()
    def __init__(
        self,
        model: nn.Module,
        loss: Loss | nn.Module | NamedPart,
        optimizer: torch.optim.Optimizer | NamedPart,
        data: object,
        clipping: float | NamedPart | ClippingMethod = 1.0,
        noise: float | NamedPart = "constant",
        sampling: int | Mapping[str, Any] = 64,
        *,
        epochs: int,
        delta: float,
        target_epsilon: float | None = None,
        groups: npt.ArrayLike | None = None,
        group_names: Sequence[str] | None = None,
        norms: Refreshes = "auto",
        seed: int | None = None,
        adjacency: Adjacency | None = None,
        execution: ExecutionSpec | None = None,
    ) -> None:
        """Plan the run; nothing is released before the first step but a clipping bound that is a private median.

        model: trained where it is, on the device of its parameters; each step puts its modules in the modes that they
        have now.
        loss: of each example, [b] (``reduction="none"``; a loss module of torch is taken so by itself).
        optimizer: torch's, over the parameters of the model.
        data: features and labels as arrays, tensors or frames (a pair), or a map-style data set of torch, which is read
        once.
        clipping: the bound of flat clipping, any method of sweep files, or your own.
        noise: a noise multiplier, or a schedule (``"exponential:decay=0.1"``) that ``target_epsilon`` at ``delta``
        calibrates.
        sampling: the expected size of Poisson batches, or as in sweep files.
        groups: of each example, for methods and epsilons by group; indices into ``group_names``, which are public.
        norms: how often the norms of all examples are taken, as ``norms.refreshes_per_epoch``; ``off`` for no epsilons
        of examples.
        seed: research mode: reproducible, and no guarantee. By default noise and batches come from secret keys.
        execution: micro-batches and other settings of speed and memory.

        Raises: InvalidInput for parts that cannot be trained privately, Unreachable for a target that no noise meets.
        """
        _require(model, nn.Module, "model", "a module, such as nn.Linear(8, 2)")
        execution = ExecutionSpec(threads=torch.get_num_threads()) if execution is None else execution
        _require(execution, ExecutionSpec, "execution", "dpsweep.workers.spec.ExecutionSpec(...)")
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        execution = replace(execution, device=str(device))
        self._dataset = _dataset(data, groups, group_names)
        component, make = _clipping(clipping)
        spec = TrialSpec(
            key="loop",
            data=DataSpec("own"),
            model=Component(type(model).__qualname__),
            sampling=_sampling(sampling),
            clipping=component,
            noise=_noise(noise, target_epsilon),
            epochs=epochs,
            delta=delta,
            seed=0 if seed is None else seed,
            norms=NormSpec(norms),
            noise_source="os_entropy_secure" if seed is None else "seeded",
            execution=execution,
            adjacency=adjacency,
        ).checked()
        size = len(self._dataset.train)
        if large := why_too_large(delta, size):
            warnings.warn(large, stacklevel=3)  # the caller's line, outside `torch_defaults`
        self._spec = spec if target_epsilon is None else _calibrated(spec, make(spec.clipping), size, target_epsilon)
        method = make(self._spec.clipping)
        mechanism = mechanism_of(self._spec, method, size)
        if component.name not in CLIPPING:
            expected = self._spec.sampling.expected_size(size)
            rehearse(method, PublicFacts(self._dataset.group_names, ("first layer", "last layer"), size, expected))
        own = _as_written(model, loss, optimizer, clipping), rounding_of(device)
        self._run, self._whole = fingerprint(self._spec.to_json(), mechanism, *own), mechanism.trace(epochs)
        self._model, self._modes, self._norms = model, modes_of(model), _KeptNorms()
        self._pending: Batch | None = None
        self._process, self._noise_is_cut = os.getpid(), False
        self._device = device
        self._random_state: RandomState | None = None
        recipe = TrainingRecipe(
            method, lambda: model, lambda: _loss(loss), lambda values: _optimizer(optimizer, values)
        )
        with self._own_randomness():
            source = make_noise_source(self._spec.noise_source, self._spec.seed, device)
            self._trainer = Trainer(self._spec, mechanism, self._dataset, source, NormStores(self._norms), recipe)
            self._trainer.begin()
        self._outside = OutsideSteps.of(model)

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Settings and random state of torch as in a trial, and its errors; the caller's come back afterwards."""
        features = self._dataset.train.features.dtype
        with (
            reproducible(self._spec.execution, self._spec.seed),
            explained(self._spec.execution),
            precision_named(self._model, features),
        ):
            if self._random_state is not None:
                self._random_state.restore()
            try:
                yield
            finally:
                self._random_state = RandomState.of(self._device)

    def __len__(self) -> int:
        """Return the number of planned steps."""
        return self._trainer.total_steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that are left, each drawn when it is asked for; one that was not stepped comes again.

        Raises: InvalidInput for a batch that is passed over: choosing batches by their content costs privacy that
        nothing accounts for.
        """
        while self._pending is not None or self._trainer.may_continue():
            batch = self._pending = self._pending or self._drawn()
            yield batch
            if self._pending is batch:
                raise InvalidInput(
                    f"the batch of step {batch.step} was drawn and not given to step(); every batch that is drawn is "
                    "trained on, as the accounting assumes"
                )

    def _drawn(self) -> Batch:
        trainer = self._trainer
        self._rows = trainer.draw()
        self._outside.drawn()
        return Batch(trainer.step_count, trainer.epoch, self._rows.clone(), trainer.local.data.inputs)

    def step(self, batch: Batch) -> None:
        """Clip the gradients of the batch, add noise to their sum, and update the model.

        A step that is interrupted, as by Ctrl-C, comes again where nothing of it was shown; else it counts as taken.

        Raises: InvalidInput for anything but the batch that was drawn last, for a model that other code has changed
        meanwhile, and for models and losses whose rows are not independent; LackOfMemory.
        """
        if os.getpid() != self._process:
            raise InvalidInput(
                "an engine steps only in the process that made it: a fork of it has the same noise, and two runs with "
                "one noise reveal what it hides; make an engine in each process"
            )
        if self._pending is None or batch is not self._pending:
            raise InvalidInput("step() takes the batch that the engine drew last, once; iterate over the engine")
        self._require_whole_noise()
        self._outside.require_none()
        try:
            with self._own_randomness():
                set_modes(self._model, self._modes)
                self._trainer.step(self._rows)
        except BaseException:
            self._noise_is_cut = self.steps > batch.step and self._whole.strategy != INDEPENDENT
            raise
        finally:
            if self.steps > batch.step:
                self._pending = None
            self._outside.stepped()

    def _require_whole_noise(self) -> None:
        """Raise InvalidInput where later noise would follow noise that an interrupted step has made in part."""
        if self._noise_is_cut:
            raise InvalidInput(
                "a step was interrupted within its noise, which that of later steps would follow: load the last "
                "state_dict, or make another engine and account for both together"
            )

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self._trainer.step_count

    @property
    def non_finite_gradients(self) -> int:
        """Number of gradients of examples so far that were not finite, and weighed nothing; private data."""
        return self._trainer.counters.non_finite_gradients

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the sensitivity at the next step."""
        return self._trainer.noise_multiplier

    @property
    def trace(self) -> Trace:
        """The mechanisms of the steps so far, which accountants take; `dpsweep.accounting.write_trace` stores it.

        Before the planned end it notes this (`Trace.ended_by_results`), as results may decide to stop there.
        """
        return replace(self._trainer.trace(), ended_by_results=0 < self.steps < len(self))

    @property
    def epsilon(self) -> float:
        """Epsilon of the steps so far; `privacy` says what it claims."""
        return self.privacy().epsilon

    @cached_property
    def planned(self) -> PrivacyEstimate:
        """Return what the whole run costs, whatever happens in it."""
        return self._claim(self._whole)

    def privacy(self, group_size: int = 1) -> PrivacyEstimate:
        """Return the epsilon of the steps so far at the run's delta, for any ``group_size`` examples together.

        It is that of a run of this length: an estimate before the planned end, as results may decide to stop there.
        `planned` is the guarantee of a run that they do end.
        """
        return self._claim(self.trace, group_size)

    def _claim(self, trace: Trace, group_size: int = 1) -> PrivacyEstimate:
        return weakened(account(trace, self._spec.delta, group_size=group_size), self._reasons())

    def _reasons(self) -> tuple[Reason, ...]:
        return reasons_of_trial(self._spec, self._dataset.reasons)

    def epsilons(self, method: str = "pld") -> Epsilons:
        """Return the epsilon of every example from its own contributions so far, [n] in the order of the data; private
        data.

        None is above `epsilon`, which bounds what any example pays.
        Raises: InvalidInput before the first step, and with ``norms="off"``.
        """
        steps, contributions, last = self._recorded()
        trace, train = self.trace, self._dataset.train
        found = individual_epsilons(steps, contributions, trace, self._spec.delta, method)
        known = Epsilons(
            example_ids=train.example_ids.numpy(),
            groups=train.groups.numpy().astype(np.int32),
            upper=np.minimum(found.upper, self.epsilon),
            lower=found.lower,
            losses=np.asarray(last.losses, np.float32),
            delta=found.delta,
            method=found.method,
            kind=found.kind,
        )
        return weakened(known, union((self._reasons(), individual_reasons(trace))))

    def epsilon_of(self, examples: Sequence[int] | npt.NDArray[np.integer[Any]]) -> CertifiedEpsilon:
        """Return the epsilon of the given examples together, such as all records of one user, from their contributions
        so far.

        Raises: as `epsilons`.
        """
        steps, contributions, _ = self._recorded()
        rows = np.asarray(examples, np.int64)
        if rows.size == 0 or not 0 <= rows.min() <= rows.max() < len(contributions):
            raise InvalidInput(
                f"examples must be positions in the data, from 0 to {len(contributions) - 1}, at least one"
            )
        return epsilon_of_examples(self.trace, steps, contributions[rows], self._spec.delta)

    def _recorded(self) -> tuple[list[int], npt.NDArray[np.float64], NormSnapshot]:
        """Return the steps of the snapshots, contributions [n, snapshots], and the last snapshot."""
        found = {**self._norms.snapshots, **{each.step: each for each in self._trainer.norms_so_far()}}
        if not found:
            off = "norms is off, or no epsilon of single examples is proven for this sampling and noise"
            why = off if self.steps else "no step was taken yet"
            raise InvalidInput(f"there are no contributions of examples: {why}")
        ordered = [found[step] for step in sorted(found)]
        contributions = np.stack([np.asarray(each.contributions, np.float64) for each in ordered], axis=1)
        return [each.step for each in ordered], contributions, ordered[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `load_state_dict` needs to go on bit for bit: model, optimizer, keys of noise and
        batches.

        Private data, like the examples: whoever has it can take the noise away. Raises: InvalidInput between drawing a
        batch and its step, and for a run whose bits may differ.
        """
        if not self._spec.execution.deterministic:
            raise InvalidInput(
                "execution.deterministic is false: steps that come again would be rounded otherwise under the same "
                "noise, which then hides neither; make the engine with deterministic=True to go on from states"
            )
        self._require_whole_noise()
        if self._pending is not None:
            raise InvalidInput("a batch was drawn and not stepped; take the state after step()")
        with self._own_randomness():
            state = {"trainer": self._trainer.state(), "norms": self._norms.state()}
        return {"owner": self._owner(), **copy.deepcopy(state)}

    def _owner(self) -> str:
        """Return a digest of the run and of its data as they are now: arrays of the caller may change in place."""
        return fingerprint(self._run, self._dataset.digest())

    def __reduce__(self) -> NoReturn:
        """Refuse copy and pickle: two engines with one noise reveal what it hides, if one of them is changed."""
        raise InvalidInput(
            "an engine is not copied or pickled, as two would have one noise; make another one, or store state_dict()"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict` of the same run. Raises: InvalidInput for that of another one."""
        if not isinstance(state, Mapping) or state.get("owner") != self._owner():
            raise InvalidInput(
                "the state is that of another run: data, model, loss, optimizer and their code, lengths, privacy, "
                "execution (threads, device), torch and the processor must be those that it began with, as its noise "
                "must not cover other gradients too"
            )
        state, self._pending, self._noise_is_cut = copy.deepcopy(dict(state)), None, False
        with self._own_randomness():
            self._norms.restore(state["norms"])
            self._trainer.restore(state["trainer"])
        self._outside.stepped()


@dataclass
class _KeptNorms:
    """Snapshots of norms in memory, by their step: the only store of a loop of one's own."""

    snapshots: dict[int, NormSnapshot] = field(default_factory=dict)

    def write(self, snapshot: NormSnapshot) -> None:
        self.snapshots[snapshot.step] = snapshot

    def wait(self) -> None:
        return

    def complete(self) -> None:
        return

    def close(self) -> None:
        return

    def state(self) -> list[dict[str, Any]]:
        """Return the snapshots as values that ``torch.load`` reads without running code."""
        return [
            {name: value if name == "step" else torch.from_numpy(np.array(value)) for name, value in vars(each).items()}
            for each in self.snapshots.values()
        ]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        found = (
            NormSnapshot(**{name: value if name == "step" else value.numpy() for name, value in each.items()})
            for each in state
        )
        self.snapshots = {each.step: each for each in found}


def _as_written(model: nn.Module, loss: object, optimizer: object, clipping: object) -> tuple[str, list[str]]:
    """Return the parts of a run as they show themselves, without addresses in memory, and digests of their code."""
    kind = optimizer if isinstance(optimizer, Mapping) else type(optimizer)
    return _ADDRESS.sub("", f"{model!r}, {loss!r}, {kind}"), code_behind([*model.modules(), loss, optimizer, clipping])


def _require(given: object, kind: Any, name: str, wanted: str) -> None:
    if not isinstance(given, kind):
        raise InvalidInput(f"{name} is {given!r}; give {wanted}")


def _sampling(given: int | Mapping[str, Any]) -> SamplingSpec:
    if not isinstance(given, Mapping):
        return SamplingSpec("poisson", given)
    params, method = dict(given), given.get("method")
    params.pop("method", None)
    return build(dict.fromkeys(SAMPLINGS, SamplingSpec), cast(str, method), params, "sampling", method=method)


def _optimizer(given: torch.optim.Optimizer | NamedPart, parameters: Parameters) -> Optimizer:
    if not isinstance(given, torch.optim.Optimizer):
        _require(given, str | Mapping, "optimizer", "one of torch.optim over model.parameters(), or a name")
        return make_optimizer(_component(given, "optimizer"), parameters)
    return TorchOptimizer(parameters, given)


def _loss(given: Loss | nn.Module | NamedPart) -> Loss:
    if isinstance(given, str | Mapping):
        return build_loss(_component(given, "loss"))
    if isinstance(given, type) or not callable(given):
        raise InvalidInput(
            f"loss is {given!r}; give a function of outputs and labels, or a module, such as nn.MSELoss()"
        )
    if not isinstance(given, nn.Module) or not hasattr(given, "reduction"):
        return given
    return of_each_row(given)


def _component(given: NamedPart, what: str) -> Component:
    if isinstance(given, str):
        return Component(given)
    if not isinstance(given.get("name"), str):
        raise InvalidInput(f"{what} is {dict(given)!r}; give a name, or a mapping with the key name")
    return Component(given["name"], {key: value for key, value in given.items() if key != "name"})


Make = Callable[[Component], ClippingMethod]


def _clipping(given: float | NamedPart | ClippingMethod) -> tuple[Component, Make]:
    """Return the method as a specification names it, and what makes it of that."""
    if isinstance(given, str | Mapping):
        return _component(given, "clipping"), make_clipping
    if not isinstance(given, ClippingMethod):
        return Component("flat", {"bound": given}), make_clipping
    kind, own = type(given), f"{type(given).__module__}:{type(given).__qualname__}"
    name = next((name for name, registered in CLIPPING.items() if registered is kind), None)
    if name is None:
        return Component(own), lambda component: own_clipping(component.name, given)
    params = {each.name: getattr(given, each.name) for each in dataclasses.fields(given) if each.init}
    return Component(name, params), make_clipping


def _noise(given: float | NamedPart, target_epsilon: float | None) -> NoiseSpec:
    """Return the schedule and its initial noise multiplier, 1 if that is calibrated.

    Raises: InvalidInput unless either the multiplier or the target is given, and for a schedule that needs public data.
    """
    named, initial = Component("constant"), given if not isinstance(given, str | Mapping) else None
    if isinstance(given, str):
        name, params = split_schedule(given)
        named = Component(name, dict(params))
    elif isinstance(given, Mapping):
        found = _component(given, "noise")
        initial = found.params.get("noise_multiplier")
        named = Component(found.name, {key: each for key, each in found.params.items() if key != "noise_multiplier"})
    if (initial is None) == (target_epsilon is None):
        raise InvalidInput(
            f"noise is {given!r} and target_epsilon {target_epsilon!r}; give a noise multiplier, or a schedule that "
            "target_epsilon calibrates"
        )
    if reads_accuracies(named.name):
        raise InvalidInput("the validation schedule needs public data, which only trials of sweeps have")
    return NoiseSpec(1.0 if initial is None else initial, named)


def _calibrated(spec: TrialSpec, method: ClippingMethod, size: int, target_epsilon: float) -> TrialSpec:
    """Return the specification with the noise that meets the target. method: that of ``spec``."""
    uncalibrated = mechanism_of(spec, method, size)
    sigma = Calibration(uncalibrated, spec.epochs, target_epsilon, spec.delta, "auto").solve()
    return with_noise(spec, method.example_budget, sigma, target_epsilon)


def _dataset(data: object, groups: npt.ArrayLike | None, group_names: Sequence[str] | None) -> Dataset:
    """Return the data as the training split of a data set without others."""
    if isinstance(data, Dataset):
        return data
    features, labels = _columns(data)
    count, reasons = len(features), tuple[Reason, ...]()
    names: tuple[str, ...] = NO_GROUPS
    if len(labels) != count:
        raise InvalidInput(
            f"there are {count_of(count, 'example')} and {count_of(len(labels), 'label')}; give each example one"
        )
    places = torch.zeros(count, dtype=torch.int64)
    if groups is not None:
        (given,), names, reasons = groups_of([groups], group_names)
        places = torch.from_numpy(given.astype(np.int64))
        if not 0 <= int(places.min()) <= int(places.max()) < len(names):
            raise InvalidInput(f"groups must be indices of the {len(names)} group_names, from 0 to {len(names) - 1}")
    train = Split(features, labels, places, torch.arange(count))
    nobody = train.select(np.empty(0, dtype=np.int64))
    kept = preparation_as_stored(features)
    return Dataset("own", train, nobody, None, names, ("output",), kept, reasons=reasons)


def _columns(data: object) -> tuple[Tensor, Tensor]:
    features, labels, *others = columns_of(data)
    if others:
        raise InvalidInput(
            f"data has {2 + len(others)} columns, of which an engine would read two; give features and labels, and the "
            "group of each example as groups="
        )
    x, y = as_tensor(features, "features"), as_tensor(labels, "labels")
    return x.float() if x.is_floating_point() else x, y.float() if y.is_floating_point() else y.long()
