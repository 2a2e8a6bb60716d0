"""CPU seconds of the epsilons so far of whole trials, beside one account of each: python -m benchmarks.so_far"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.calibration.so_far import cost_so_far
from dpsweep.accounting.mechanism.samplings import (
    FixedBatchSampling,
    PoissonSampling,
    RandomAllocationSampling,
    Sampling,
    ShuffledSampling,
    TruncatedPoissonSampling,
)
from dpsweep.accounting.mechanism.trace import Segment, Trace

_CASES: Final = {
    "digits, 20 epochs": (1.2, 20, 20),
    "MNIST, 60 epochs": (0.8, 60, 234),
    "a table, 100 epochs": (1.0, 100, 100),
    "rare batches, 200 epochs": (0.6, 200, 1000),
}
"""Noise multiplier, epochs, and steps of each."""
_SAMPLINGS: Final[Mapping[str, Callable[[int], Sampling]]] = {
    "poisson": lambda steps: PoissonSampling(1.0 / steps),
    "truncated": lambda steps: TruncatedPoissonSampling(60_000, 1.0 / steps, round(1.1 * 60_000 / steps)),
    "fixed": lambda steps: FixedBatchSampling(60_000, 60_000 // steps),
    "shuffled": lambda steps: ShuffledSampling.of_sizes(60_000, 60_000 // steps),
    "allocated": RandomAllocationSampling,
}
_DELTA: Final = 1e-5


def _trace(sampling: Sampling, noise: float, ends: Sequence[int], segments: int) -> Trace:
    length = ends[-1] // segments
    parts = (Segment(at * length, length, sampling, noise * 0.5 ** (at / segments)) for at in range(segments))
    return Trace(60_000, adjacency=sampling.adjacencies[0], segments=tuple(parts))


def main() -> None:
    """Print a line for each case and sampling, with one noise level, with ten, sixty and two hundred."""
    print(f"{'run':26}{'sampling':11}{'levels':>7}{'all epochs':>12}{'one account':>13}{'epsilons':>10}")
    for (name, (noise, epochs, steps)), (drawn, of_steps) in itertools.product(_CASES.items(), _SAMPLINGS.items()):
        ends = tuple(range(steps, epochs * steps + 1, steps))
        for segments in (1, 10, 60, 200):
            trace = _trace(of_steps(steps), noise, ends, segments)
            begun = time.process_time()
            whole = account(trace, _DELTA, "auto")
            once = time.process_time() - begun
            begun = time.process_time()
            shown = [cost_so_far(trace, ends, step, whole) for step in ends]
            took = time.process_time() - begun
            print(f"{name:26}{drawn:11}{segments:7}{took:11.2f}s{once:12.2f}s{len(set(shown)):10}", flush=True)


if __name__ == "__main__":
    main()
