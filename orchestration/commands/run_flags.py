"""The flags that `dpsweep epsilon` and `dpsweep calibrate` share, of a run and of a private selection, as a trace."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.joint_cost import account_together
from dpsweep.accounting.accountants.one_run import ACCOUNTANTS
from dpsweep.accounting.accountants.selection import account_selection
from dpsweep.accounting.calibration.parameter_search import epsilon_text
from dpsweep.accounting.errors import InvalidInput, require_finite, require_whole
from dpsweep.accounting.mechanism.correlated import steps_apart
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate, why_too_large
from dpsweep.accounting.mechanism.noise_strategies import (
    INDEPENDENT,
    STRATEGIES,
    BandedNoise,
    IndependentNoise,
    NoiseStrategy,
    make_strategy,
    prefix_sum_errors,
)
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.rounds import LARGEST_GROUP
from dpsweep.accounting.mechanism.samplings import (
    CYCLIC_POISSON,
    FIXED_ORDER,
    RANDOM_ALLOCATION,
    SAMPLINGS,
    Adjacency,
    CyclicPoissonSampling,
    FixedOrderSampling,
    PoissonSampling,
    RandomAllocationSampling,
    Sampling,
    ShuffledSampling,
    draws_by_epoch,
    own_numbers,
    sampling_of_sizes,
)
from dpsweep.accounting.mechanism.schedules import LARGEST_EPOCHS, NoiseSchedule, planned_trace, split_schedule
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Release, SideQuery, Trace
from dpsweep.accounting.registry import lookup, one_of
from dpsweep.orchestration.commands.options import warn

AccountantName = Annotated[str, typer.Option(help=f"{one_of(ACCOUNTANTS)}.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
P = ParamSpec("P")


@dataclass(frozen=True)
class RunFlags:
    """Noise, batches, length and releases of a run as given; each field is a command line option.

    An epoch has 1/q steps with --sample-rate q, else n/B steps, rounded up. A shuffled one without --batch-size has 2.

    >>> from dpsweep.accounting.mechanism.schedules import parse_schedule
    >>> flags = RunFlags(dataset_size=1000, batch_size=100, epochs=3)
    >>> flags.trace(parse_schedule("constant", 1.1)).steps
    30
    """

    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Noise standard deviation over sensitivity; with a schedule, its initial value."),
    ] = None
    schedule: Annotated[
        str, typer.Option(help="name or name:key=value,... (constant, time, exponential, step, ...).")
    ] = "constant"
    sampling: Annotated[str, typer.Option(help=f"How batches are drawn: {one_of(SAMPLINGS)}.")] = "poisson"
    sample_rate: Annotated[
        float | None, typer.Option(help="Poisson sampling probability q; an epoch is 1/q steps.")
    ] = None
    dataset_size: Annotated[int | None, typer.Option(help="Number of training examples.")] = None
    batch_size: Annotated[int | None, typer.Option(help="Examples per batch (expected, for Poisson).")] = None
    max_batch_size: Annotated[
        int | None, typer.Option(help="Largest Poisson batch; of a larger one a random subset is kept.")
    ] = None
    per_epoch: Annotated[
        int | None,
        typer.Option(
            help=f"With {RANDOM_ALLOCATION}: steps of an epoch that each example joins, one of each equal part."
        ),
    ] = None
    noise_strategy: Annotated[
        str | None,
        typer.Option(
            help=f"How noise is correlated, as name:key=value,...: {one_of(STRATEGIES)}; default independent."
        ),
    ] = None
    cycle_length: Annotated[
        int | None,
        typer.Option(
            help=f"With {CYCLIC_POISSON}: groups of examples that take turns; by default the bands of banded."
        ),
    ] = None
    adjacency: Annotated[
        Adjacency | None, typer.Option(help="Which data sets are neighbours; by default the sampling's own.")
    ] = None
    steps: Annotated[int | None, typer.Option(help="Length of the run in steps.")] = None
    epochs: Annotated[
        int | None, typer.Option(help="Length of the run in epochs (steps per epoch are rounded up).")
    ] = None
    side_noise_multiplier: Annotated[
        list[float] | None, typer.Option(help="Noise multiplier of a side query on every batch; may be repeated.")
    ] = None
    release: Annotated[
        list[str] | None,
        typer.Option(help="A release on all the data: gaussian:SIGMA or pure:EPSILON; may be repeated."),
    ] = None

    def required_noise(self) -> float:
        """Return the noise multiplier. Raises: InvalidInput if it is missing, negative or not finite."""
        if self.noise_multiplier is None:
            raise InvalidInput(
                "--noise-multiplier is missing: noise std over sensitivity, initial value of the schedule"
            )
        return require_finite("--noise-multiplier", self.noise_multiplier, at_least=0.0)

    def mechanism(self) -> Sampling:
        """Return the sampling that the flags describe. Raises: InvalidInput for a missing or contradictory flag."""
        lookup(SAMPLINGS, self.sampling, "sampling")
        own_numbers(self.sampling, {"per_epoch": self.per_epoch, "cycle_length": self.cycle_length})
        if self.max_batch_size is not None and self.sampling not in (CYCLIC_POISSON, FIXED_ORDER):
            return self.of_sizes()
        return _WITH_OWN_FLAGS.get(self.sampling, RunFlags.of_sizes)(self)

    def trace(self, schedule: NoiseSchedule) -> Trace:
        """Return the trace of a run of --epochs or --steps. Raises: InvalidInput for bad flags."""
        epochs, steps = self.epochs, self.steps
        if (epochs is None) == (steps is None):
            raise InvalidInput("give the length of the run as exactly one of --steps and --epochs")
        sampling = self.mechanism()
        if epochs is None:
            longest = LARGEST_EPOCHS * sampling.steps_per_epoch
            steps = require_whole("--steps", steps or 0, at_least=1, at_most=longest)
            if draws_by_epoch(sampling) and self.batch_size is None:
                raise InvalidInput(
                    f"--steps of {sampling.words} needs --dataset-size and --batch-size; or give --epochs"
                )
            epochs = math.ceil(steps / sampling.steps_per_epoch)
        trace = planned_trace(
            schedule,
            sampling,
            require_whole("--epochs", epochs, at_least=1, at_most=LARGEST_EPOCHS),
            sampling.steps_per_epoch,
            LARGEST_GROUP if self.dataset_size is None else self.dataset_size,  # unknown: it may hold any group
            tuple(SideQuery(f"side query {i}", sigma) for i, sigma in enumerate(self.side_noise_multiplier or (), 1)),
            tuple(map(_release, self.release or ())),
            adjacency=self.adjacency,
        )
        trace = trace if steps is None else trace.until(steps)
        return replace(trace, strategy=self.strategy(trace.steps, steps_apart(sampling, trace.steps)))

    def strategy(self, steps: int, apart: int) -> NoiseStrategy:
        """Return the noise strategy for a run of ``steps``, with an example in every ``apart`` of them at most.

        Raises: InvalidInput for a malformed --noise-strategy.
        """
        if self.noise_strategy is None:
            return INDEPENDENT
        return make_strategy(*split_schedule(self.noise_strategy), steps, apart)

    def sizes(self) -> tuple[int, int]:
        """Return numbers of examples of the data set and of a batch. Raises: InvalidInput if one is missing."""
        if self.dataset_size is None or self.batch_size is None or self.sample_rate is not None or self.max_batch_size:
            raise InvalidInput(
                f"--sampling {self.sampling} needs --dataset-size and --batch-size, and neither --sample-rate nor "
                "--max-batch-size"
            )
        return self.dataset_size, self.batch_size

    def of_sizes(self) -> Sampling:
        """Return the sampling with batches of --batch-size, at most --max-batch-size, of --dataset-size examples."""
        if self.dataset_size is None or self.batch_size is None or self.sample_rate is not None:
            what = f"--sampling {self.sampling}" if self.max_batch_size is None else "--max-batch-size"
            raise InvalidInput(f"{what} needs --dataset-size and --batch-size, and no --sample-rate")
        sizes = self.dataset_size, self.batch_size
        return sampling_of_sizes(self.sampling, *sizes, self.max_batch_size, per_epoch=self.per_epoch)

    def sampling_fields(self, trace: Trace) -> dict[str, Any]:
        """Return what JSON says of the batches: their name, how many an example joins, or how many groups
        take turns.
        """
        own: dict[str, Any] = {"sampling": self.sampling}
        match trace.segments[0].sampling if trace.segments else None:
            case RandomAllocationSampling(per_epoch=per_epoch):
                return own | {"per_epoch": per_epoch}
            case CyclicPoissonSampling(cycle_length=cycle_length):
                return own | {"cycle_length": cycle_length}
            case _:
                return own

    def strategy_fields(self, trace: Trace) -> dict[str, Any]:
        """Return what JSON says of correlated noise: the strategy, and errors of the sums of gradients up to each step.

        Errors are squared and per coordinate, in squared clipping bounds: their mean over the steps, and the largest.
        """
        if self.noise_strategy is None or len(trace.segments) != 1:
            return {}
        mean, largest = prefix_sum_errors(trace.strategy, trace.steps, trace.segments[0].noise_multiplier)
        return {"noise_strategy": self.noise_strategy, "mean_squared_error": mean, "max_squared_error": largest}


def _poisson(flags: RunFlags) -> Sampling:
    if flags.sample_rate is not None:
        if flags.batch_size is not None or flags.dataset_size is not None:
            raise InvalidInput("give either --sample-rate or --dataset-size with --batch-size, not both")
        return PoissonSampling(require_finite("--sample-rate", flags.sample_rate, above=0.0, at_most=1.0))
    if flags.dataset_size is None or flags.batch_size is None:
        raise InvalidInput("Poisson batches need --sample-rate, or --dataset-size with --batch-size")
    return flags.of_sizes()


def _shuffle(flags: RunFlags) -> Sampling:
    if flags.sample_rate is not None:
        raise InvalidInput("--sample-rate does not apply to shuffled epochs, which visit every example once: drop it")
    if flags.batch_size is None:  # two batches or more cost the same; one alone would have a lower bound
        return ShuffledSampling(1 if flags.dataset_size == 1 else 2)
    return flags.of_sizes()


def _cyclic(flags: RunFlags) -> Sampling:
    match flags.strategy(1, 1):
        case BandedNoise(bands=bands) if flags.cycle_length is None:
            return CyclicPoissonSampling.of_sizes(*flags.sizes(), bands)
        case IndependentNoise() if flags.cycle_length is None:
            raise InvalidInput(
                f"--cycle-length is missing: the number of groups that take turns in {CYCLIC_POISSON} batches"
            )
        case _ if flags.cycle_length is None:  # noise of the whole run, which is refused by name for any length
            return CyclicPoissonSampling.of_sizes(*flags.sizes(), 1)
        case _:
            return CyclicPoissonSampling.of_sizes(*flags.sizes(), flags.cycle_length)


_WITH_OWN_FLAGS: Mapping[str, Callable[[RunFlags], Sampling]] = {
    "poisson": _poisson,
    "shuffle": _shuffle,
    CYCLIC_POISSON: _cyclic,
    FIXED_ORDER: lambda flags: FixedOrderSampling.of_sizes(*flags.sizes()),
}
"""Samplings that accept other flags than --dataset-size and --batch-size."""


def strategy_notes(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines below a table of the fields that `strategy_fields` returned."""
    if "noise_strategy" in fields:
        mean, largest = fields["mean_squared_error"], fields["max_squared_error"]
        yield (
            f"noise {fields['noise_strategy']}: squared error of the sum of all gradients up to a step, per weight, "
            f"in squared clipping bounds: mean {mean:.4g}, largest {largest:.4g}"
        )


