"""CPU seconds of the epsilons so far of whole trials, beside one account of each: python -m benchmarks.so_far"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.calibration.so_far import cost_so_far
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace

_CASES: Final = {
    "digits, 20 epochs": ((0.052, 1.2), (20, 20)),
    "MNIST, 60 epochs": ((0.0043, 0.8), (60, 234)),
    "a table, 100 epochs": ((0.01, 1.0), (100, 100)),
    "rare batches, 200 epochs": ((0.001, 0.6), (200, 1000)),
}
"""(sample rate, noise multiplier), (epochs, steps of each)."""
_DELTA: Final = 1e-5


def _trace(rate: float, noise: float, ends: Sequence[int], segments: int) -> Trace:
    length = ends[-1] // segments
    parts = (Segment(at * length, length, PoissonSampling(rate), noise * 0.99**at) for at in range(segments))
    return Trace(60_000, segments=tuple(parts))


def main() -> None:
    """Print a line for each case, with one noise level, with ten, and with sixty."""
    print(f"{'run':28}{'levels':>8}{'all epochs':>12}{'one account':>13}{'epsilons':>10}")
    for name, ((rate, noise), (epochs, steps)) in _CASES.items():
        ends = tuple(range(steps, epochs * steps + 1, steps))
        for segments in (1, 10, 60):
            trace = _trace(rate, noise, ends, segments)
            begun = time.process_time()
            whole = account(trace, _DELTA, "pld")
            once = time.process_time() - begun
            begun = time.process_time()
            shown = [cost_so_far(trace, ends, step, whole) for step in ends]
            took = time.process_time() - begun
            print(f"{name:28}{segments:8}{took:11.2f}s{once:12.2f}s{len(set(shown)):10}")


if __name__ == "__main__":
    main()
