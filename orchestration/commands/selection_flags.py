"""The flags of private selection: the cost of releasing only the best of a random number of runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.joint_cost import account_together
from dpsweep.accounting.accountants.selection import account_selection
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.random_trials import RandomTrials
from dpsweep.accounting.mechanism.trace import Trace

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
