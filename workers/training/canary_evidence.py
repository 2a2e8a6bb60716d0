"""How gradient canaries join batches, and what the noisy sums of the steps, or the last model, show of each."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import nn

from dpsweep.accounting.errors import UnsupportedMechanism
from dpsweep.accounting.mechanism.buffered import Pairs
from dpsweep.accounting.mechanism.noise_strategies import INDEPENDENT, Memory, NoiseStrategy, Recurrence
from dpsweep.accounting.mechanism.samplings import (
    CyclicPoissonSampling,
    FixedBatchSampling,
    FixedOrderSampling,
    PoissonSampling,
    RandomAllocationSampling,
    ShuffledSampling,
)
from dpsweep.accounting.mechanism.toeplitz import column_norm
from dpsweep.workers.sampling.samplers import (
    AllocatedSampler,
    CyclicPoissonSampler,
    FixedOrderSampler,
    PoissonSampler,
    RowDraws,
    Sampler,
    ShuffledSampler,
    planned_sampling,
)
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.optimizers import make_average, make_optimizer

Array = NDArray[np.float64]


class CanaryBatches:
    """Draws canaries into batches as units of the claim are: examples, or users with all their rows.

    `rate`: probability that a row of a canary joins a step, with turns one that is its turn.
    `rows`: rows of each canary.
    `block`: number of steps among which each canary joins a secret one, 0 for other samplings.
    `cycle`: steps from one turn of a canary to the next, 0 where there are no turns.
    `is_known`: whether the steps that it joins are no secret of the claim.
    """

    def __init__(self, spec: TrialSpec, count: int, size: int, draws: RowDraws) -> None:
        batch = spec.sampling.expected_size(size)
        self.rate, self.count = batch / size, count
        self.rows = spec.unit.rows
        self.is_known, self.block, self.cycle = False, 0, 0
        planned, copies = planned_sampling(spec.sampling, size), -(-count * self.rows // size)
        self._turns: CyclicPoissonSampler | None = None
        match planned:
            case RandomAllocationSampling():
                self.block = planned.steps_per_round
                self._sampler: Sampler = AllocatedSampler(count, planned.steps_per_round, draws)
            case ShuffledSampling() | FixedOrderSampling():
                self.is_known = True
                epochs = ShuffledSampler if isinstance(planned, ShuffledSampling) else FixedOrderSampler
                each = -(-count * self.rows // planned.steps_per_epoch)
                self._sampler = epochs(planned.steps_per_epoch * each, each, draws)
            case CyclicPoissonSampling():
                self.cycle, self.rate = planned.cycle_length, planned.sample_rate
                turns = CyclicPoissonSampler(copies * size, self.cycle, copies * self.cycle * batch, draws)
                self._sampler, self._turns = turns, turns
            case PoissonSampling() | FixedBatchSampling():  # each row with the probability of an example
                self._sampler = PoissonSampler(copies * size, copies * batch, draws)
            case unknown:
                raise UnsupportedMechanism(f"no audit knows how {unknown.words} draw canaries; leave the audit out")

    @property
    def law(self) -> tuple[Array, Array]:
        """Numbers of rows of a canary in a batch, and their log-probabilities, both [rows + 1]."""
        drawn = np.arange(self.rows + 1.0)
        ways = special.gammaln(self.rows + 1) - special.gammaln(drawn + 1) - special.gammaln(self.rows - drawn + 1)
        return drawn, ways + special.xlogy(drawn, self.rate) + special.xlog1py(self.rows - drawn, -self.rate)

    @property
    def turns(self) -> NDArray[np.int64]:
        """Step of a cycle that is the turn of each canary, [count]."""
        assert self._turns is not None, "the sampling has turns"
        return self._turns.group_of[: self.count]

    def next(self) -> Array:
        """Return how many rows of each canary join the next step, [count]."""
        rows = self._sampler.next_batch()
        joined = np.bincount(rows[rows < self.count * self.rows] // self.rows, minlength=self.count)
        return joined.astype(np.float64)

    def state(self) -> dict[str, Any]:
        return self._sampler.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._sampler.restore(state)


class CanaryEvidence(Protocol):
    """Log-likelihood ratios of taking part, from the noisy sums of the steps so far."""

    @property
    def total(self) -> Array:
        """Return the ratios of all canaries, [count]."""
        ...

    def see(self, seen: Array, drawn: Array, length: float, std: float) -> None:
        """Take in a step.

        `seen`: projections [directions] of the noisy sum less the real examples, witnesses last.
        `drawn`: as in `CanaryBatches.next`.
        `length`: norm of a row's contribution.
        `std`: as in `StepNoise.released`.
        """
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


def make_evidence(batches: CanaryBatches, strategy: NoiseStrategy) -> CanaryEvidence:
    """Return what steps with noise of the ``strategy`` show of canaries in ``batches``."""
    if strategy == INDEPENDENT and not batches.cycle:
        return StepEvidence(batches)
    column = strategy.column()
    norm = 1.0 if strategy == INDEPENDENT else column_norm(column)
    whitening = Whitening(strategy.memory(), norm)
    return TurnEvidence(batches, whitening, column / norm) if batches.cycle else OrderEvidence(batches, whitening)


class StepEvidence:
    """Evidence of steps with independent noise.

    Noise has the stated standard deviation, unless the witnesses show less than half of it. If the noise of a step is
    that of the step before, by the witnesses, then their difference is what has changed in the sum.
    """

    def __init__(self, batches: CanaryBatches) -> None:
        self._batches, self._count = batches, (count := batches.count)
        self.total: Array = np.zeros(count)
        self._block, self._in_block = np.full(count, -np.inf), 0
        self._last: Array = np.empty(0)
        self._last_drawn: Array = np.zeros(count)
        self._last_length = 0.0

    def see(self, seen: Array, drawn: Array, length: float, std: float) -> None:
        noise, again = _measured(seen[self._count :], std), math.inf
        if len(self._last):
            again = _measured((seen - self._last)[self._count :], math.sqrt(2.0) * noise)
        self._last, before = seen, self._last
        self._last_drawn, drawn_before = drawn, self._last_drawn
        self._last_length, length_before = length, self._last_length
        if self._batches.block:
            self._see_block(seen[: self._count], length, noise)
        elif again < noise:
            changed = (seen - before)[: self._count]
            self._see(
                changed, *self._changes(drawn * length, drawn_before * length_before, length, length_before), again
            )
        elif length > 0.0:
            self._see(seen[: self._count], *self._changes(drawn * length, 0.0 * drawn, length, 0.0), noise)

    def _changes(self, now: Array, before: Array, length: float, length_before: float) -> tuple[Array, Array]:
        """Return what a canary that takes part may have changed, [count or 1, cases], and its log-probabilities."""
        if self._batches.is_known:
            return (now - before)[:, None], np.zeros(1)
        drawn, logs = self._batches.law
        if length_before == 0.0:
            return length * drawn[None], logs
        changes = length * drawn[:, None] - length_before * drawn
        return changes.reshape(1, -1), (logs[:, None] + logs).ravel()

    def _see(self, seen: Array, changes: Array, logs: Array, std: float) -> None:
        precision = 1.0 / max(std, 1e-9 * (float(np.abs(changes).max()) or 1.0)) ** 2
        ratios = logs + (seen[:, None] - changes / 2.0) * changes * precision
        self.total += np.logaddexp.reduce(ratios, axis=1)

    def _see_block(self, seen: Array, length: float, std: float) -> None:
        precision = (length / max(std, 1e-9 * length)) ** 2 if length > 0.0 else 0.0
        self._block = np.logaddexp(self._block, (seen / max(length, 1e-300) - 0.5) * precision)
        self._in_block += 1
        if self._in_block == self._batches.block:
            self.total += self._block - math.log(self._in_block)
            self._block, self._in_block = np.full(self._count, -np.inf), 0

    def state(self) -> dict[str, Any]:
        arrays = {"total": self.total, "block": self._block, "last": self._last, "last_drawn": self._last_drawn}
        return {**_as_tensors(arrays), "in_block": self._in_block, "last_length": self._last_length}

    def restore(self, state: Mapping[str, Any]) -> None:
        names = ("total", "block", "last", "last_drawn")
        self.total, self._block, self._last, self._last_drawn = _as_arrays(state, names)
        self._in_block, self._last_length = state["in_block"], state["last_length"]


class Whitening:
    """Turns the noise of each step into its draw, step by step: C z = w, over the norm of a column of C."""

    def __init__(self, memory: Memory, norm: float) -> None:
        self._memory, self._norm, self.earlier = memory, norm, np.zeros((0, 0))

    def next(self, values: Array) -> Array:
        """Return C times all values so far [n], in the row of this step."""
        memory = self._memory
        kept = max(len(memory.of_draws), len(memory.of_noise)) if isinstance(memory, Recurrence) else memory.kept
        if self.earlier.shape != (kept, len(values)):
            self.earlier = np.zeros((kept, len(values)))
        match memory:
            case Recurrence():  # row i holds what the values and draws so far add to the draw of i steps later
                first, noise, draws = memory.of_draws[0], memory.of_noise, memory.of_draws
                self.earlier[: len(noise)] += np.outer(noise, values)
                found: Array = self.earlier[0] / first
                self.earlier[: len(draws)] -= np.outer(draws, found)
                self.earlier = np.roll(self.earlier, -1, axis=0)
                self.earlier[-1] = 0.0
            case Pairs():
                found = values + memory.weights @ self.earlier
                self.earlier = memory.decays[:, None] * self.earlier + values
            case _:
                assert_never(memory)
        return np.asarray(found / self._norm)


class OrderEvidence:
    """Evidence of steps with correlated noise, where it is known which steps a canary joins.

    C times the noisy sums has independent noise, and C times what a canary adds as its mean.
    """

    def __init__(self, batches: CanaryBatches, whitening: Whitening) -> None:
        self._count, self.total = batches.count, np.zeros(batches.count)
        self._seen, self._added = whitening, copy.deepcopy(whitening)

    def see(self, seen: Array, drawn: Array, length: float, std: float) -> None:
        white, added = self._seen.next(seen / std), self._added.next(drawn * (length / std))
        self.total += added * (white[: self._count] - added / 2.0) / _variance(white[self._count :])

    def state(self) -> dict[str, Any]:
        return _as_tensors({"total": self.total, "seen": self._seen.earlier, "added": self._added.earlier})

    def restore(self, state: Mapping[str, Any]) -> None:
        self.total, self._seen.earlier, self._added.earlier = _as_arrays(state, ("total", "seen", "added"))


class TurnEvidence:
    """Evidence of steps in cycles: a canary joins a step that is its turn by a secret coin, and no other.

    C has at most as many bands as a cycle has steps, so that what a turn has touched ends before the next one.
    """

    def __init__(self, batches: CanaryBatches, whitening: Whitening, column: Array) -> None:
        """`column`: the first one of C, of norm 1."""
        self._batches, self._whitening = batches, whitening
        self._bands = np.zeros(batches.cycle)
        self._bands[: min(len(column), batches.cycle)] = column[: batches.cycle]
        self._step, count = 0, batches.count
        self._ended, self._length, self._products, self._squares = (np.zeros(count) for _ in range(4))

    @property
    def total(self) -> Array:
        return self._ended + self._of_turn(np.arange(self._batches.count))

    def see(self, seen: Array, drawn: Array, length: float, std: float) -> None:
        cycle, count = self._batches.cycle, self._batches.count
        white, age = self._whitening.next(seen / std), (self._step - self._batches.turns) % cycle
        starts = np.flatnonzero(age == 0)
        self._ended[starts] += self._of_turn(starts)
        self._length[starts] = length / std
        self._products[starts] = self._squares[starts] = 0.0
        band, precision = self._bands[age], 1.0 / _variance(white[count:])
        self._products += band * white[:count] * precision
        self._squares += band**2 * precision
        self._step += 1

    def _of_turn(self, canaries: NDArray[np.int64]) -> Array:
        """Return what the last turn of each of the ``canaries`` has shown so far; 0 before the first one."""
        length, rate = self._length[canaries], self._batches.rate
        exponents = length * (self._products[canaries] - length * self._squares[canaries] / 2.0)
        coins = np.logaddexp(special.xlog1py(1.0, -rate), math.log(rate) + exponents)
        return np.where(length > 0.0, coins, 0.0)

    def state(self) -> dict[str, Any]:
        arrays = {name: getattr(self, f"_{name}") for name in ("ended", "length", "products", "squares")}
        return {**_as_tensors({**arrays, "earlier": self._whitening.earlier}), "step": self._step}

    def restore(self, state: Mapping[str, Any]) -> None:
        names = ("ended", "length", "products", "squares", "earlier")
        self._ended, self._length, self._products, self._squares, self._whitening.earlier = _as_arrays(state, names)
        self._step = state["step"]


_NAME: Final = "canaries"


class OwnParameters:
    """Separate parameters of canaries, one for each, for audits of the last model; 0 before the first step.

    Such an audit takes the canaries' directions away from the model. The clipped sum of the real examples is projected
    off them before noise is added, which lengthens no contribution: the claim covers the run. The part of the noisy sum
    along the directions moves parameters of the canaries, by the optimiser and the average of the trial. The rest
    trains the model, which computes nothing from those parameters.

    Threat model: the adversary knows the directions, and sees all parameters before the first step and after the last
    one. It sees nothing between, no batch and no coin. The score of a canary is how far its parameter has moved against
    its direction.

    Scores are independent. Along a direction lies what one canary adds, and noise. Noise is isotropic and directions
    are orthogonal, so the noise along each is independent of all other noise. Nothing else of the run depends on the
    canaries' parameters: neither the model, nor bounds and noisy answers. Let all else be given, and which steps may be
    the turn of each canary. Then a parameter depends on coin, batches and noise of its canary alone, because optimisers
    move every coordinate by its own history. Parameters of canaries that take no part are noise of one distribution.
    Each score follows from the noisy sums, and so shows no more of its coin than the claim allows. Rounding is left
    aside.
    """

    def __init__(self, spec: TrialSpec, count: int) -> None:
        parameter = nn.Parameter(torch.zeros(count, dtype=torch.float64))
        self._parameters = {_NAME: parameter}
        self._optimizer = make_optimizer(spec.optimizer, self._parameters)
        self._average = make_average(spec.averaging, self._parameters) if spec.averaging else None

    def step(self, gradients: Array, factor: float, noise_std: float) -> None:
        """Take a step. `gradients`: [count], noisy and over the batch size. Others as in `Optimizer.step`."""
        self._optimizer.step({_NAME: torch.from_numpy(gradients)}, factor, noise_std)
        if self._average is not None:
            self._average.update(self._parameters)

    @property
    def total(self) -> Array:
        """Return how far each parameter has moved against its direction, [count]."""
        released = self._parameters if self._average is None else self._average.values
        moved: Array = -released[_NAME].detach().numpy()
        return moved

    def state(self) -> dict[str, Any]:
        average = None if self._average is None else self._average.state()
        values = self._parameters[_NAME].detach()
        return {"values": values, "optimizer": self._optimizer.state(), "average": average}

    def restore(self, state: Any) -> None:
        with torch.no_grad():
            self._parameters[_NAME].copy_(state["values"])
        self._optimizer.restore(state["optimizer"])
        if self._average is not None:
            self._average.restore(state["average"])


def _measured(witnesses: Array, std: float) -> float:
    """Return the standard deviation that the witnesses show if it is less than half of ``std``, else that."""
    found = math.sqrt(float(np.mean(witnesses**2))) if len(witnesses) else std
    return found if found < std / 2.0 else std


def _variance(white: Array) -> float:
    """Return the variance that witnesses show, which is 1 by the claim."""
    return max(_measured(white, 1.0), 1e-9) ** 2


def _as_tensors(arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}


def _as_arrays(state: Mapping[str, Any], names: Sequence[str]) -> list[Array]:
    return [state[name].numpy().copy() for name in names]
