"""The flags that `dpsweep epsilon` and `dpsweep calibrate` share: of a run, a private selection, a target."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, ParamSpec, get_type_hints

import typer

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.joint_cost import account_together
from dpsweep.accounting.accountants.one_run import ACCOUNTANTS
from dpsweep.accounting.accountants.selection import account_selection
from dpsweep.accounting.errors import InvalidInput, require_finite
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.noise_strategies import STRATEGIES
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.samplings import CYCLIC_POISSON, RANDOM_ALLOCATION, SAMPLINGS, Adjacency
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Release, Trace
from dpsweep.accounting.registry import lookup, one_of
from dpsweep.orchestration.commands.run_shape import RunShape, delta_warning

if TYPE_CHECKING:
    SamplingName = str
else:  # the choices that typer shows and accepts
    SamplingName = Literal[(*SAMPLINGS,)]

AccountantName = Annotated[str, typer.Option(help=f"{one_of(ACCOUNTANTS)}.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
P = ParamSpec("P")


@dataclass(frozen=True)
class RunFlags:
    """Noise, batches, length and releases of a run as given; each field is a command line option."""

    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Noise standard deviation over sensitivity; with a schedule, its initial value."),
    ] = None
    schedule: Annotated[
        str, typer.Option(help="name or name:key=value,... (constant, time, exponential, step, ...).")
    ] = "constant"
    sampling: Annotated[SamplingName, typer.Option(help="How batches are drawn.")] = "poisson"
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

    @property
    def describe_a_run(self) -> bool:
        """Return whether any flag of noise, batches, length or releases is given."""
        given = (
            self.noise_multiplier,
            self.sample_rate,
            self.dataset_size,
            self.batch_size,
            self.max_batch_size,
            self.per_epoch,
            self.noise_strategy,
            self.cycle_length,
            self.adjacency,
            self.steps,
            self.epochs,
            self.side_noise_multiplier,
            self.release,
        )
        return any(value not in (None, [], ()) for value in given)

    def shape(self) -> RunShape:
        """Return sampling, side queries and releases. Raises: InvalidInput for a malformed --release."""
        return RunShape(
            self.sampling,
            self.sample_rate,
            self.dataset_size,
            self.batch_size,
            tuple(self.side_noise_multiplier or ()),
            tuple(_release(text) for text in self.release or ()),
            self.max_batch_size,
            self.adjacency,
            self.noise_strategy,
            self.cycle_length,
            self.per_epoch,
        )

    def required_noise(self) -> float:
        """Return the noise multiplier. Raises: InvalidInput if it is missing, negative or not finite."""
        if self.noise_multiplier is None:
            raise InvalidInput(
                "--noise-multiplier is missing: noise std over sensitivity, initial value of the schedule"
            )
        return require_finite("--noise-multiplier", self.noise_multiplier, at_least=0.0)


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
    """Print `delta_warning` to standard error, if there is one."""
    warning = delta_warning(delta, dataset_size)
    if warning is not None:
        typer.echo(f"warning: {warning}", err=True)


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
        if shape is not None:
            raise InvalidInput("--selection-shape needs --selection-trials, the expected number of runs")
        return None
    return RandomTrials(mean) if shape is None else RandomTrials(mean, shape)


def accounted(
    trace: Trace, delta: float, accountant: str, group_size: int, trials: RandomTrials | None
) -> PrivacyEstimate:
    """Return the epsilon of one run or, with ``trials``, of releasing the best of that random number of runs."""
    if trials is None:
        return account(trace, delta, accountant, group_size)
    return account_selection(trace, trials, delta, accountant, group_size)


def compared_with_naive(trace: Trace, delta: float, trials: RandomTrials) -> dict[str, Any]:
    """For comparison with the selection: epsilon of one run, and of releasing the expected number of runs."""
    together = account_together([trace] * round(trials.mean), delta)
    return {
        "selection_trials": trials.mean,
        "selection_shape": trials.shape,
        "one_trial_epsilon": account(trace, delta).as_dict()["epsilon"],
        "all_trials_epsilon": together.as_dict()["epsilon"],
    }


def naive_note(beside: dict[str, Any]) -> str:
    """Return one line with the numbers of `compared_with_naive`."""
    one, every = (
        "infinite" if beside[name] is None else f"{beside[name]:.4f}"
        for name in ("one_trial_epsilon", "all_trials_epsilon")
    )
    number = round(beside["selection_trials"])
    return f"epsilon of one such run alone is {one}; of {number} runs that are all released, {every}"
