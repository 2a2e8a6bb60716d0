"""Bugs in clipping methods, by file; those that a review found no test for come first."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Bug as B
from tests.mutants.mutant import Mutant, bugs_in

CLIPPING: Final = ("tests/workers/clipping/test_clipping.py", "tests/workers/clipping/test_methods.py")

METHODS: Final[tuple[Mutant, ...]] = (
    *bugs_in(
        "workers/clipping/clipping_method.py",
        CLIPPING,
        B(
            "return self.noise_multiplier * self.sensitivity",
            "return self.noise_multiplier * self.sensitivity**2",
            "the quantile query gets half its noise",
            True,
        ),
        B(
            "torch.clamp(bound / norms, max=1.0)",
            "torch.clamp(bound / norms, max=1.1)",
            "gradients within the bound are stretched",
            True,
        ),
        B(
            "torch.where(finite if weights.ndim == 1 else finite[:, None], weights, 0.0)",
            "weights",
            "gradients that are not finite are summed",
            True,
        ),
        B("(1.0 - NORM_ERROR, 1.0, 1.0 + NORM_ERROR)", "(1.0,)", "contributions beside a jump are too small", True),
        B(
            "torch.where(finite, contributions, 1.0)",
            "contributions.nan_to_num(0.0)",
            "an infinite norm contributes nothing",
            True,
        ),
        B(
            "((1.0 + NORM_ERROR) / self.sensitivity)",
            "(1.0 / self.sensitivity)",
            "contributions are not rounded up",
            True,
        ),
        B(
            "RISING: Final = (1.0 + NORM_ERROR,)",
            "RISING: Final = (1.0,)",
            "contributions of close norms are too small",
        ),
        B(
            "SideQuery(self.query.name, self.query.noise_multiplier)",
            "SideQuery(self.query.name, self.query.noise_multiplier / self.query.sensitivity)",
            "the query of half a sensitivity is accounted with twice its noise",
            True,
        ),
        B(
            "0.5 * self.noise_multiplier * math.sqrt(self.rounds)",
            "0.5 * self.noise_multiplier",
            "all rounds of the median cost one",
            True,
        ),
        B(
            "() if self.query is None else (SideQuery(self.query.name, self.query.noise_multiplier),)",
            "()",
            "queries are not accounted for",
            True,
        ),
        B(
            "return (self.bound.release,) if isinstance(self.bound, PrivateMedian) else ()",
            "return ()",
            "the initial median is not accounted for",
            True,
        ),
    ),
    *bugs_in(
        "workers/clipping/by_norm.py",
        CLIPPING,
        B(
            '"norms within the bound", 0.5,',
            '"norms within the bound", 0.25,',
            "the stated sensitivity of the query",
            True,
        ),
        B("state.bound / math.sqrt(layers)", "state.bound", "each layer is clipped at the whole bound", True),
        B(
            "RISING if threshold >= bound else ANY_SHAPE",
            "RISING",
            "a threshold below the bound enlarges norms that count as kept",
        ),
        B(
            "scale * (examples.norms <= threshold)",
            "scale * (examples.norms <= 2 * threshold)",
            "gradients beyond the threshold are kept",
            True,
        ),
        B("bound / threshold, clip_factor", "1.0, clip_factor", "gradients within the threshold are not scaled", True),
        B(
            "examples.norms >= _SMALLEST_NORM, factor",
            "examples.norms >= 0.0, factor",
            "norms that underflow are scaled to an unknown length",
            True,
        ),
    ),
    *bugs_in(
        "workers/clipping/by_group.py",
        CLIPPING,
        B("float(bounds.max())", "float(bounds.mean())", "the sensitivity is the mean bound", True),
        B(
            "return counts_of(cells, 2 * facts.num_groups)",
            "return 2 * counts_of(cells, 2 * facts.num_groups)",
            "the query moves by twice what it states",
            True,
        ),
        B(
            "bound * float(theta.max())",
            "bound * float(theta.min())",
            "the sensitivity is that of the smallest weight",
            True,
        ),
    ),
    *bugs_in(
        "workers/clipping/by_example.py",
        CLIPPING,
        B(".clamp(max=bound)\n", "\n", "thresholds exceed the bound", True),
    ),
)
