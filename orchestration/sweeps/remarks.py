"""Warnings and notes about a plan, one sentence each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.joint_cost import account_together
from dpsweep.accounting.mechanism.exponential_choice import ExponentialChoice
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.reasons import in_words
from dpsweep.orchestration.sweeps.grid import repeated
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.own_code.imports import UserCode, is_import_path
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.trial_mechanism import make_budget, paid_by

if TYPE_CHECKING:
    from dpsweep.orchestration.sweeps.planned import PlannedTrial


def of_sweep(sweep: SweepSpec) -> tuple[str, ...]:
    """Return warnings about the sweep file."""
    axes = ", ".join(repeated(sweep))
    return (f"the sweep lists a value of {axes} twice; trials that are the same run once",) if axes else ()


def of_trials(trials: Sequence[PlannedTrial], code: UserCode | None) -> tuple[str, ...]:
    """Return warnings about trials that can run. code: None if the user's own code was not run."""
    untried = _untried(trials) if code is None else ()
    return (*_of_data(trials), *_of_test_users(trials), *_large_deltas(trials), *_beyond_budgets(trials), *untried)


def _of_data(trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    """Return the notes of each data set, such as rows that are left out, and what was read off the rows."""
    notes = {
        f"data {trial.dataset.name}: {note}": None
        for trial in trials
        for note in (*trial.dataset.notes, *in_words(trial.dataset.reasons))
    }
    return tuple(notes)


def _of_test_users(trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    """Return a note on each data set whose test examples may belong to people who train. The number is private."""
    notes: dict[str, None] = {}
    for each in (trial.dataset for trial in trials):
        if each.shared_users:
            notes[
                f"data {each.name}: people of the training data own rows of the test data, too, so that measures of "
                "these tell of people who train, and look better than on strangers; take their rows out of the test "
                "table, or leave out test_path, so that whole people are held out"
            ] = None
        if each.rows_per_user and each.test_users is None:
            notes[
                f"data {each.name}: the test examples name no users, so nobody checks whether people who train are "
                "among them, and intervals take rows of one user as independent; name the users of test examples, too"
            ] = None
    return tuple(notes)


def _beyond_budgets(trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    """Return a note about the most expensive trial among those whose budget covers training but not their other
    releases.
    """
    found: list[tuple[float, str]] = []
    for trial in trials:
        budget, left_out = trial.spec.budget, [release.name for release in trial.trace.releases]
        if budget is not None and budget.covers == "training" and left_out:
            kind = make_budget(budget, trial.spec.delta)
            paid, whole = kind.cost(paid_by(budget, trial.trace)), kind.cost(trial.trace)
            found.append(
                (
                    whole,
                    f"the budget covers training alone: of {trial.key}, it pays {kind.unit} {paid:.6g} of "
                    f"{kind.limit:.6g}; with {', '.join(left_out)} the trial costs {kind.unit} {whole:.6g}, and every "
                    "ε counts all of it",
                )
            )
    return (max(found, key=lambda each: each[0])[1],) if found else ()


def _large_deltas(trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    worst = {
        trial.dataset.train_size: trial.spec.delta
        for trial in trials
        if trial.spec.is_private and trial.spec.delta >= 1.0 / trial.dataset.train_size
    }
    return tuple(
        f"delta is {delta:g}, but with {size} training examples it should be well below 1/n = {1.0 / size:.2g}: "
        "a mechanism that publishes one random example meets it"
        for size, delta in worst.items()
    )


def of_candidates(sweep: SweepSpec, trials: Sequence[PlannedTrial]) -> str:
    """Return a note that says what the tuning trials of ``sweep`` are and what is trained after them."""
    match sweep.tune.selection if sweep.tune else None:
        case RandomTrials() as law:
            return (
                f"these are the candidates of the private selection, {len(trials)} in all; each trial of the "
                f"sweep is the best of a random number of them, {law.mean:g} expected, and every ε is that after the "
                f"selection{_naive(trials, round(law.mean))}"
            )
        case ExponentialChoice() as choice:
            return (
                f"these are the candidates of the exponential mechanism, {len(trials)} in all, each on a part "
                f"of the data of its own, 1/{choice.parts} of the training examples; each trial of the sweep is one "
                f"of {choice.candidates}, and every ε is that after the choice{_naive(trials, choice.candidates)}"
            )
    settings = len({trial.point.setting for trial in trials})
    is_first = sweep.tune is not None and sweep.tune.search == "optuna"
    later = " to begin with, half of them all; Optuna proposes the others" if is_first else " in all"
    return (
        f"these are the trials of the tuning, {len(trials)}{later}; then the best candidate of each of "
        f"{settings} settings is trained with each of the sweep's seeds ({len(sweep.seeds)})"
    )


def _naive(trials: Sequence[PlannedTrial], number: int) -> str:
    """Return the epsilon of the first private candidate: after the selection, alone, and if ``number`` of them were
    released.
    """
    one = next((trial for trial in trials if trial.spec.is_private and trial.trace.is_private), None)
    if one is None:
        return ""
    run = replace(one.trace, selection=None)
    alone, every = account(run, one.spec.delta), account_together([run] * number, one.spec.delta)
    return (
        f". For {one.key} it is {one.worst_case.epsilon:.3g}; one candidate alone costs {alone.epsilon:.3g}, "
        f"and to release {number} of them {every.epsilon:.3g}"
    )


def own_parts(trial: TrialSpec) -> list[str]:
    """Return descriptions of the trial's model and loss, as far as they are the user's own code."""
    parts = {"model": trial.model.name, "loss": trial.loss.name}
    return [f"{what} {name!r}" for what, name in parts.items() if is_import_path(name)]


def _untried(trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    names = sorted({part for trial in trials for part in own_parts(trial.spec)})
    return tuple(
        f"{name} is the user's own code, which is not run here: it was not tried on rows of the data, nor the model, "
        "preprocessing, loss and augmentation that it is combined with"
        for name in names
    )
