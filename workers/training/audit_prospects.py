"""Simulates audits of a planned run, before any training, as if every canary showed all it may.

Scores are drawn from the trade-off function of the run, which no attack on a record passes. The audit itself uses the
same tests. An audit of the run shows about as much if its canaries attain the claim, as made-up ones do from the
iterates of plain batches, and less otherwise.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dpsweep.accounting import account
from dpsweep.accounting.audits import StatedRun, scores_of
from dpsweep.accounting.mechanism.correlated import squared_errors
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.workers.spec import AuditSpec, TrialSpec
from dpsweep.workers.training.gradient_canaries import other_directions, times_of
from dpsweep.workers.training.one_run_audit import audit_gradient_scores, audit_scores

SIMULATED: Final = 9
"""Simulated audits for each number of canaries."""
GOALS: Final = {"iterates": 0.6, "last_model": 0.3}
"""Share of the claim that an audit should show, by transcript."""
_MOST_MISSES: Final = 1
"""Simulated audits that may stay below the goal where a number of canaries is enough."""
_NUMBERS: Final = (100, 200, 300, 500, 1000, 2000, 3000, 5000, 10_000, 20_000)
"""Numbers of canaries among which the least that is enough is sought."""


@dataclass(frozen=True)
class AuditProspect:
    """Results of simulated audits of a planned run, if every canary shows all that the run allows.

    `audit`: as asked for. `claim`: epsilon of the trial. `shown`: lower bounds on epsilon of `SIMULATED` simulated
    audits, ascending. `enough`: least tried number of canaries with which all audits but one show the share of
    `GOALS`; None if no tried number is, of those that data or model have room for. `noise_factor`: the canaries move
    the model about as far as noise so many times as large would; 1 for rows, None where the size of the model is
    unknown. `left_out`: expected share of training examples that the audit leaves out.
    """

    audit: AuditSpec
    claim: float
    shown: tuple[float, ...]
    enough: int | None
    noise_factor: float | None
    left_out: float


def prospect(
    spec: TrialSpec, audit: AuditSpec, trace: Trace, claim: float, examples: int, parameters: int | None
) -> AuditProspect:
    """Simulate audits of a planned run. `trace`: as planned. `examples`: for training. `parameters`: of the model."""
    of_steps = replace(trace, filter=None, releases=())
    if trace.filter is not None:
        of_steps = _paid_for(of_steps, claim, spec.delta)
    run = StatedRun(of_steps, of_steps, spec.delta)
    room = examples if audit.kind == "rows" else parameters or math.inf
    shown = sorted(_bounds(audit, run, parameters))
    numbers = (count for count in _NUMBERS if count <= room)
    tried = (replace(audit, canaries=count) for count in numbers)
    enough = next((each.canaries for each in tried if _suffices(each, run, claim, parameters)), None)
    if audit.kind == "rows":
        return AuditProspect(audit, claim, tuple(shown), enough, 1.0, audit.canaries / 2.0 / examples)
    return AuditProspect(audit, claim, tuple(shown), enough, noise_factor(spec, audit, trace, parameters), 0.0)


def _paid_for(trace: Trace, claim: float, delta: float) -> Trace:
    """Return the first steps of a run, as many as the claim pays for: a filter then stops a canary."""
    steps = bisect.bisect_right(
        range(1, trace.steps + 1), claim, key=lambda count: account(trace.until(count), delta).epsilon
    )
    return trace.until(max(1, steps))


def _suffices(audit: AuditSpec, run: StatedRun, claim: float, parameters: int | None) -> bool:
    misses = 0
    for bound in _bounds(audit, run, parameters):
        misses += bound < GOALS[audit.transcript] * claim
        if misses > _MOST_MISSES:
            return False
    return True


def _bounds(audit: AuditSpec, run: StatedRun, parameters: int | None) -> Iterator[float]:
    """Yield the bounds of simulated audits."""
    for seed in range(SIMULATED):
        generator = np.random.default_rng((seed, audit.canaries))
        included = generator.random(audit.canaries) < 0.5
        if audit.kind == "rows":
            nobody = np.zeros(len(included), np.int64)
            scores = scores_of(run, included, generator)
            yield audit_scores(scores, included, nobody, ("all",), audit.confidence, run.delta).everyone.epsilon
            continue
        references, _ = other_directions(audit.canaries, parameters or 6 * audit.canaries)
        included = np.append(included, np.zeros(references, np.bool_))
        scores = scores_of(run, included, generator)
        yield audit_gradient_scores((scores,), included, audit, run, seed).everyone.epsilon


def noise_factor(spec: TrialSpec, audit: AuditSpec, trace: Trace, parameters: int | None) -> float | None:
    """Return how much larger noise would move the sum of all gradients as far as noise and gradient canaries do.

    Half of the canaries add in their directions what they contribute to all steps, and noise adds to each parameter.
    """
    if parameters is None:
        return None
    rate = spec.sampling.expected_size(trace.dataset_size) / trace.dataset_size
    added = rate * trace.steps * trace.unit.rows * times_of(trace)
    errors = squared_errors(trace)
    noise = sum(each.steps * each.noise_multiplier**2 for each in trace.segments) if errors is None else errors[1]
    return math.sqrt(1.0 + audit.canaries / 2.0 * added**2 / (noise * parameters))
