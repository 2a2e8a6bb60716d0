"""What was run, as data.

A `Trace` documents a training run completely enough to account for its privacy. The planner, the trainer
and the accountants share it, so none of them can disagree with another about what happened.

Glossary (long names to the papers' letters): sample_rate q, noise_multiplier sigma, dataset_size n,
batch_size B, steps T, sensitivity S, contribution c / S.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from accounting.errors import (
    InvalidInput,
    UnsupportedMechanism,
    keep_finite,
    keep_whole,
    require_choice,
    require_finite,
    require_whole,
)

Adjacency = Literal["add_remove", "zero_out"]
"""``add_remove``: one data set is the other plus one record.

``zero_out``: one record is replaced by a null record that contributes nothing; the size is the same. This
is the adjacency under which the batches of a reshuffled epoch stay aligned, so shuffled runs use it.
"""
Contributions = Literal["guarantee", "estimate"]
"""What is known of single examples: bounds on what each contributed to every step, or values that come close."""
NOISE_MULTIPLIERS = (1e-6, 1e9)
"""Of any Gaussian that is accounted for: less protects nobody, and of more nothing is left in a double."""
SMALLEST_RATE = 1e-12
"""Of Poisson batches: below it, 1 - q rounds away too much of q."""
LARGEST_EPSILON = 1e12
"""Of any pure release that is accounted for: as little noise as the smallest noise multiplier has."""


@dataclass(frozen=True)
class PoissonSampling:
    """Each example joins each batch independently with probability ``sample_rate``."""

    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("add_remove", "zero_out")
    displaced: ClassVar[int] = 0

    sample_rate: float

    def __post_init__(self) -> None:
        keep_finite(self, "sample_rate", "sample_rate", at_least=SMALLEST_RATE, at_most=1.0)


@dataclass(frozen=True)
class FixedBatchSampling:
    """Each batch is a uniformly random subset of exactly ``batch_size`` of ``dataset_size`` examples.

    An example that joins a batch displaces another from it. Not under zero-out: a batch with the blanked example has
    one fewer of the others, which tells that it is there, and nothing is amplified (docs/group-proof.md).
    """

    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("add_remove",)
    displaced: ClassVar[int] = 1

    dataset_size: int
    batch_size: int

    def __post_init__(self) -> None:
        keep_whole(self, "dataset_size", "dataset_size", at_least=1)
        keep_whole(self, "batch_size", "batch_size", at_least=1)
        if self.batch_size > self.dataset_size:
            raise InvalidInput(
                f"batch_size is {self.batch_size}, but the data set has {self.dataset_size} examples; "
                "choose a batch_size no larger than the data set"
            )


@dataclass(frozen=True)
class ShuffledSampling:
    """Each epoch visits every example once, in a fresh random order, in ``steps_per_epoch`` disjoint batches.

    Not under add/remove: a record more shifts every later batch of an epoch.
    """

    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("zero_out",)
    displaced: ClassVar[int] = 0

    steps_per_epoch: int

    def __post_init__(self) -> None:
        keep_whole(self, "steps_per_epoch", "steps_per_epoch", at_least=1)


Sampling = PoissonSampling | FixedBatchSampling | ShuffledSampling

_NAMES: Mapping[type, str] = {
    PoissonSampling: "Poisson batches",
    FixedBatchSampling: "fixed batches",
    ShuffledSampling: "shuffled epochs",
}


def require_adjacency(sampling: Sampling, adjacency: Adjacency) -> None:
    """Raise `UnsupportedMechanism` where nothing is known about ``sampling`` under ``adjacency``; see its class."""
    if adjacency not in sampling.adjacencies:
        raise UnsupportedMechanism(
            f"{_NAMES[type(sampling)]} ({type(sampling).__name__}) have no accounting under {adjacency!r}; "
            f"account for them under {sampling.adjacencies[0]!r}"
        )


def _keep_noise(component: object, name: str) -> None:
    lowest, highest = NOISE_MULTIPLIERS
    keep_finite(component, "noise_multiplier", name, at_least=lowest, at_most=highest)


def _require_name(what: str, name: str) -> None:
    if not isinstance(name, str):
        raise InvalidInput(f"the name of a {what} is {name!r}, but must be text")


def _keep_parts(component: object, field: str, kinds: tuple[type, ...]) -> None:
    """Check that a field holds a sequence of ``kinds``, and hold it as a tuple."""
    parts = getattr(component, field)
    wanted = " or ".join(kind.__name__ for kind in kinds)
    if not isinstance(parts, Sequence):
        raise InvalidInput(f"{field} is {parts!r}, but must be a sequence of {wanted}")
    for part in parts:
        if not isinstance(part, kinds):
            raise InvalidInput(f"{field} has {part!r}, but each must be a {wanted}")
    object.__setattr__(component, field, tuple(parts))


@dataclass(frozen=True)
class SideQuery:
    """A Gaussian query on the same batch as the gradient: noise std over L2 sensitivity is ``noise_multiplier``.

    Every sampled example contributes to it with its full sensitivity, whatever its gradient norm.
    """

    name: str
    noise_multiplier: float

    def __post_init__(self) -> None:
        _require_name("side query", self.name)
        _keep_noise(self, f"noise_multiplier of side query {self.name!r}")


@dataclass(frozen=True)
class Segment:
    """``steps`` equal steps starting at ``start_step``: one sampling, one noise level, the same side queries.

    ``noise_multiplier`` is noise std over the L2 sensitivity of the clipped sum; 0 means no noise at all,
    which every accountant reports as an explicit infinity.
    """

    start_step: int
    steps: int
    sampling: Sampling
    noise_multiplier: float
    side_queries: tuple[SideQuery, ...] = ()

    def __post_init__(self) -> None:
        keep_whole(self, "start_step", "start_step of a segment", at_least=0)
        keep_whole(self, "steps", "steps of a segment", at_least=1)
        if not isinstance(self.sampling, Sampling):
            raise InvalidInput(
                f"sampling of a segment is {self.sampling!r}, but must be a PoissonSampling, FixedBatchSampling or "
                "ShuffledSampling"
            )
        keep_finite(self, "noise_multiplier", "noise_multiplier", at_least=0.0)
        if self.noise_multiplier > 0.0:
            _keep_noise(self, "noise_multiplier")
        _keep_parts(self, "side_queries", (SideQuery,))

    @property
    def stop_step(self) -> int:
        return self.start_step + self.steps

    def effective_noise_multiplier(self, contribution: float = 1.0) -> float:
        """Noise multiplier of gradient and side queries taken together, for one example.

        Independent Gaussians on the same batch are one Gaussian: sensitivities add in quadrature, so
        (1/m)^2 = (contribution / sigma)^2 + sum of (1 / sigma_side)^2. Zero noise gives 0; an example that
        contributes to nothing gives infinity.
        """
        require_finite("contribution", contribution, at_least=0.0)
        if self.noise_multiplier == 0.0 and contribution > 0.0:
            return 0.0
        gradient = (contribution / self.noise_multiplier) ** 2 if contribution > 0.0 else 0.0
        precision = gradient + sum(query.noise_multiplier**-2 for query in self.side_queries)
        return precision**-0.5 if precision > 0.0 else float("inf")

    def amplitude(self, contribution: float = 1.0) -> float:
        """How far one drawn example moves the release, in noise standard deviations.

        sqrt(((c + d) / sigma)^2 + sum of ((1 + d) / sigma_side)^2), where d = 1 if the example displaces another from
        its batch, whose contribution may be as large as any, else d = 0. Twice 1 / `effective_noise_multiplier` for
        a full contribution to a fixed batch (paper B, Theorem 3.3).
        """
        displaced = self.sampling.displaced
        moved = require_finite("contribution", contribution, at_least=0.0) + displaced
        if self.noise_multiplier == 0.0 and moved > 0.0:
            return float("inf")
        gradient = moved / self.noise_multiplier if moved > 0.0 else 0.0
        sides = ((1 + displaced) / query.noise_multiplier for query in self.side_queries)
        return math.hypot(gradient, *sides)


@dataclass(frozen=True)
class GaussianRelease:
    """A Gaussian release computed once on the whole data set, outside the training steps (DP-PCA, a count)."""

    name: str
    noise_multiplier: float

    def __post_init__(self) -> None:
        _require_name("release", self.name)
        _keep_noise(self, f"noise_multiplier of release {self.name!r}")


@dataclass(frozen=True)
class PureRelease:
    """A release that is (epsilon, 0)-DP on the whole data set, such as the exponential mechanism."""

    name: str
    epsilon: float

    def __post_init__(self) -> None:
        _require_name("release", self.name)
        keep_finite(self, "epsilon", f"epsilon of release {self.name!r}", at_least=0.0, at_most=LARGEST_EPSILON)


Release = GaussianRelease | PureRelease


@dataclass(frozen=True)
class Trace:
    """A run: its adjacency, data-set size, training segments in step order, and one-off releases.

    contributions says what the recorded contributions of single examples are worth: ``guarantee`` when they bound
    the true contribution at every step (norms taken at every step, or individual clipping), else ``estimate``.
    noise_follows_results says that noise was chosen from earlier results (a validation-driven schedule that reacted):
    the cost of what it chose in the end bounds nothing, so no accountant calls it a guarantee.

    Raises: InvalidInput for a run that cannot have been: segments with gaps, batches from a data set of another size,
    epochs of more batches than there are examples; UnsupportedMechanism for an adjacency that a sampling does not have.
    """

    dataset_size: int
    segments: tuple[Segment, ...] = ()
    releases: tuple[Release, ...] = ()
    adjacency: Adjacency = "add_remove"
    contributions: Contributions = "estimate"
    noise_follows_results: bool = False

    def __post_init__(self) -> None:
        keep_whole(self, "dataset_size", "dataset_size of a trace", at_least=1)
        _keep_parts(self, "segments", (Segment,))
        _keep_parts(self, "releases", get_args(Release))
        require_choice("adjacency", self.adjacency, get_args(Adjacency))
        require_choice("contributions", self.contributions, get_args(Contributions))
        require_choice("noise_follows_results", self.noise_follows_results, (False, True))
        self._require_contiguous()
        for segment in self.segments:
            require_adjacency(segment.sampling, self.adjacency)
            _require_size(segment.sampling, self.dataset_size)

    def _require_contiguous(self) -> None:
        expected = 0
        for segment in self.segments:
            if segment.start_step != expected:
                raise InvalidInput(
                    f"a segment starts at step {segment.start_step}, but the one before it stops at {expected}; "
                    "segments must be contiguous and start at step 0"
                )
            expected = segment.stop_step
        require_whole("the number of steps of a trace", expected, at_least=0)

    @property
    def kind(self) -> Contributions:
        """What an upper bound on the cost of this trace is worth, whatever the accountant."""
        return "estimate" if self.noise_follows_results else "guarantee"

    @property
    def individual_kind(self) -> Contributions:
        """What one is worth that rests on the recorded contributions of single examples."""
        return "guarantee" if self.kind == self.contributions == "guarantee" else "estimate"

    @property
    def steps(self) -> int:
        return self.segments[-1].stop_step if self.segments else 0

    @property
    def is_private(self) -> bool:
        return all(segment.noise_multiplier > 0.0 for segment in self.segments)

    def until(self, step: int) -> Trace:
        """The trace of a run that stopped after ``step`` steps."""
        step = require_whole("step", step, at_least=0)
        kept = (
            replace(segment, steps=min(segment.stop_step, step) - segment.start_step)
            for segment in self.segments
            if segment.start_step < step
        )
        return replace(self, segments=tuple(kept))


def _require_size(sampling: Sampling, dataset_size: int) -> None:
    """Raise `InvalidInput` when ``sampling`` cannot be one of a data set of ``dataset_size`` examples."""
    match sampling:
        case FixedBatchSampling(dataset_size=drawn_from) if drawn_from != dataset_size:
            raise InvalidInput(
                f"fixed batches are drawn from {drawn_from} examples, but the data set of the trace has "
                f"{dataset_size}; give both the same dataset_size"
            )
        case ShuffledSampling(steps_per_epoch=batches) if batches > dataset_size:
            raise InvalidInput(
                f"steps_per_epoch is {batches}, but an epoch over {dataset_size} examples has at most as many "
                "batches; give the data set's own size"
            )


def join_segments(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Merge neighbouring segments that describe the same mechanism, renumbering steps from 0."""
    joined: list[Segment] = []
    for segment in segments:
        start = joined[-1].stop_step if joined else 0
        moved = replace(segment, start_step=start)
        if joined and replace(moved, start_step=joined[-1].start_step, steps=joined[-1].steps) == joined[-1]:
            joined[-1] = replace(joined[-1], steps=joined[-1].steps + moved.steps)
        else:
            joined.append(moved)
    return tuple(joined)


def default_adjacency(sampling: Sampling) -> Adjacency:
    """``zero_out`` for shuffled epochs, whose batches shift when a record is inserted; ``add_remove`` otherwise."""
    return "zero_out" if isinstance(sampling, ShuffledSampling) else "add_remove"
