"""Progress and result of a training run. All of it may be published.

Clipping bounds come from configuration and noisy answers, evaluations from held-out and public examples; nothing else
here depends on the training data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.mechanism.reasons import Reason, union
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.files import read_bytes
from dpsweep.workers.evaluation.scores import Evaluation
from dpsweep.workers.machine.memory import DeviceUse
from dpsweep.workers.own_code.imports import is_import_path
from dpsweep.workers.spec import TrialSpec


@dataclass(frozen=True)
class EpochRecord:
    """One completed epoch.

    epoch: counted from 0.
    step: number of steps done.
    noise_multiplier: of this epoch.
    sensitivity, bounds: sensitivity and clipping bounds (by group, layer or "all") of its last step; sensitivity is
    None without clipping.
    """

    epoch: NonNegativeInt
    step: NonNegativeInt
    noise_multiplier: float
    sensitivity: float | None
    bounds: dict[str, float]
    test: Evaluation
    public: Evaluation | None = None


@dataclass(frozen=True)
class Progress:
    """Progress of a running trial.

    epoch: number of completed epochs.
    trace: of the steps so far.
    device: what trains it, and how much of that is used.
    earlier: with the first report of a start, the epochs before it.
    Two runs are compared without these two.
    """

    epoch: int
    step: int
    total_steps: int
    noise_multiplier: float
    trace: Trace
    evaluation: Evaluation
    public_evaluation: Evaluation | None = None
    device: DeviceUse | None = field(default=None, compare=False)
    earlier: tuple[EpochRecord, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class TrainingResult:
    """A finished training run.

    stopped: ``completed`` after all planned epochs, ``budget`` if one more would have exceeded the budget.
    evaluation: the final model on held-out data.
    reasons: why the epsilons of the trial are estimates (`reasons_of_trial`).
    references: scores of simple models that were trained beside it (`dpsweep.workers.evaluation.references`).
    example_shape, example_type: of one example as the data source stores it.
    output_axes: number of axes of the model's output for one example.
    squared_errors: of the noise (`dpsweep.accounting.mechanism.correlated.squared_errors`).
    example_row, example_prediction: made of declarations (`dpsweep.workers.trials.predicted_table.example_of`); None
    where the model reads no rows of a table.
    """

    key: str
    epochs: NonNegativeInt
    steps: NonNegativeInt
    steps_per_epoch: PositiveInt
    stopped: Literal["completed", "budget"]
    train_size: PositiveInt
    test_size: PositiveInt
    group_names: tuple[str, ...]
    parameters: PositiveInt
    initial_bound: float | None
    history: tuple[EpochRecord, ...]
    evaluation: Evaluation
    notes: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    references: dict[str, float] = field(default_factory=dict)
    example_shape: tuple[NonNegativeInt, ...] = ()
    example_type: str = "float32"
    output_axes: Annotated[int, Field(ge=0, le=64)] = 1
    squared_errors: tuple[float, float] | None = None
    example_row: dict[str, float | str | list[float]] | None = None
    example_prediction: dict[str, int | float | str] | None = None

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")

    def to_json(self) -> bytes:
        return _RESULT.dump_json(self, indent=2)


_RESULT: TypeAdapter[TrainingResult] = TypeAdapter(TrainingResult)


def read_training_result(uri: str) -> TrainingResult:
    """Return the stored result.

    Raises: FileNotFoundError when there is none, DataCorruption when it is damaged.
    """
    try:
        return _RESULT.validate_json(read_bytes(uri))
    except ValidationError as error:
        raise DataCorruption(f"{uri} is damaged ({error.error_count()} errors); delete it and resume") from error


def reasons_of_trial(spec: TrialSpec, of_data: Iterable[Reason]) -> tuple[Reason, ...]:
    """Return why the epsilons of a trial are estimates, whatever its training does; none for a trial without noise.

    of_data: `Source.reasons`, what was read off the rows.
    """
    if not spec.is_private:
        return ()
    own: dict[Reason, bool] = {
        "known_seed": spec.known_seed is not None,
        "own_clipping": is_import_path(spec.clipping.name),
    }
    return union((of_data, (reason for reason, holds in own.items() if holds)))