def with_run_flags(command: Callable[Concatenate[RunFlags, P], None]) -> Callable[..., None]:
    """Decorate a typer command: replace its first parameter, a `RunFlags`, by one option per field."""
    shared = [field.name for field in fields(RunFlags)]

    @functools.wraps(command)
    def expanded(**options: Any) -> None:
        flags = RunFlags(**{name: options.pop(name) for name in shared})
        command(flags, **options)  # type: ignore[call-arg]  # the other parameters of command, by name

    own = list(inspect.signature(command).parameters.values())[1:]
    hints = get_type_hints(RunFlags, include_extras=True) | get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in (*own, *inspect.signature(RunFlags).parameters.values())
    ]
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads both
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def warn_of_delta(delta: float, dataset_size: int | None) -> None:
    """Warn on standard error if delta >= 1/n, which would allow publishing a whole record.

    Raises: InvalidInput for a delta that is no probability below 1.
    """
    require_finite("delta", delta, at_least=0.0, below=1.0)
    if large := why_too_large(delta, dataset_size or 0):
        warn(large)


_RELEASES: Mapping[str, Callable[[str, float], Release]] = {"gaussian": GaussianRelease, "pure": PureRelease}


def _release(text: str) -> Release:
    kind, _, amount = text.partition(":")
    try:
        return lookup(_RELEASES, kind, "release")(text, float(amount))
    except ValueError as error:
        raise InvalidInput(f"--release is {text!r}, but must be gaussian:SIGMA or pure:EPSILON ({error})") from None


