"""Simulates audits of a planned run, before any training.

Scores from the iterates are drawn from the trade-off function of the run, which no attack on a record passes. So are
the scores of rows. An audit of the run shows about as much if its canaries attain the claim, as made-up ones do from
the iterates of plain batches, and less otherwise. Canaries that are seen in the last model have parameters of their
own, which are trained here as in the run. The audit itself uses the same tests.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from dpsweep.accounting.audits import StatedRun, Uniforms, random_scores
from dpsweep.accounting.mechanism.correlated import squared_errors
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.workers.dataset_description import NO_GROUPS
from dpsweep.workers.noise.gaussian_sources import SeededNoise
from dpsweep.workers.noise.step_noise import make_step_noise
from dpsweep.workers.sampling.samplers import SeededRows
from dpsweep.workers.spec import AuditSpec, TrialSpec
from dpsweep.workers.training.canary_evidence import CanaryBatches, OwnParameters
from dpsweep.workers.training.gradient_canaries import canary_share, other_directions, seen_run, times_of
from dpsweep.workers.training.one_run_audit import audit_gradient_scores, audit_scores
from dpsweep.workers.training.optimizers import make_learning_rate_schedule

SIMULATED: Final = 10
"""Simulated audits for each number of canaries, in pairs of opposite luck (`_Opposite`).

