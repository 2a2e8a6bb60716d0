"""Warnings and notes of a plan: about the sweep file, its data and what its trials cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.joint_cost import account_together
from dpsweep.accounting.calibration.parameter_search import epsilon_text
from dpsweep.accounting.mechanism.estimates import why_too_large
from dpsweep.accounting.mechanism.random_trials import ExponentialChoice, RandomTrials
from dpsweep.accounting.mechanism.reasons import in_words
from dpsweep.orchestration.sweeps.components import without_defaults
from dpsweep.orchestration.sweeps.grid import KEYS, repeated_axes, rivals
from dpsweep.orchestration.sweeps.planned import PlannedTrial, accounts_examples
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.sections import never_met
from dpsweep.workers.models import has_other_tokenizer
from dpsweep.workers.own_code.imports import is_import_path
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.trial_mechanism import make_budget, paid_by


def warnings_of(sweep: SweepSpec, trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    """Return the warnings of a plan, without those of its models. Numbers in them are private."""
    return (
        *_of_file(sweep),
        *_unopposed(sweep, trials),
        *_untracked(sweep, trials),
        *never_met(sweep.resources, [sweep.reserved(trial.spec) for trial in trials]),
        *_of_data(trials),
        *_of_users(sweep, trials),
        *_of_tokenizers(trials),
        *_large_deltas(trials),
        *_beyond_budgets(trials),
    )


def note_of_candidates(sweep: SweepSpec, trials: Sequence[PlannedTrial]) -> str:
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
        f"these are the trials of the tuning, {len(trials)}{later}; then the best candidate of every "
        f"setting ({settings}) is trained with each of the sweep's seeds ({len(sweep.seeds)})"
    )


def notes_of_own_parts(trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    """Return a note on each of the user's own parts, for a plan that runs none of their code."""
    names = sorted({part for trial in trials for part in own_parts(trial.spec)})
    return tuple(
        f"{name} is the user's own code, which is not run here: it was not tried on rows of the data, nor the model, "
        "preprocessing, loss and augmentation that it is combined with"
        for name in names
    )


def own_parts(trial: TrialSpec) -> list[str]:
    """Return descriptions of the trial's model and loss, as far as they are the user's own code."""
    parts = {"model": trial.model.name, "loss": trial.loss.name}
    return [f"{what} {name!r}" for what, name in parts.items() if is_import_path(name)]


def _of_file(sweep: SweepSpec) -> tuple[str, ...]:
    """Return warnings about the sweep file."""
    twice = repeated_axes(sweep)
    in_two_ways = [axis for axis in repeated_axes(sweep, without_defaults) if axis not in twice]
    said = {
        "twice; trials that are the same run once": twice,
        "twice, once with a default written out; these are different trials of one setting, and each costs its own ε: "
        "leave one out": in_two_ways,
    }
    return tuple(
        f"the sweep lists a value of {', '.join(KEYS.get(axis, axis) for axis in axes)} {what}"
        for what, axes in said.items()
        if axes
    )


def _unopposed(sweep: SweepSpec, trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    """Return a warning if the sweep's scheduler stops trials, but every group of comparable trials has only one
    trial, or all end before it may stop one.
    """
    compared = [(group, each.spec.epochs) for each in trials if (group := rivals(each.point)) is not None]
    if sweep.scheduler.name == "fifo":
        return ()
    longest, grace = max((epochs for _, epochs in compared), default=0), sweep.scheduler.grace_epochs
    if 0 < longest <= grace:
        return (
            f"scheduler {sweep.scheduler.name} stops no trial before its grace_epochs, {grace}, and no trial takes "
            f"more than {longest}, so it will stop none; set grace_epochs lower",
        )
    if max(Counter(group for group, _ in compared).values(), default=0) > 1:
        return ()
    return (
        f"scheduler {sweep.scheduler.name} compares private trials of one setting and seed, which differ in optimizer, "
        "learning rate, bound, batch size or epochs; no two of these do, so it will stop none",
    )


def _untracked(sweep: SweepSpec, trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    """Return a warning if a sweep tracks examples at every step, but estimates the epsilons of none."""
    tracks = [trial for trial in trials if trial.spec.norms.exact_examples]
    estimated = [trial for trial in tracks if trial.trace.filter is None]
    if not tracks or any(accounts_examples(trial.trace, trial, sweep) for trial in estimated):
        return ()
    return (
        "norms.exact_examples is of no use: the epsilons of single examples, whose error it measures, are estimated "
        "in no trial of the sweep",
    )


def _of_data(trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    """Return the notes of each data set, such as rows that are left out, and what was read off the rows."""
    notes = {
        f"data {trial.dataset.name}: {note}": None
        for trial in trials
        for note in (*trial.dataset.notes, *in_words(trial.dataset.reasons))
    }
    return tuple(notes)


def _of_users(sweep: SweepSpec, trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    """Return notes on each data set whose users are not what ε protects, or may own test examples. Numbers are
    private.
    """
    notes: dict[str, None] = {}
    for spec, each in ((trial.spec, trial.dataset) for trial in trials):
        if each.rows_per_user and spec.is_private and spec.users is None and max(sweep.accounting.group_sizes) == 1:
            notes[
                f"data {each.name}: every ε is that of one row, and a user with several pays more; set privacy.unit: "
                "user, or list the most rows of a user in accounting.group_sizes"
            ] = None
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


def _of_tokenizers(trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    """Return a note on each pretrained model that was trained with another tokenizer than that of the data."""
    read = {
        (part.name, part.params.get("path"), spec.data.params.get("tokenizer")): None
        for spec in (trial.point.spec for trial in trials)
        for part in (spec.model, spec.preprocessing)
        if spec.data.name == "text" and part is not None and part.name in ("hugging_face", "text_features")
    }
    return tuple(
        f"{name} {path}: its folder has a tokenizer.json that makes other tokens than {tokenizer}; unless both number "
        "them alike, the model reads other words than it was trained on: set tokenizer to its own"
        for name, path, tokenizer in read
        if has_other_tokenizer(str(path), str(tokenizer))
    )


def _large_deltas(trials: Sequence[PlannedTrial]) -> tuple[str, ...]:
    told = {
        trial.dataset.train_size: large
        for trial in trials
        if trial.spec.is_private and (large := why_too_large(trial.spec.delta, trial.dataset.train_size))
    }
    return tuple(told.values())


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
        f". For {one.key} it is {epsilon_text(one.worst_case.epsilon)}; one candidate alone costs "
        f"{epsilon_text(alone.epsilon)}, and to release {number} of them {epsilon_text(every.epsilon)}"
    )