SelectionTrials = Annotated[
    float | None,
    typer.Option(help="Only the best of a random number of such runs is released: the expected number of runs."),
]
SelectionShape = Annotated[
    float | None,
    typer.Option(help="With --selection-trials: shape of the number's law; 1 geometric (default), 0 logarithmic."),
]
SELECTION = (
    "the guarantee of a selection needs a number of runs that is drawn at random and kept secret, settings drawn from "
    "a law fixed in advance, scores that read training data only through the run, and no other run released"
)


def random_trials(mean: float | None, shape: float | None) -> RandomTrials | None:
    """Return the distribution of the number of runs; None without ``--selection-trials``. Raises: InvalidInput for bad
    flags.
    """
    if mean is None:
        return None
    return RandomTrials(mean) if shape is None else RandomTrials(mean, shape)


def accounted(
    trace: Trace, delta: float, accountant: str, group_size: int, trials: RandomTrials | None
) -> PrivacyEstimate:
    """Return the epsilon of one run or, with ``trials``, of releasing the best of that random number of runs."""
    if trials is None:
        return account(trace, delta, accountant, group_size)
    return account_selection(trace, trials, delta, accountant, group_size)


def compared_with_naive(trace: Trace, delta: float, trials: RandomTrials, group_size: int) -> dict[str, Any]:
    """For comparison with the selection, for as many examples: epsilon of one run, and of releasing the expected number
    of runs.
    """
    together = account_together([trace] * round(trials.mean), delta, group_size)
    return {
        "selection_trials": trials.mean,
        "selection_shape": trials.shape,
        "one_trial_epsilon": account(trace, delta, group_size=group_size).as_dict()["epsilon"],
        "all_trials_epsilon": together.as_dict()["epsilon"],
    }


def naive_note(unit: str, beside: dict[str, Any]) -> str:
    """Return one line with the numbers of `compared_with_naive` for a ``unit``."""
    one, every = (
        epsilon_text(math.inf if beside[name] is None else beside[name])
        for name in ("one_trial_epsilon", "all_trials_epsilon")
    )
    number = round(beside["selection_trials"])
    return f"{unit}: epsilon of one such run alone is {one}; of {number} runs that are all released, {every}"