At a claim of 1 their standard deviation is a fifth of their mean. All claims and mechanisms are simulated by the same
numbers: without the pairs, the mean of so few would be too high, or too low, for all of them at once.
"""
GOALS: Final = {"iterates": 0.6, "last_model": 0.3}
"""Share of the claim that an audit should show, by transcript."""
_MOST_MISSES: Final = 1
"""Simulated audits that may stay below the goal where a number of canaries is enough."""
_FEW: Final = 6
"""Simulated audits with the largest number of canaries, where no number is enough."""
_POOL: Final = (4000, 20_000)
"""Least and largest number of canaries whose own parameters are trained, half of them with contributions."""
_MOST_DRAWS: Final = 100_000_000
"""Draws of noise for these, about: longer runs train fewer."""
_NUMBERS: Final = (100, 200, 300, 500, 1000, 2000, 3000, 5000, 10_000, 20_000)
"""Numbers of canaries among which the least that is enough is sought."""

_Draw = Callable[[NDArray[np.bool_], Uniforms], NDArray[np.float64]]
"""Whether each canary is included, uniform numbers -> scores."""


@dataclass(frozen=True)
class _Opposite:
    """Draws the complements of the numbers of ``draws``: a score that was below the median is as far above it."""

    draws: Uniforms

    def random(self, size: int, /) -> NDArray[np.float64]:
        return 1.0 - self.draws.random(size)


@dataclass(frozen=True)
class AuditProspect:
    """Results of simulated audits of a planned run.

    `audit`: as asked for.
    `claim`: epsilon of the trial.
    `of_canary`: epsilon that canaries pay, below the claim where a filter or further releases are part of that.
    `shown`: lower bounds on epsilon of `SIMULATED` simulated audits, ascending.
    `enough`: least tried number of canaries with which all audits but one show the share of `GOALS`; None if no tried
    number is, of those that data or model have room for.
    `most`: then the largest of these, and what so many show in a few audits on average; None if there is no room for
    any.
    `noise_factor`: the canaries move the model about as far as noise so many times as large would. It is 1 where they
    move none of it, and None where the size of the model is unknown.
    `left_out`: expected share of training examples that the audit leaves out.
    """

    audit: AuditSpec
    claim: float
    of_canary: float
    shown: tuple[float, ...]
    enough: int | None
    most: tuple[int, float] | None
    noise_factor: float | None
    left_out: float


def prospect(
    spec: TrialSpec, audit: AuditSpec, trace: Trace, claim: float, examples: int, parameters: int | None
) -> AuditProspect:
    """Simulate audits of a planned run. `trace`: as planned. `examples`: for training. `parameters`: of the model."""
    bounds, factor = simulated(spec, audit, trace, parameters), noise_factor(spec, audit, trace, parameters)
    shown = sorted(bounds(audit.canaries))
    match audit.kind:
        case "rows":
            room, of_canary, left_out = examples, claim, audit.canaries / 2.0 / examples
        case "gradient":
            room, of_canary, left_out = parameters or _NUMBERS[-1], _stated(spec, trace).of_canary, 0.0
        case _:
            assert_never(audit.kind)
    goal = GOALS[audit.transcript] * claim
    fitting = [count for count in _NUMBERS if count <= room]
    enough, most = next((count for count in fitting if _suffice(bounds(count), goal)), None), None
    if enough is None and fitting:
        most = fitting[-1], statistics.fmean(itertools.islice(bounds(fitting[-1]), _FEW))
    return AuditProspect(audit, claim, of_canary, tuple(shown), enough, most, factor, left_out)


def simulated(
    spec: TrialSpec, audit: AuditSpec, trace: Trace, parameters: int | None
) -> Callable[[int], Iterator[float]]:
    """Return what yields the bounds of `SIMULATED` simulated audits with so many canaries. Others as in `prospect`."""
    run, draw = _stated(spec, trace), _draws_of(spec, audit, trace)
    return lambda count: _bounds(replace(audit, canaries=count), run, parameters, draw)


def _stated(spec: TrialSpec, trace: Trace) -> StatedRun:
    seen = seen_run(trace, canary_share(trace))
    return StatedRun(seen, seen, spec.delta)


def _draws_of(spec: TrialSpec, audit: AuditSpec, trace: Trace) -> _Draw:
    if audit.own_parameters:
        return _trained(spec, trace)
    return functools.partial(random_scores, _stated(spec, trace))


def _trained(spec: TrialSpec, trace: Trace) -> _Draw:
    """Train many canaries' own parameters as planned, with a sensitivity of 1. Return what draws scores from theirs."""
    count = int(np.clip(_MOST_DRAWS // trace.steps, *_POOL))
    batches, included = CanaryBatches(spec, count, trace.dataset_size, SeededRows(0)), np.arange(count) < count // 2
    own, noise = OwnParameters(spec, count), make_step_noise(trace.strategy, SeededNoise(0, torch.device("cpu")))
    rate = make_learning_rate_schedule(spec.learning_rate_schedule, trace.steps, max(1, trace.steps // spec.epochs))
    multipliers = [segment.noise_multiplier for segment in trace.segments for _ in range(segment.steps)]
    length = times_of(trace) * canary_share(trace)
    for step, multiplier in enumerate(multipliers):
        added = torch.from_numpy(batches.next() * included * length)
        noisy, spread = noise.released({"canaries": added}, multiplier)
        own.step(noisy["canaries"].double().numpy(), rate(step), spread)
    inside, outside = np.sort(own.total[included]), np.sort(own.total[~included])

    def draw(included: NDArray[np.bool_], draws: Uniforms) -> NDArray[np.float64]:
        uniform = draws.random(len(included))
        return np.where(included, _quantiles(inside, uniform), _quantiles(outside, uniform))

    return draw


def _quantiles(ascending: NDArray[np.float64], uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    places = (uniform * len(ascending)).astype(np.int64)
    return ascending[np.minimum(places, len(ascending) - 1)]


def _suffice(bounds: Iterator[float], goal: float) -> bool:
    """Return whether all but `_MOST_MISSES` reach the goal; the search ends where they do not."""
    misses = 0
    for bound in bounds:
        misses += bound < goal
        if misses > _MOST_MISSES:
            return False
    return True


def _bounds(audit: AuditSpec, run: StatedRun, parameters: int | None, draw: _Draw) -> Iterator[float]:
    """Yield the bounds of simulated audits, whose scores ``draw`` makes."""
    for seed in range(SIMULATED):
        generator = np.random.default_rng((seed // 2, audit.canaries))
        included = generator.random(audit.canaries) < 0.5
        draws: Uniforms = _Opposite(generator) if seed % 2 else generator
        if audit.leaves_out_rows:
            nobody = np.zeros(len(included), np.int64)
            scores = draw(included, draws)
            yield audit_scores(scores, included, nobody, NO_GROUPS, audit.confidence, run.delta).everyone.epsilon
            continue
        references, _ = other_directions(audit, parameters or 6 * audit.canaries)
        included = np.append(included, np.zeros(references, np.bool_))
        yield audit_gradient_scores(draw(included, draws), included, audit, run, seed).everyone.epsilon


def noise_factor(spec: TrialSpec, audit: AuditSpec, trace: Trace, parameters: int | None) -> float | None:
    """Return how much larger noise would move the sum of all gradients as far as noise and gradient canaries do.

    Half of the canaries add in their directions what they contribute to all steps, and noise adds to each parameter.
    1 for canaries that move none of the model's.
    """
    if audit.leaves_out_rows or audit.own_parameters:
        return 1.0
    if parameters is None:
        return None
    rate = spec.sampling.expected_size(trace.dataset_size) / trace.dataset_size
    added = rate * trace.steps * trace.unit.rows * times_of(trace) * canary_share(trace)
    errors = squared_errors(trace)
    noise = sum(each.steps * each.noise_multiplier**2 for each in trace.segments) if errors is None else errors[1]
    return math.sqrt(1.0 + audit.canaries / 2.0 * added**2 / (noise * parameters))
