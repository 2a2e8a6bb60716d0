"""A training run as data: its mechanisms, in the order of the steps.

A `Trace` describes a training run completely enough to account for its privacy. The planner, the trainer
and the accountants share it, so they cannot disagree about what happened.

Glossary (long names to the papers' letters): sample_rate q, noise_multiplier sigma, dataset_size n,
batch_size B, steps T, sensitivity S, contribution c / S.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import assert_never, get_args

from dpsweep.accounting.errors import (
    InvalidInput,
    UnsupportedMechanism,
    keep_finite,
    keep_whole,
    require_choice,
    require_finite,
    require_whole,
)
from dpsweep.accounting.mechanism.estimates import Claim, weakest
from dpsweep.accounting.mechanism.filters import FILTERS, IndividualFilter
from dpsweep.accounting.mechanism.noise_strategies import INDEPENDENT, NoiseStrategy, require_known_noise
from dpsweep.accounting.mechanism.random_trials import ExponentialChoice, RandomTrials
from dpsweep.accounting.mechanism.reasons import Reason, union
from dpsweep.accounting.mechanism.samplings import (
    Adjacency,
    DisplacingSampling,
    Draws,
    PoissonSampling,
    RandomAllocationSampling,
    Sampling,
    require_known,
    stored_kinds,
)
from dpsweep.accounting.mechanism.units import EXAMPLE, Example, Unit, User, of_records
from dpsweep.accounting.registry import one_of

NOISE_MULTIPLIERS = (1e-6, 1e9)
"""Accepted range of noise multipliers: below it the bound is vacuous, above it the cost of a step underflows."""
LARGEST_EPSILON = 1e12
"""Largest accepted epsilon of a pure release, about that of the smallest accepted noise multiplier."""


def _keep_noise(component: object, name: str) -> None:
    lowest, highest = NOISE_MULTIPLIERS
    keep_finite(component, "noise_multiplier", name, at_least=lowest, at_most=highest)


def _require_name(what: str, name: str) -> None:
    if not isinstance(name, str):
        raise InvalidInput(f"the name of a {what} is {name!r}, but must be text")


def _require_kind(component: object, field: str, kinds: tuple[type, ...]) -> None:
    """Check that a field holds one of ``kinds``."""
    if not isinstance(value := getattr(component, field), kinds):
        wanted = one_of(["None" if kind is NoneType else kind.__name__ for kind in kinds])
        raise InvalidInput(f"{field} is {value!r}, but must be {wanted}")


def _keep_parts(component: object, field: str, kinds: tuple[type, ...]) -> None:
    """Check that a field holds a sequence of ``kinds``, and store it as a tuple."""
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
    """A Gaussian query on the same batch as the gradient; ``noise_multiplier`` is noise std over L2 sensitivity.

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
    for which every accountant reports epsilon infinity.
    """

    start_step: int
    steps: int
    sampling: Sampling
    noise_multiplier: float
    side_queries: tuple[SideQuery, ...] = ()

    def __post_init__(self) -> None:
        keep_whole(self, "start_step", "start_step of a segment", at_least=0)
        keep_whole(self, "steps", "steps of a segment", at_least=1)
        if not isinstance(self.sampling, (*stored_kinds(), DisplacingSampling)):
            kinds = one_of([kind.__name__ for kind in stored_kinds()])
            raise InvalidInput(f"sampling of a segment is {self.sampling!r}, but must be a {kinds}")
        keep_finite(self, "noise_multiplier", "noise_multiplier", at_least=0.0)
        if self.noise_multiplier > 0.0:
            _keep_noise(self, "noise_multiplier")
        _keep_parts(self, "side_queries", (SideQuery,))

    @property
    def stop_step(self) -> int:
        """The first step after the segment."""
        return self.start_step + self.steps

    def effective_noise_multiplier(self, contribution: float = 1.0) -> float:
        """Return the noise multiplier of gradient and side queries combined, for one example with ``contribution`` c /
        S >= 0.

        Independent Gaussians on the same batch are one Gaussian: sensitivities over noise add in quadrature, so
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
        """Return how far one drawn example moves the release, in noise standard deviations.

        sqrt(((c + d) / sigma)^2 + sum of ((1 + d) / sigma_side)^2). The number d is 1 if the example displaces another
        from its batch, whose contribution may be full; else 0. For a full contribution to a fixed batch this is twice 1
        / `effective_noise_multiplier` (paper B, Theorem 3.3).
        """
        displaced = self.sampling.displaced
        moved = require_finite("contribution", contribution, at_least=0.0) + displaced
        if self.noise_multiplier == 0.0 and moved > 0.0:
            return float("inf")
        gradient = moved / self.noise_multiplier if moved > 0.0 else 0.0
        sides = ((1 + displaced) / query.noise_multiplier for query in self.side_queries)
        return math.hypot(gradient, *sides)


