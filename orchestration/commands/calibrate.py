"""`dpsweep calibrate`: the noise, decay or length with which a run meets a privacy target.

It raises `InvalidInput`, `UnsupportedMechanism` or `Unreachable`, which `dpsweep.orchestration.commands.main.main`
prints as one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import typer

from dpsweep.accounting.calibration.budgets import (
    AdvantageBudget,
    Budget,
    EpsilonBudget,
    Reached,
    RhoBudget,
    TruePositiveRateBudget,
)
from dpsweep.accounting.calibration.parameter_search import (
    calibrate_decay,
    decay_parameter,
    length_within_budget,
    noise_multiplier_within_budget,
)
from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.schedules import (
    LARGEST_EPOCHS,
    NoiseSchedule,
    make_schedule,
    parse_schedule,
    split_schedule,
    with_initial,
)
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.orchestration.commands.run_flags import (
    SELECTION,
    AccountantName,
    Json,
    RunFlags,
    SelectionShape,
    SelectionTrials,
    random_trials,
    strategy_notes,
    warn_of_delta,
    with_run_flags,
)
from dpsweep.orchestration.comparison.formats import at_most


@dataclass(frozen=True)
class Target:
    """The flags of the privacy target; `budget` requires exactly one of the first four."""

    epsilon: float | None
    rho: float | None
    advantage: float | None
    true_positive_rate: float | None
    delta: float | None
    false_positive_rate: float | None

    def budget(self, accountant: str, group_size: int, trials: RandomTrials | None = None) -> Budget:
        """Return the budget to meet. trials: for a private selection.

        Raises: InvalidInput for missing or contradictory flags, and for one that the target has no use for.
        """
        targets = (self.epsilon, self.rho, self.advantage, self.true_positive_rate)
        if sum(target is not None for target in targets) != 1:
            raise InvalidInput(
                "give the target as exactly one of --target-epsilon, --budget-rho, --target-advantage and --target-tpr"
            )
        if (self.true_positive_rate is None) != (self.false_positive_rate is None):
            raise InvalidInput("--target-tpr and --at-fpr belong together: give both, or neither")
        if self.epsilon is not None:
            if self.delta is None:
                raise InvalidInput("--target-epsilon needs --delta, the failure probability, well below 1/n")
            return EpsilonBudget(self.epsilon, self.delta, accountant, group_size, trials)
        budget = self._without_epsilon(group_size)
        if accountant not in ("auto", budget.accountant):
            raise InvalidInput(
                f"--accountant is {accountant!r}, but {budget.accountant!r} alone computes {budget.unit}: drop it"
            )
        return budget

    def _without_epsilon(self, group_size: int) -> Budget:
        if self.rho is not None:
            return RhoBudget(self.rho, group_size)
        if self.advantage is not None:
            return AdvantageBudget(self.advantage, group_size)
        return TruePositiveRateBudget(self.true_positive_rate or 0.0, self.false_positive_rate or 0.0, group_size)


@with_run_flags
def calibrate(
    flags: RunFlags,
    solve: Annotated[
        Literal["noise-multiplier", "decay", "epochs", "steps"], typer.Option(help="The quantity to solve for.")
    ] = "noise-multiplier",
    target_epsilon: Annotated[float | None, typer.Option(help="Epsilon to meet (needs --delta).")] = None,
    budget_rho: Annotated[float | None, typer.Option(help="zCDP budget to meet, instead of an epsilon.")] = None,
    target_advantage: Annotated[
        float | None, typer.Option(help="Membership advantage (TPR - FPR) that no attack may exceed.")
    ] = None,
    target_tpr: Annotated[
        float | None, typer.Option(help="True positive rate that no attack may exceed (needs --at-fpr).")
    ] = None,
    at_fpr: Annotated[float | None, typer.Option(help="The false positive rate of --target-tpr.")] = None,
    delta: Annotated[float | None, typer.Option(help="Failure probability of the guarantee.")] = None,
    accountant: AccountantName = "auto",
    group_size: Annotated[int, typer.Option(help="Size of the protected group.")] = 1,
    selection_trials: SelectionTrials = None,
    selection_shape: SelectionShape = None,
    as_json: Json = False,
) -> None:
    """The noise, decay or length with which a run meets a privacy target."""
    target = Target(target_epsilon, budget_rho, target_advantage, target_tpr, delta, at_fpr)
    trials = random_trials(selection_trials, selection_shape)
    budget = target.budget(accountant, group_size, trials)
    value, trace = _SOLVERS[solve](flags, budget)
    if delta is not None:
        warn_of_delta(delta, flags.dataset_size)
    solution = Solution(solve, value, trace, budget, budget.reached(trace))
    noise = flags.strategy_fields(trace)
    if as_json:
        guarantee = {
            "delta": delta,
            "adjacency": trace.adjacency,
            "group_size": group_size,
        }
        run = flags.sampling_fields(trace) | {"schedule": flags.schedule, "steps": trace.steps}
        selection = {} if trials is None else {"selection_trials": trials.mean, "selection_shape": trials.shape}
        typer.echo(json.dumps(solution.as_dict() | guarantee | run | noise | selection))
        return
    typer.echo(solution.sentence())
    for note in strategy_notes(noise):
        typer.echo(f"note: {note}")
    if trials is not None:
        typer.echo(f"note: {SELECTION}")


@dataclass(frozen=True)
class Solution:
    """The value found, the run with that value, and the cost of this run."""

    solved_for: str
    value: float
    trace: Trace
    budget: Budget
    reached: Reached

    def as_dict(self) -> dict[str, Any]:
        """Return the value, under two names, with the cost, its claim and the budget, as plain values."""
        return {
            "solve": self.solved_for,
            "value": self.value,
            self.solved_for.replace("-", "_"): self.value,
            self.budget.unit: self.reached.cost,
            **self.reached.below,
            "kind": self.reached.kind,
            "accountant": self.reached.accountant,
            "target": self.budget.limit,
        }

    def sentence(self) -> str:
        """Return the value, the cost and its claim in one line."""
        cost = f"{self.budget.unit} {at_most(self.reached.cost, 6)} of {self.budget.limit:g}"
        return f"{self.solved_for}: {self.value}  ({cost}, {self.reached.kind}, {count_of(self.trace.steps, 'step')})"


Solve = Callable[[RunFlags, Budget], tuple[float, Trace]]
"""Solves for what meets a budget; returns the value found and the trace of the run with that value. The flags describe
the rest of the run."""


def _solve_noise(flags: RunFlags, budget: Budget) -> tuple[float, Trace]:
    if flags.noise_multiplier is not None:
        raise InvalidInput("--noise-multiplier is what is being solved for: drop it, or choose another --solve")
    schedule = parse_schedule(flags.schedule, 1.0)

    def trace_of(noise_multiplier: float) -> Trace:
        return flags.trace(with_initial(schedule, noise_multiplier))

    found = noise_multiplier_within_budget(trace_of, budget)
    return found, trace_of(found)


def _solve_decay(flags: RunFlags, budget: Budget) -> tuple[float, Trace]:
    if flags.epochs is None or flags.steps is not None:
        raise InvalidInput("solving for the decay needs --epochs, the length of the run, and no --steps")
    name, params = split_schedule(flags.schedule)

    def trace_of(schedule: NoiseSchedule, epochs: int) -> Trace:
        return replace(flags, epochs=epochs).trace(schedule)

    sigma = flags.required_noise()
    found = calibrate_decay(name, sigma, flags.epochs, budget, trace_of, params)
    schedule = make_schedule(name, sigma, **params, **{decay_parameter(name).name: found})
    return found, trace_of(schedule, flags.epochs)


def _solve_length(of_length: Callable[[RunFlags, int], RunFlags], at_most: int) -> Solve:
    def solve(flags: RunFlags, budget: Budget) -> tuple[float, Trace]:
        if flags.epochs is not None or flags.steps is not None:
            raise InvalidInput("the length of the run is what is being solved for: drop --epochs and --steps")
        schedule = parse_schedule(flags.schedule, flags.required_noise())

        def trace_of(length: int) -> Trace:
            return of_length(flags, length).trace(schedule)

        found = length_within_budget(trace_of, budget, at_most)
        return found, trace_of(found)

    return solve


_SOLVERS: Mapping[str, Solve] = {
    "noise-multiplier": _solve_noise,
    "decay": _solve_decay,
    "epochs": _solve_length(lambda flags, length: replace(flags, epochs=length), LARGEST_EPOCHS),
    "steps": _solve_length(lambda flags, length: replace(flags, steps=length), 100_000_000),
}
