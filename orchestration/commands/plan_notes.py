"""Notes below the table of ``dpsweep plan``: ways to protect users, releases of rows per user, reach of audits."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, assert_never

from rich.table import Table

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.accounting.jobs.release import SecretDraws
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.mechanism.units import User
from dpsweep.orchestration.commands.printed_tables import empty_table
from dpsweep.orchestration.comparison.formats import at_most, number, percent
from dpsweep.orchestration.sweeps.people import WaysCompared
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.workers.sampling.rows_per_user import release_of, released
from dpsweep.workers.sampling.users import sampled
from dpsweep.workers.training.audit_prospects import GOALS, SIMULATED, AuditProspect, prospect

if TYPE_CHECKING:
    from dpsweep.orchestration.sweeps.planned import Plan
    from dpsweep.orchestration.sweeps.schema import SweepSpec


def ways_table(found: WaysCompared) -> Table:
    """Return the ways of a comparison: noise multiplier, share of rows used, and noise per coordinate."""
    shown = empty_table("way", "rows per user", "rows used", "a step", "noise multiplier", "noise", "if unrelated")
    for way in found.ways:
        drawn = f"{number(way.members)} {sampled(way.sampling)}"
        noise = number(way.noise), number(way.unrelated)
        shown.add_row(way.sampling, str(way.most), percent(way.used), drawn, f"{way.noise_multiplier:.4f}", *noise)
    return shown


def ways_lines(found: WaysCompared, source: str) -> Iterator[str]:
    """Yield the heading of `ways_table`, then the recommendation. source: of the rows per user, in words."""
    ways = " or ".join(_samplings(found))
    yield (
        f"users of {found.data}: {ways} at ε {found.target_epsilon:g} per user, δ = {found.delta:g}, with "
        f"{count_of(found.rows, 'gradient')} a step and {count_of(found.steps, 'step')} for all; "
        f"{count_of(found.users, 'user')}, {source}"
    )
    yield f"recommended: {_recommended(found)}"


def noise_line(found: WaysCompared) -> str:
    """Return the meaning of the last two columns of `ways_table`."""
    size = "" if found.parameters is None else f"; its norm is √{found.parameters:,} times as large"
    meant = f"noise: of one coordinate of the mean gradient, in clipping bounds of a row{size}"
    if len(_samplings(found)) < 2:
        return f"{meant} (docs/users.md)"
    return (
        f"{meant}. If the rows of a user are unrelated, the bound of uls may be so much smaller that it is the last "
        "column. Both ways are compared at the median number of rows (docs/users.md)"
    )


def _samplings(found: WaysCompared) -> list[str]:
    return list(dict.fromkeys(way.sampling for way in found.ways))


def _recommended(found: WaysCompared) -> str:
    els, uls = found.els, found.uls
    if found.verdict == "unreachable" or els is None:
        return "none, as no noise meets the target; raise it, or take fewer steps"
    by_rows = f"user_sampling: els, max_records_per_user: {els.most}"
    if found.verdict == "els_alone" or uls is None:
        return f"{by_rows}, about the median number of rows; more would add noise for the rows of few"
    by_users = f"user_sampling: uls, max_records_per_user: {uls.most}, batch_size: {max(1, round(uls.members))}"
    match found.verdict:
        case "els":
            return f"{by_rows}; it has less noise than uls even if the rows of a user are unrelated"
        case "uls":
            return f"{by_users}; it has no more noise than els even if the rows of a user are alike"
        case "unknown":
            return (
                f"both, as axes: {by_rows}, or {by_users}; els has less noise if the rows of a user are alike, uls "
                "if they are unrelated, which only training shows"
            )
        case _:
            assert_never(found.verdict)


def rows_source(sweep: SweepSpec) -> str:
    """Return where the rows per user come from, in words."""
    if sweep.privacy.adjacency == "fixed_graph":
        return "known under fixed_graph"
    declared = sweep.privacy.rows_per_user
    noise = None if declared is None else declared.noise_multiplier
    return "declared public" if noise is None else f"released with noise multiplier {noise:g}, which every ε includes"


UNDECLARED = (
    "els or uls, and how many rows per user: not recommended, as that depends on how many rows users have, which is "
    "private. Declare privacy.rows_per_user if it is public, or release it once: --release-rows-per-user 20"
)


def release_lines(sweep: SweepSpec, plan: Plan, noise_multiplier: float) -> Iterator[str]:
    """Draw noise and yield the section of the sweep file that holds the released numbers, and their cost.

    Raises: InvalidInput unless the trials protect the users of one data set.
    """
    if sweep.privacy.adjacency == "fixed_graph":
        raise InvalidInput(
            "privacy.adjacency: fixed_graph takes the rows per user as known; there is nothing to release"
        )
    found = {trial.dataset.rows_per_user for trial in plan.trials if trial.spec.users is not None}
    if len(found) != 1:
        raise InvalidInput(
            f"--release-rows-per-user takes a sweep of users of one data set, and this one has {len(found)}; set "
            "privacy.unit: user, and plan one data set"
        )
    (histogram,) = found
    noisy = released(histogram, noise_multiplier, SecretDraws())
    alone = Trace(1, (), (release_of(noise_multiplier, User()),), unit=User())
    cost = account(alone, sweep.privacy.delta)
    yield (
        f"released once: alone it costs ε {at_most(cost.epsilon)} per user at δ = {cost.delta:g}, and another release "
        "costs as much again. Put it under privacy: in the sweep file, and every ε includes it:"
    )
    yield "  rows_per_user:"
    yield f"    noise_multiplier: {noise_multiplier:g}"
    yield f"    users: {{{', '.join(f'{rows}: {users}' for rows, users in noisy)}}}"


def prospect_line(trials: Sequence[str], found: AuditProspect) -> str:
    """Return how much of its claim the audit of ``trials``, if any is named, can show, with how many canaries, and
    their cost.
    """
    audit, shown, goal = found.audit, found.shown, f"{GOALS[found.audit.transcript]:g} of the claim"
    canaries = f"{count_of(audit.canaries, 'canary', 'canaries')} ({audit.kind}, {audit.transcript})"
    simulated = f"{number(shown[0])} to {number(shown[-1])} in {SIMULATED} simulated runs"
    shows = f"about {number(statistics.fmean(shown))} ({simulated})"
    if not audit.own_parameters:
        shows += " if its canaries leak all that may leak"
    if number(found.of_canary) != number(found.claim):
        shows += f", of the {number(found.of_canary)} that they pay"
    enough = (
        f"no number that fits shows {goal}"
        if found.enough is None
        else f"{count_of(found.enough, 'canary shows', 'canaries show')} {goal}"
    )
    if found.most is not None:
        enough += f", as {found.most[0]:,} show about {number(found.most[1])}"
    named = f"{trials[0]}{f' and {len(trials) - 1} more' if trials[1:] else ''}, " if trials else ""
    return f"audit of {named}ε {at_most(found.claim)} by {canaries}: shows {shows}; {enough}; {_cost(found)}"


def _cost(found: AuditProspect) -> str:
    if found.audit.leaves_out_rows:
        return f"about {percent(found.left_out)} of the training examples are left out"
    if found.audit.own_parameters:
        return "the canaries take as many of the model's parameters"
    if found.noise_factor is None:
        return "the canaries move the model as further noise would"
    return f"the canaries move the model about as far as if noise were {percent(found.noise_factor - 1.0)} larger"


def prospects(trials: Sequence[PlannedTrial]) -> Iterator[tuple[list[str], AuditProspect]]:
    """Yield what the audits of private trials can show, once for all trials with equal runs, with their keys."""
    alike: dict[object, list[PlannedTrial]] = {}
    for trial in trials:
        spec = trial.spec
        if spec.audit is not None and trial.worst_case.is_private:
            course = repr((spec.optimizer, spec.learning_rate_schedule, spec.averaging, spec.sampling))
            alike.setdefault((spec.audit, trial.trace, spec.delta, trial.parameters, course), []).append(trial)
    for group in alike.values():
        first = group[0]
        assert first.spec.audit is not None
        claim, examples = first.worst_case.epsilon, first.dataset.train_size
        found = prospect(first.spec, first.spec.audit, first.trace, claim, examples, first.parameters)
        yield [trial.spec.key for trial in group], found