def require_filterable(segment: Segment, individual: IndividualFilter) -> None:
    """Raise unless an example that contributes nothing costs nothing in these steps, as filters need."""
    alone = segment.sampling.draws is Draws.INDEPENDENT and segment.sampling.displaced == 0
    if not alone or segment.side_queries or segment.noise_multiplier == 0.0:
        raise UnsupportedMechanism(
            "a filter limits the contributions of single examples to noisy Poisson batches without side queries, not "
            f"{segment.sampling.words} with noise multiplier {segment.noise_multiplier:g} and "
            f"{len(segment.side_queries)} side queries; use poisson sampling and noise, or another clipping method"
        )
    individual.require_covers(segment.sampling.sample_rate)


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
Selection = RandomTrials | ExponentialChoice
"""How the released run was chosen among several."""


@dataclass(frozen=True)
class Trace:
    """A run: its adjacency, data-set size, training segments in step order, and one-off releases.

    contributions: the strength of the recorded contributions of single examples. It is ``guarantee`` if they were fixed
    before the run and bound the true ones in every run. It is ``output_specific`` if they were read off the run and
    bound the true ones at every step of it (norms taken at every step, or individual clipping). Else ``estimate``.
    noise_follows_results: the noise was chosen from earlier results (a validation-driven schedule that reacted). The
    cost of the noise that was used is then no proven bound but an estimate.
    ended_by_results: the run would have gone on had its results been others (a scheduler stopped it). Then the cost of
    the steps that ran is an estimate, too, as an end can be chosen that has leaked much.
    filter: the filter that limited the total cost of every example. Its budget is a guarantee even if noise or end
    followed results.
    selection: how the run, the only one released, was chosen among several (private selection, docs/accounting.md). All
    other fields then describe each of these runs, and epsilons are those after the selection.
    strategy: how the noise of the steps is correlated.
    unit: whose privacy its epsilons are. For users, all sizes and rates count the population that is sampled.

    Raises: InvalidInput for an impossible run: segments with gaps, batches from a data set of another size, epochs of
    more batches than there are examples. UnsupportedMechanism for a sampling not accounted for under ``adjacency``, and
    for a filter on anything but noisy Poisson batches without side queries. UnsupportedMechanism also for a selection
    among filtered runs or runs whose noise followed results, and for users in anything but Poisson or
    randomly allocated batches with independent noise.
    """

    dataset_size: int
    segments: tuple[Segment, ...] = ()
    releases: tuple[Release, ...] = ()
    adjacency: Adjacency = "add_remove"
    contributions: Claim = "estimate"
    noise_follows_results: bool = False
    ended_by_results: bool = False
    filter: IndividualFilter | None = None
    selection: Selection | None = None
    strategy: NoiseStrategy = INDEPENDENT
    unit: Unit = EXAMPLE

    def __post_init__(self) -> None:
        keep_whole(self, "dataset_size", "dataset_size of a trace", at_least=1)
        _keep_parts(self, "segments", (Segment,))
        _keep_parts(self, "releases", get_args(Release))
        self._require_contiguous()
        require_choice("adjacency", self.adjacency, get_args(Adjacency))
        require_choice("contributions", self.contributions, get_args(Claim))
        require_choice("noise_follows_results", self.noise_follows_results, (False, True))
        require_choice("ended_by_results", self.ended_by_results, (False, True))
        require_known_noise(self.strategy)
        _require_kind(self, "filter", (*FILTERS.values(), NoneType))
        _require_kind(self, "selection", (*get_args(Selection), NoneType))
        _require_kind(self, "unit", get_args(Unit))
        for segment in self.segments:
            _require_adjacency(segment.sampling, of_records(self.adjacency))
            segment.sampling.require_fits(self.dataset_size)
            if self.filter is not None:
                require_filterable(segment, self.filter)
        if self.filter is not None and self.adjacency == "replace_one":
            raise UnsupportedMechanism(
                "a filter limits what one example contributes, not what takes its place under 'replace_one'; account "
                "for it under 'add_remove'"
            )

        if self.filter is not None and self.strategy != INDEPENDENT:
            raise UnsupportedMechanism(
                f"no filter is proven here with {self.strategy.words}: what an example pays at a step depends on its "
                "other steps; use independent noise, or another clipping method"
            )
        match self.unit:
            case Example():
                self._require_no_graph()
            case User():
                self._require_users_are_covered()
            case _:
                assert_never(self.unit)
        if self.selection is not None and (self.filter is not None or self.noise_follows_results):
            what = "whose noise follows results" if self.filter is None else "under a filter"
            raise UnsupportedMechanism(
                f"no bound for a private selection among runs {what} is proven here; use another schedule or clipping "
                "method, or release every run"
            )

    def _require_no_graph(self) -> None:
        """Raise for an adjacency that says who owns which record, of a run that knows no owners."""
        if self.adjacency == "fixed_graph":
            raise UnsupportedMechanism(
                "fixed_graph is an adjacency of users, who own records, and this run protects single examples; choose "
                "unit: user, or account for it under 'zero_out'"
            )

    def _require_users_are_covered(self) -> None:
        """Raise unless users are accounted for in this run.

        Needed are independent noise, one run and no filter. Batches are Poisson or randomly allocated; then a user of
        several rows is the end of a chain (docs/group-proof.md).
        """
        covered = (PoissonSampling, RandomAllocationSampling)
        others = sorted({s.sampling.words for s in self.segments if not isinstance(s.sampling, covered)})
        found = {
            **dict.fromkeys(others, True),
            f"adjacency {self.adjacency!r}": self.adjacency not in ("add_remove", "fixed_graph"),
            "a filter": self.filter is not None,
            "a private selection": self.selection is not None,
            "correlated noise": self.strategy != INDEPENDENT,
        }
        refused = [what for what, is_so in found.items() if is_so]
        if refused:
            raise UnsupportedMechanism(
                f"no epsilon per user is proven here with {', '.join(refused)}; use poisson sampling or random "
                "allocation, under add_remove or fixed_graph with independent noise, or ask for the privacy of examples"
            )

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
    def kind(self) -> Claim:
        """Strength of an upper bound on the cost of this trace by any accountant whose theorem is proven."""
        return "estimate" if self.reasons else "guarantee"

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Return why an upper bound on the cost of this trace is an estimate; empty if it is a guarantee."""
        followed: dict[Reason, bool] = {
            "noise_followed_results": self.noise_follows_results,
            "end_followed_results": self.ended_by_results,
        }
        return tuple(reason for reason, holds in followed.items() if holds)

    @property
    def individual_kind(self) -> Claim:
        """Strength of an upper bound that rests on the recorded contributions of single examples."""
        return weakest(self.kind, self.contributions)

    @property
    def individual_reasons(self) -> tuple[Reason, ...]:
        """Return why an upper bound that rests on recorded contributions is an estimate; empty for stronger claims."""
        return union((self.reasons, ("norms_estimated",) if self.contributions == "estimate" else ()))

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return self.segments[-1].stop_step if self.segments else 0

    @property
    def is_private(self) -> bool:
        """Return whether every step has noise."""
        return all(segment.noise_multiplier > 0.0 for segment in self.segments)

    @property
    def allocated(self) -> tuple[Segment, ...]:
        """Segments in which every example joins one random step of each block (random allocation)."""
        return tuple(segment for segment in self.segments if segment.sampling.draws is Draws.ALLOCATED)

    def until(self, step: int) -> Trace:
        """Return the trace cut after ``step`` steps; releases are kept."""
        step = require_whole("step", step, at_least=0)
        kept = (
            segment if segment.stop_step <= step else replace(segment, steps=step - segment.start_step)
            for segment in self.segments
            if segment.start_step < step
        )
        return replace(self, segments=tuple(kept))


def require_one_run(trace: Trace) -> None:
    """Raise `UnsupportedMechanism` for the trace of a private selection, which costs more than one run."""
    if trace.selection is not None:
        raise UnsupportedMechanism(
            f"this is {trace.selection.words}, whose selection costs privacy too: only the epsilon of the worst case "
            "is known; no curve, and no epsilon of given examples"
        )


def require_unit_of_rows(trace: Trace) -> None:
    """Raise `UnsupportedMechanism` for a run whose epsilons protect users.

    Accounting for rows would otherwise give a smaller epsilon than a user's.
    """
    match trace.unit:
        case Example():
            return
        case User():
            raise UnsupportedMechanism(
                "this run protects users, and the question is about single examples: no answer is proven here per "
                "user; ask for the worst case, its attacks, or several runs together"
            )
        case _:
            assert_never(trace.unit)


def require_supported(trace: Trace) -> None:
    """Raise `UnsupportedMechanism` for a sampling or a noise strategy without a known theorem here."""
    for segment in trace.segments:
        require_known(segment.sampling)
    require_known_noise(trace.strategy)


def join_segments(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Merge neighbouring segments that describe the same mechanism, and renumber steps from 0."""
    joined: list[Segment] = []
    for segment in segments:
        start = joined[-1].stop_step if joined else 0
        moved = replace(segment, start_step=start)
        if joined and replace(moved, start_step=joined[-1].start_step, steps=joined[-1].steps) == joined[-1]:
            joined[-1] = replace(joined[-1], steps=joined[-1].steps + moved.steps)
        else:
            joined.append(moved)
    return tuple(joined)


def _require_adjacency(sampling: Sampling, adjacency: Adjacency) -> None:
    """Raise `UnsupportedMechanism` unless ``sampling`` can be accounted for under ``adjacency``."""
    if adjacency not in sampling.adjacencies:
        why = ", which is proven only where nothing is sampled" if adjacency == "replace_one" else ""
        raise UnsupportedMechanism(
            f"{sampling.words} ({type(sampling).__name__}) have no accounting under {adjacency!r}{why}; "
            f"account for them under {sampling.adjacencies[0]!r}"
        )
