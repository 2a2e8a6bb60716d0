"""One differentially private training run, step by step.

Each step draws a batch, lets the clipping method decide on a rule from (noisy answers about) the whole batch, sums the
clipped gradients, adds noise of std sigma * S to the sum, divides by the public expected batch size and hands the
result to the optimiser. A batch that happens to be empty does all of this too: it adds noise and it counts.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from accounting.errors import InvalidInput, require_finite
from accounting.mechanism import Trace
from accounting.records.layout import TrialFiles
from accounting.records.shards import NormShardWriter
from workers.augmentation import make_augmentation
from workers.clipping import ClippingState, ClipRule, Examples, Setting, make_clipping, released_bound
from workers.clipping.protocol import NORM_ERROR
from workers.data.base import Dataset
from workers.evaluation import evaluate
from workers.gradients import GradientEngine, ShapePlanner, TimingPlanner, WeightedSum
from workers.gradients.modes import modes_of, set_modes
from workers.gradients.randomness import RandomState
from workers.history import EpochRecord
from workers.imports import NO_CODE, UserCode
from workers.losses import build_loss
from workers.mechanism import TrialMechanism, affordable_epochs
from workers.models import build_model
from workers.noise import NoiseSource, derive_seed, seed_torch, start_generator
from workers.optimizers import make_average, make_learning_rate_schedule, make_optimizer
from workers.recording import Interval, NormRecorder, TrainingData, choose_rows, is_due
from workers.sampling import make_row_draws, make_sampler
from workers.spec import TrialSpec

_RECORDS: TypeAdapter[tuple[EpochRecord, ...]] = TypeAdapter(tuple[EpochRecord, ...])


@dataclass
class Counters:
    """Raw facts about training batches: private."""

    non_finite_gradients: int = 0
    empty_batches: int = 0


class Trainer:
    """The state of a run and its single steps. `state` and `restore` make it continue bit for bit."""

    def __init__(
        self,
        spec: TrialSpec,
        mechanism: TrialMechanism,
        dataset: Dataset,
        noise: NoiseSource,
        files: TrialFiles,
        code: UserCode = NO_CODE,
    ) -> None:
        device = choose_device(spec.execution.device)
        self._spec, self._dataset, self._noise = spec, dataset, noise
        self._method = make_clipping(spec.clipping)
        check_spec(spec, mechanism, 0 if dataset.public is None else len(dataset.public))
        self.total_steps = spec.epochs * mechanism.steps_per_epoch
        self._paid_epochs = 0

        self._loss = build_loss(spec.loss)
        self._model = build_model(spec.model, dataset, spec.seed, code).to(device)
        self._modes = modes_of(self._model)
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._augmentation = make_augmentation(spec.augmentation) if spec.augmentation else None
        self._augmentation_rng = torch.Generator()
        start_generator(self._augmentation_rng, spec.noise_source, spec.seed, "augmentation")
        self._engine = self._make_engine(self._augmentation.multiplicity if self._augmentation else 1)
        self._optimizer = make_optimizer(spec.optimizer, self._parameters)
        self._learning_rate = make_learning_rate_schedule(
            spec.learning_rate_schedule, self.total_steps, mechanism.steps_per_epoch
        )
        self._average = make_average(spec.averaging, self._parameters) if spec.averaging else None
        rows = make_row_draws(spec.noise_source, spec.seed)
        self._sampler = make_sampler(spec.sampling, len(dataset.train), rows)
        seed_torch(spec.noise_source, spec.seed, "model")

        self._data = TrainingData(dataset, device)
        self.mechanism = mechanism
        if not self._method.keeps_to_contributions and self._engine.draws(*self._data.inputs(torch.arange(1))):
            self.mechanism = replace(mechanism, contributions="estimate")
        self._everyone, self._exact = self._make_recorders(files)
        self._setting = Setting(
            dataset.group_names, self._engine.layer_names, len(dataset.train), spec.sampling.batch_size
        )
        self._clipping = ClippingState(bound=1.0)
        self._rule = ClipRule(float("inf"), lambda examples: torch.ones_like(examples.norms))
        self._interval: Interval | None = None
        self.step_count = 0
        self.initial_bound: float | None = None
        self.history: tuple[EpochRecord, ...] = ()
        self.counters = Counters()

    def _make_engine(self, multiplicity: int) -> GradientEngine:
        execution = self._spec.execution
        return GradientEngine(
            self._model,
            self._loss,
            micro_batch_size=execution.micro_batch_size,
            multiplicity=multiplicity,
            layerwise=self._method.layerwise,
            planner=ShapePlanner() if execution.deterministic else TimingPlanner(),
            autocast=torch.bfloat16 if execution.autocast else None,
            compile=execution.compile,
        )

    def _make_recorders(self, files: TrialFiles) -> tuple[NormRecorder, NormRecorder | None]:
        norms, population = self._spec.norms, len(self._data)
        engine = self._engine if self._augmentation is None else self._make_engine(multiplicity=1)
        everyone = NormRecorder(
            self._data, torch.arange(population), engine, NormShardWriter(files.norms, norms.rows_per_part)
        )
        if norms.exact_examples == 0:
            return everyone, None
        rows = choose_rows(population, norms.exact_examples, derive_seed(self._spec.seed, "exact examples"))
        return everyone, NormRecorder(self._data, rows, engine, NormShardWriter(files.exact_norms, norms.rows_per_part))

    def begin(self) -> None:
        """Start a new run: release the initial bound where it is a median (the cost is among the releases).

        Raises: InvalidInput when the budget does not pay for one epoch.
        """
        if not self.may_continue():
            raise InvalidInput(
                f"the budget {self._spec.budget} does not pay for one epoch at noise multiplier "
                f"{self.noise_multiplier:.6g}; raise the budget or the noise"
            )
        bound = released_bound(
            self._method.bound,
            lambda: self._everyone.measure().examples.norms,
            lambda std: float(self._noise.normal((1,), std)),
        )
        self.initial_bound = bound if self._spec.clipping.name != "none" else None
        self._clipping = self._method.start(bound, self._setting)

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return self.step_count // self.mechanism.steps_per_epoch

    @property
    def at_epoch_end(self) -> bool:
        return self.step_count % self.mechanism.steps_per_epoch == 0

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters.values())

    @property
    def public_accuracies(self) -> tuple[float, ...]:
        return tuple(record.public.accuracy for record in self.history if record.public is not None)

    @property
    def noise_multiplier(self) -> float:
        """sigma of the present epoch."""
        return self.mechanism.schedule.noise_multiplier(self.epoch, self.public_accuracies)

    @property
    def _refresh_is_due(self) -> bool:
        refreshes = self._spec.norms.refreshes_per_epoch
        return refreshes == "every_step" or is_due(self.step_count, refreshes, self.mechanism.steps_per_epoch)

    def trace(self) -> Trace:
        """What was run so far."""
        epochs = -(-self.step_count // self.mechanism.steps_per_epoch)
        return self.mechanism.trace(epochs, self.public_accuracies).until(self.step_count)

    def may_continue(self) -> bool:
        """Whether another step is planned and paid for. Only at the end of the paid epochs is the budget asked again,
        because a validation-driven schedule may by then have turned out cheaper than its plan."""
        if self.epoch >= self._paid_epochs:
            self._paid_epochs = affordable_epochs(self._spec, self.mechanism, self.public_accuracies)
        return self.epoch < self._paid_epochs

    def step(self) -> None:
        """One step: snapshot where one is due, clip, add noise, update."""
        sigma, step, before = self.noise_multiplier, self.step_count, RandomState.of(self._data.device)
        if self._refresh_is_due:
            self.store_norms()
            measured = self._everyone.measure()
            self._clipping = self._method.refresh(self._clipping, measured.examples)
            self._interval = Interval.from_step(step, measured, sigma)

        rows = torch.from_numpy(self._sampler.next_batch()).to(self._data.device)
        clipped = self._clipped_sum(rows)
        self.counters.non_finite_gradients += clipped.non_finite
        self.counters.empty_batches += int(len(rows) == 0)

        self._interval = self._interval.extended(self._rule) if self._interval else None
        if self._exact is not None:
            self._exact.write(Interval.from_step(step, self._exact.measure(), sigma).extended(self._rule))
        self._update(clipped.gradients, sigma)
        self.step_count += 1
        self._look_again(before)

    def _look_again(self, before: RandomState) -> None:
        """A model may begin to draw, or change modes, at any step: then norms may not be those of what was summed."""
        repeatable = before.is_current() and modes_of(self._model) == self._modes
        if not repeatable and not self._method.keeps_to_contributions:
            self.mechanism = replace(self.mechanism, contributions="estimate")

    def store_norms(self) -> None:
        """Store the last snapshot of all examples: its steps end here, where norms are taken anew or training ends."""
        if self._interval is not None:
            self._everyone.write(self._interval)

    def _batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self._data.inputs(rows)
        if self._augmentation is None:
            return x, y
        return self._augmentation(x, self._augmentation_rng), y.repeat_interleave(self._augmentation.multiplicity)

    def _clipped_sum(self, rows: Tensor) -> WeightedSum:
        """Decide on the rule of this step and apply it to the batch.

        Methods without a query decide before they see the batch, which saves a pass where there are micro-batches.
        """
        x, y = self._batch(rows)
        if self._method.query is None:
            self._decide(torch.zeros(0, dtype=torch.float64))
            return self._engine.weighted_sum_rowwise(
                x, y, lambda norms, part: self._rule.weights(self._data.examples(rows[part], norms))
            )
        return self._engine.weighted_sum(x, y, lambda norms: self._weigh(self._data.examples(rows, norms)))

    def _weigh(self, batch: Examples) -> Tensor:
        """Answer the method's query with noise, and decide: only the noisy answer leaves the batch."""
        query = self._method.query
        assert query is not None, "methods without a query decide before the batch"
        answer = self._method.answer(self._clipping, batch, self._setting).cpu()
        self._decide(self._noise.added(answer, query.noise_std))
        return self._rule.weights(batch)

    def _decide(self, noisy_answer: Tensor) -> None:
        self._rule = self._method.decide(self._clipping, noisy_answer, self._setting)
        self._clipping = self._method.advance(self._clipping, noisy_answer, self._setting)

    def _update(self, gradients: Mapping[str, Tensor], sigma: float) -> None:
        """Noise of std sigma S, rounded up by as much as a clipped gradient may exceed S through rounding."""
        std = sigma * self._rule.sensitivity * (1.0 + NORM_ERROR) if sigma > 0.0 else 0.0
        batch_size = self._setting.batch_size
        noisy = {name: self._noise.added(gradient, std) / batch_size for name, gradient in gradients.items()}
        self._optimizer.step(noisy, self._learning_rate(self.step_count), std / batch_size)
        if self._average is not None:
            self._average.update(self._parameters)

    def end_epoch(self) -> EpochRecord:
        """Evaluate on held-out and public data, and note what is public about the epoch just completed."""
        shown, step = self.released_model(), self.step_count
        epoch = self.epoch - 1
        public = self._dataset.public
        record = EpochRecord(
            epoch=epoch,
            step=step,
            noise_multiplier=self.mechanism.schedule.noise_multiplier(epoch, self.public_accuracies),
            learning_rate_factor=self._learning_rate(step - 1),
            sensitivity=self._rule.sensitivity if self.initial_bound is not None else None,
            bounds=dict(self._rule.bounds),
            test=evaluate(shown, self._dataset.test, self._dataset, self._loss),
            public=None if public is None else evaluate(shown, public, self._dataset, self._loss),
        )
        self.history = (*self.history, record)
        return record

    def released_model(self) -> nn.Module:
        """The model to evaluate and keep: with averaged parameters where averaging is on."""
        if self._average is None:
            return self._model
        activations = [value for module in self._model.modules() for value in vars(module).values()]
        kept = {id(value): value.detach() for value in activations if isinstance(value, Tensor) and not value.is_leaf}
        shown = copy.deepcopy(self._model, kept)  # what a forward pass left on a module cannot be copied
        shown.load_state_dict({**shown.state_dict(), **self._average.values})
        return shown

    def state(self) -> dict[str, Any]:
        """Everything that a restored run needs to repeat the bits of this one; private."""
        random = RandomState.of(self._data.device)
        return {
            "step_count": self.step_count,
            "initial_bound": self.initial_bound,
            "contributions": self.mechanism.contributions,
            "model": self._model.state_dict(),
            "modes": modes_of(self._model),
            "optimizer": self._optimizer.state(),
            "average": None if self._average is None else self._average.state(),
            "sampler": self._sampler.state(),
            "noise": self._noise.state(),
            "augmentation": self._augmentation_rng.get_state(),
            "torch": random.cpu,
            "cuda": random.cuda,
            "clipping": asdict(self._clipping),
            "interval": None if self._interval is None else self._interval.state(),
            "counters": asdict(self.counters),
            "history": [asdict(record) for record in self.history],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        missing = sorted(self.state().keys() - state.keys())
        if missing:
            raise InvalidInput(
                f"the checkpoint lacks {', '.join(missing)}: another version of dpsweep wrote it. Finish the trial "
                "with that one, or delete the trial's folder to start anew"
            )
        self.step_count, self.initial_bound = state["step_count"], state["initial_bound"]
        self.mechanism = replace(self.mechanism, contributions=state["contributions"])
        self._model.load_state_dict(state["model"])
        set_modes(self._model, state["modes"])
        self._optimizer.restore(state["optimizer"])
        if self._average is not None:
            self._average.restore(state["average"])
        self._sampler.restore(state["sampler"])
        self._noise.restore(state["noise"])
        self._augmentation_rng.set_state(state["augmentation"])
        RandomState(self._data.device, state["torch"], state["cuda"]).restore()
        self._clipping = ClippingState(**state["clipping"])
        if state["interval"] is not None:
            self._interval = Interval.restored(state["interval"], self._data.device)
        self.counters = Counters(**state["counters"])
        self.history = _RECORDS.validate_python(tuple(state["history"]))


def check_spec(spec: TrialSpec, mechanism: TrialMechanism, public_size: int) -> None:
    """Refuse what cannot be trained privately, or at all, before anything is written.

    public_size: how many public examples the data set has.
    """
    require_finite("epochs", spec.epochs, at_least=1, at_most=10**7)
    require_finite("delta", spec.delta, above=0.0, below=1.0)
    require_finite("norms.rows_per_part", spec.norms.rows_per_part, at_least=1)
    if spec.execution.device != "auto":
        _parse_device(spec.execution.device)
    if spec.norms.refreshes_per_epoch != "every_step":
        require_finite("norms.refreshes_per_epoch", spec.norms.refreshes_per_epoch, above=0.0)
    require_finite("norms.exact_examples", spec.norms.exact_examples, at_least=0)
    require_finite("execution.checkpoint_every_epochs", spec.execution.checkpoint_every_epochs, at_least=1e-6)
    highest = max(segment.noise_multiplier for segment in mechanism.trace(spec.epochs).segments)
    if highest > 0.0 and spec.clipping.name == "none":
        raise InvalidInput(
            f"the noise multiplier reaches {highest:g}, but without clipping the sensitivity is infinite; "
            "choose a clipping method, or constant noise of multiplier 0"
        )
    if spec.noise.schedule.name == "validation" and not public_size:
        raise InvalidInput("a validation-driven schedule needs public data; set data.public_fraction above 0")


def choose_device(name: str) -> torch.device:
    """The device of that name, if this machine has it; ``auto`` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device, found = _parse_device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise InvalidInput(
            f"device is {name!r}, but torch finds {found} CUDA devices here; use auto or cpu, or give trials a GPU"
        )
    return device


def _parse_device(name: str) -> torch.device:
    """A device by torch's own name for it, whether this machine has it or not."""
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            return device
    raise InvalidInput(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")
