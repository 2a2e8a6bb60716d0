"""Progress, counts and result of a training run.

Progress and result of a training run. All of it may be published. Clipping bounds come from configuration and noisy
answers, evaluations from held-out and public examples; nothing else here depends on the training data.

Exact counts and means over batches and groups of training examples as data, and their file. Private data. Imports no
torch, because commands that compare trials read them only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records import read_bytes, read_private
from dpsweep.workers.evaluation.scores import Evaluation
from dpsweep.workers.machine.device_use import DeviceUse


@dataclass(frozen=True)
class EpochRecord:
    """One completed epoch.

    epoch: counted from 0. step: number of steps done. noise_multiplier: of this epoch. sensitivity, bounds: sensitivity
    and clipping bounds (by group, layer or "all") of its last step; sensitivity is None without clipping.
    """

    epoch: int
    step: int
    noise_multiplier: float
    learning_rate_factor: float
    sensitivity: float | None
    bounds: dict[str, float]
    test: Evaluation
    public: Evaluation | None = None


@dataclass(frozen=True)
class Progress:
    """Progress of a running trial. epoch: number of completed epochs. trace: of the steps so far. device: what trains
    it, and how much of that is used. Ignored when two runs are compared."""

    epoch: int
    step: int
    total_steps: int
    noise_multiplier: float
    trace: Trace
    evaluation: Evaluation
    public_evaluation: Evaluation | None = None
    device: DeviceUse | None = field(default=None, compare=False)


@dataclass(frozen=True)
class TrainingResult:
    """A finished training run.

    stopped: ``completed`` after all planned epochs, ``budget`` if another epoch would have exceeded the budget.
    evaluation: the final model on held-out data. reasons: why the epsilons of the trial are estimates
    (`dpsweep.workers.training.trial_reasons`). references: scores of simple models that were trained beside it
    (`dpsweep.workers.evaluation.references`). example_shape, example_type: of one example as the data source stores it.
    output_axes: number of axes of what the model returns for one example. squared_errors: of the noise
    (`dpsweep.accounting.mechanism.correlated.squared_errors`).
    """

    key: str
    epochs: int
    steps: int
    steps_per_epoch: int
    stopped: Literal["completed", "budget"]
    train_size: int
    test_size: int
    group_names: tuple[str, ...]
    parameters: int
    initial_bound: float | None
    history: tuple[EpochRecord, ...]
    evaluation: Evaluation
    notes: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    references: dict[str, float] = field(default_factory=dict)
    example_shape: tuple[int, ...] = ()
    example_type: str = "float32"
    output_axes: int = 1
    squared_errors: tuple[float, float] | None = None

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")

    def to_json(self) -> bytes:
        return _RESULT.dump_json(self, indent=2)


_RESULT: TypeAdapter[TrainingResult] = TypeAdapter(TrainingResult)
_HISTORY: TypeAdapter[tuple[EpochRecord, ...]] = TypeAdapter(tuple[EpochRecord, ...])


def read_training_result(uri: str) -> TrainingResult:
    """Return the stored result.

    Raises: FileNotFoundError when there is none, DataCorruption when it is damaged.
    """
    try:
        return _RESULT.validate_json(read_bytes(uri))
    except ValidationError as error:
        raise DataCorruption(f"{uri} is damaged ({error.error_count()} errors); delete it and resume") from error


@dataclass
class GroupCourse:
    """Exact means over the training examples of a group, one per epoch; None if it had no finite loss and norm.

    `losses`, `norms`: loss, and gradient norm before clipping, both at the last refresh. `biases`: norm of the
    difference between clipped and unclipped gradient, by the clipping rule of the epoch's last step (paper D, Section
    4.2).
    """

    group: int
    examples: int
    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    biases: list[float | None] = field(default_factory=list)


@dataclass
class GroupDepartures:
    """Training examples of a group that have spent the whole budget of a filter. left: number after each epoch."""

    group: int
    examples: int
    left: list[int] = field(default_factory=list)


@dataclass
class Counters:
    """Exact counts and means over training batches and examples. Private data.

    departures: one for each group with examples, if the clipping method is a filter. courses: likewise, if norms are
    refreshed.
    """

    non_finite_gradients: int = 0
    empty_batches: int = 0
    departures: list[GroupDepartures] = field(default_factory=list)
    courses: list[GroupCourse] = field(default_factory=list)


COUNTERS: Final[TypeAdapter[Counters]] = TypeAdapter(Counters)


def read_counters(uri: str) -> Counters:
    """Return the stored counters of a trial; empty if there are none. Raises: DataCorruption when they are damaged."""
    try:
        return COUNTERS.validate_json(read_private(uri))
    except FileNotFoundError:
        return Counters()
    except ValidationError as error:
        raise DataCorruption(f"{uri} is damaged; restore it from a backup, or run the trial again") from error
