"""Runs whose batches take turns, or whose noise is correlated, as runs of independent rounds that dominate them.

Theorems and proofs: docs/accounting-proofs.md, "Correlated noise". In short, for the matrix C of the strategy:

- Cyclic Poisson batches and C with at most as many bands as a cycle has steps: all that a step of one example touches
  ends before its next turn. So its turns are sampled Gaussians with rate q, one for each cycle that was begun.
- One fixed order of every epoch: the run is one Gaussian, whose sensitivity is a norm of sums of columns of C.

Any other pair of batches and correlated noise is refused.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import assert_never

from dpsweep.accounting.errors import UnsupportedMechanism, count_of
from dpsweep.accounting.mechanism.noise_strategies import (
    INDEPENDENT,
    CorrelatedNoise,
    IndependentNoise,
    NoiseStrategy,
    bands_of,
    prefix_sum_errors,
)
from dpsweep.accounting.mechanism.samplings import (
    CyclicPoissonSampling,
    Draws,
    FixedOrderSampling,
    PoissonSampling,
    Sampling,
)
from dpsweep.accounting.mechanism.toeplitz import column_norm, repeated_norm
from dpsweep.accounting.mechanism.trace import Segment, Trace, join_segments, require_supported

_ROUND_DOWN = 1.0 - 4e-9
"""Undoes the inflation of an upper bound on a norm, and more."""


def squared_errors(trace: Trace) -> tuple[float, float] | None:
    """Return mean and largest squared error of the sums of all gradients up to a step, as `prefix_sum_errors` does.

    None without noise, and with noise that changes.
    """
    if len(trace.segments) != 1 or not trace.is_private:
        return None
    return prefix_sum_errors(trace.strategy, trace.steps, trace.segments[0].noise_multiplier)


def as_independent(trace: Trace, group_size: int = 1) -> Trace:
    """Return a run of independent rounds that dominates ``trace`` for any ``group_size`` examples.

    It has other steps than the run, so that nothing recorded by step belongs to it (`require_step_by_step`).

    Raises: UnsupportedMechanism for correlated noise without a known theorem here, and for groups of several
    examples whose turns may differ.
    """
    if not takes_turns(trace) and trace.strategy == INDEPENDENT:
        return trace
    if group_size > 1 and takes_turns(trace):
        raise UnsupportedMechanism(
            f"groups of {group_size} in cyclic Poisson batches have no common round, as their members may take turns "
            "in different steps; use the accountant 'pld', which goes from one example to the next"
        )
    match trace.strategy:
        case IndependentNoise():
            segments = join_segments(map(_turns_of_one, trace.segments))
        case strategy:
            segments = (_dominating(_only_segment(trace, strategy), strategy),) if trace.segments else ()
    return replace(trace, segments=segments, strategy=INDEPENDENT)


def steps_apart(sampling: Sampling, steps: int) -> int:
    """Return the steps between two participations of an example, to which noise is fitted.

    They are ``steps`` where an example takes part once, or where chance decides.
    """
    match sampling:
        case FixedOrderSampling(steps_per_epoch=batches):
            return min(batches, steps)
        case _:
            return steps


def require_step_by_step(trace: Trace) -> None:
    """Raise `UnsupportedMechanism` unless the cost of one example follows from its contribution to each step."""
    require_supported(trace)
    if not all(costs_by_step(segment.sampling, trace.strategy) for segment in trace.segments):
        raise UnsupportedMechanism(
            "no epsilon of given examples is proven here for cyclic Poisson batches or correlated noise; ask for that "
            "of the worst case"
        )


def costs_by_step(sampling: Sampling, strategy: NoiseStrategy) -> bool:
    """Return whether epsilons of single examples are proven: a round costs what the example contributes to it."""
    match strategy:
        case IndependentNoise():
            return sampling.draws is Draws.ALLOCATED or _has_common_pairs(sampling)
        case _:
            return False


def have_common_rounds(trace: Trace, group_size: int) -> bool:
    """Return whether pairs are known that dominate the rounds of any ``group_size`` examples.

    Raises: UnsupportedMechanism for a sampling or noise strategy that is not known.
    """
    require_supported(trace)
    return group_size == 1 or all(_has_common_pairs(segment.sampling) for segment in trace.segments)


def _has_common_pairs(sampling: Sampling) -> bool:
    """Return whether a pair is known for a round of any members, whatever each contributes."""
    match sampling.draws:
        case Draws.INDEPENDENT | Draws.SUBSET | Draws.EPOCH:
            return True
        case Draws.IN_TURN | Draws.ALLOCATED:
            return False
        case unknown:
            assert_never(unknown)


def turns_attain_pairs(trace: Trace) -> bool:
    """Return whether the rounds of `as_independent` are attained by some example, as far as turns and noise decide it.

    With cyclic Poisson batches it is the example whose turn comes first: no norm of its columns is cut if the run ends
    with a cycle. In one fixed order the bound is rounded up, and is not the run's own.
    """
    if trace.strategy == INDEPENDENT:
        return len(trace.segments) <= 1 or not takes_turns(trace)
    return all(
        isinstance(segment.sampling, CyclicPoissonSampling) and segment.steps % segment.sampling.cycle_length == 0
        for segment in trace.segments
    )


def takes_turns(trace: Trace) -> bool:
    """Return whether there are steps that some examples cannot join, whatever is drawn."""
    return any(segment.sampling.draws is Draws.IN_TURN for segment in trace.segments)


def _turns_of_one(segment: Segment) -> Segment:
    """Return the steps in which it may be the turn of one example, at most."""
    match segment.sampling:
        case CyclicPoissonSampling(cycle_length=length, sample_rate=rate):
            return replace(segment, steps=-(-segment.steps // length), sampling=PoissonSampling(rate))
        case _:
            return segment


def _only_segment(trace: Trace, strategy: CorrelatedNoise) -> Segment:
    segment = trace.segments[0]
    if len(trace.segments) > 1:
        raise UnsupportedMechanism(
            f"{strategy.words} is accounted for at one level of noise and with one sampling, but the run has "
            f"{len(trace.segments)} segments; use the schedule constant, or independent noise"
        )
    if segment.steps > strategy.steps:
        raise UnsupportedMechanism(
            f"{strategy.words} was made for {count_of(strategy.steps, 'step')}, but the run has {segment.steps}; "
            "make it for as many"
        )
    return segment


def _dominating(segment: Segment, strategy: CorrelatedNoise) -> Segment:
    match segment.sampling:
        case CyclicPoissonSampling(cycle_length=length):
            bands = bands_of(strategy)
            if bands > length:
                raise UnsupportedMechanism(
                    f"{strategy.words} reaches over {bands} steps, but a cycle has {length}: sampling is proven to "
                    "amplify only up to one cycle; use banded noise with at most as many bands, or fixed_order"
                )
            return _turns_of_one(segment)
        case FixedOrderSampling(steps_per_epoch=batches):
            if segment.side_queries:
                raise UnsupportedMechanism(
                    f"side queries beside {strategy.words} in one fixed order have no bound here; leave them out"
                )
            ratio = _repeated_over_one(strategy, segment.steps, batches)
            return Segment(0, 1, PoissonSampling(1.0), segment.noise_multiplier / ratio)
        case other:
            raise UnsupportedMechanism(
                f"no bound for {strategy.words} with {other.words} is proven here; use cyclic_poisson with at least as "
                "many groups as bands, or fixed_order"
            )


@functools.lru_cache(maxsize=64)  # a calibration asks at every noise multiplier, and a million steps take a second
def _repeated_over_one(strategy: CorrelatedNoise, steps: int, apart: int) -> float:
    """Return an upper bound on the sensitivity of an example that takes part every ``apart`` steps, over that of one
    participation.
    """
    column = strategy.column()
    return repeated_norm(column, steps, apart) / (column_norm(column) * _ROUND_DOWN)
