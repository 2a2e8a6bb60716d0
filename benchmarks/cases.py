"""Trials that several benchmarks measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dpsweep.workers.spec import Component, DataSpec, NoiseSpec, NormSpec, Refreshes, SamplingSpec, TrialSpec

DELTA: Final = 1e-5
DIGITS: Final = tuple("0123456789")
KINDS: Final = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
"""The classes of CIFAR-10."""


@dataclass(frozen=True)
class Case:
    """A trial with Poisson batches and SGD.

    `rows`: number kept of each of ``classes``, all if None; `few`: the same when `shortened`. `tracked`: number of
    examples whose norms are measured at every step.
    """

    name: str
    data: DataSpec
    model: Component
    batch_size: int
    epochs: int
    learning_rate: float = 0.1
    bound: float = 1.0
    noise_multiplier: float = 1.0
    classes: Sequence[str] = ()
    rows: int | None = None
    few: int | None = None
    tracked: int = 0
    clipping: str = "flat"

    def shortened(self) -> Case:
        """Return the case for --quick: few rows, in batches of at most an eighth of them, and at most 200 tracked."""
        rows, batch_size = self.rows, self.batch_size
        if self.few is not None:
            rows, batch_size = self.few, max(1, min(batch_size, self.few * len(self.classes) // 8))
        return replace(self, rows=rows, batch_size=batch_size, tracked=min(self.tracked, 200))

    def spec(self, refreshes: Refreshes, **changes: Any) -> TrialSpec:
        """Return the trial with norms refreshed that often, and other fields as in ``changes``."""
        spec = TrialSpec(
            key=self.name,
            data=self.data if self.rows is None else replace(self.data, keep=dict.fromkeys(self.classes, self.rows)),
            model=self.model,
            sampling=SamplingSpec("poisson", self.batch_size),
            clipping=Component(self.clipping, {"bound": self.bound}),
            noise=NoiseSpec(self.noise_multiplier),
            epochs=self.epochs,
            delta=DELTA,
            seed=0,
            optimizer=Component("sgd", {"learning_rate": self.learning_rate}),
            norms=NormSpec(refreshes_per_epoch=refreshes, exact_examples=self.tracked),
        )
        return replace(spec, **changes)
