"""Time of a private step with correlated noise over that with independent noise: python -m benchmarks.noise_steps

[--model NAME] [--batch N] [--threads 1]. A step is clipping, noise as in a trial, and the update of SGD. Strategies
take turns, and a ratio is relative to independent noise in the same turn; the median over the turns is printed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from benchmarks.steps import CLIP, NOISE_MULTIPLIER, SETTLED, Step, Training, clipping, updating
from benchmarks.training import built, take_turns, whole_threads
from benchmarks.workloads import WORKLOADS
from dpsweep.accounting.mechanism.noise_strategies import (
    INDEPENDENT,
    BandedNoise,
    BufferedNoise,
    InverseRootNoise,
    LambdaNoise,
    NoiseStrategy,
    kept_bytes,
)
from dpsweep.workers.noise.noise_sources import make_noise_source
from dpsweep.workers.noise.step_noise import make_step_noise

_STEPS: Final = 2000
_TURNS: Final = 20
STRATEGIES: Final[Mapping[str, Callable[[], NoiseStrategy]]] = {
    "banded, 16": lambda: BandedNoise(16, _STEPS),
    "bisr, 16": lambda: InverseRootNoise(16, _STEPS),
    "blt, 3": lambda: BufferedNoise(3, _STEPS, _STEPS),
    "lambda_cgd": lambda: LambdaNoise(0.9, _STEPS),
}


def step_with(strategy: NoiseStrategy, model: nn.Module, training: Training) -> Step:
    """Return a private step with noise of the strategy."""
    clipped_mean = clipping(model, training)
    noise = make_step_noise(strategy, make_noise_source("seeded", 0, next(model.parameters()).device))

    def mean(x: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        return noise.released(clipped_mean(x, y), NOISE_MULTIPLIER * CLIP / len(x)).values

    return updating(model, mean)


def main() -> None:
    """Print a line for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wrn16_4", choices=WORKLOADS)
    parser.add_argument("--batch", type=int, help="examples of a step")
    parser.add_argument("--threads", type=whole_threads, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workload, cpu = WORKLOADS[options.model], torch.device("cpu")
    batch = options.batch or workload.batch
    x, y = workload.examples(batch, cpu)
    strategies = {"plain": INDEPENDENT, **{name: make() for name, make in STRATEGIES.items()}}
    runs = {
        name: partial(step_with(strategy, built(workload, cpu), workload.training), x, y)
        for name, strategy in strategies.items()
    }
    for run in runs.values():
        for _ in range(SETTLED):
            run()
    samples = take_turns(runs, dict.fromkeys(runs, _TURNS), 1, 0.0, cpu)
    taken = statistics.median(seconds for seconds, _ in samples["plain"])
    print(f"{options.model}, batches of {batch}, {options.threads} thread: {taken * 1e3:.0f} ms with independent noise")
    for name in STRATEGIES:
        ratios = sorted(ratio for _, ratio in samples[name])
        told = f"{statistics.median(ratios):.3f} times, {ratios[0]:.3f} to {ratios[-1]:.3f}"
        print(f"{name:12} {told}; {kept_bytes(strategies[name])} bytes a weight")


if __name__ == "__main__":
    main()
