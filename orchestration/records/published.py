"""What may be shown: the one shape in which results leave a sweep, for the report and for MLflow alike.

Nothing here can hold a value of a single training example. Statistics of the training examples' epsilons have one
place, `IndividualStatistics`, which says whether they were released with differential privacy or are exact; without
it they are withheld. `PublishedAttack` is exact, and there only where exact statistics are shown. Everything else is
public by construction: configuration, the mechanism's own noise and post-processed bounds, worst-case guarantees, and
evaluations on held-out test data.

All epsilons are plain floats; ``math.inf`` is an explicit "not private", None is "not computed".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from accounting.estimates import Kind
from orchestration.records.release_modes import Disclosure
from orchestration.records.states import TrialState

Label = str | int | float | bool
NON_PRIVATE = "non-private"
"""The label of a trial without clipping, which no guarantee covers."""


@dataclass(frozen=True)
class PublishedPrivacy:
    """The worst-case cost of one trial: (epsilon, delta), who says so, and what the pair claims.

    group_epsilons: epsilon at the same delta for any k records together, by k.
    """

    epsilon: float
    delta: float
    accountant: str
    kind: Kind = "guarantee"
    adjacency: str = "add_remove"
    group_epsilons: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_private(self) -> bool:
        return self.epsilon < math.inf


@dataclass(frozen=True)
class PublishedGroup:
    """How the model serves one group of the test data.

    accuracy_change: accuracy minus that of the non-private baseline with the same data, model and seed
    (in [-1, 1]; negative is the price of privacy), or None without a baseline.
    """

    name: str
    test_examples: int
    accuracy: float
    loss: float | None = None
    accuracy_change: float | None = None


@dataclass(frozen=True)
class PublishedQuality:
    """Evaluation on test data. ``fairness`` holds further named group metrics (such as those of fairlearn)."""

    accuracy: float
    loss: float
    accuracy_change: float | None = None
    groups: tuple[PublishedGroup, ...] = ()
    fairness: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupEpsilon:
    """Mean epsilon_i over the training examples of one group.

    standard_error: of the noise of the DP release (disclosure ``private``), or of the mean itself (``raw``).
    loss_correlation: as in `IndividualStatistics`, over the examples of the group.
    """

    name: str
    mean: float
    standard_error: float | None = None
    examples: float | None = None
    loss_correlation: float | None = None


@dataclass(frozen=True)
class Histogram:
    """``counts[j]`` examples have epsilon_i in [edges[j], edges[j + 1]); counts may be noisy, so negative or broken."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True)
class EstimateQuality:
    """How well estimated epsilon_i agree with those of ``examples`` random examples tracked at every step.

    correlation: Pearson's r; None where either side is constant. Errors are absolute differences of epsilons.
    """

    examples: int
    correlation: float | None
    mean_error: float
    largest_error: float


@dataclass(frozen=True)
class IndividualStatistics:
    """Statistics over the epsilon_i of all training examples.

    disclosure: ``private`` when every number here was released with DP (its cost is inside the trial's total),
    ``raw`` when they are exact, which makes whatever shows them sensitive. kind is that of the single epsilon_i.
    release_epsilon: what the release itself cost, for ``private``. estimates: for ``raw``, where the sweep tracks
    examples exactly (``norms.exact_examples``). loss_correlation: for ``raw``, Pearson's r of epsilon_i and the log of
    the example's loss when norms were last taken; None where it is undefined.
    """

    disclosure: Disclosure
    kind: Kind
    mean: float | None = None
    median: float | None = None
    quantiles: Mapping[float, float] = field(default_factory=dict)
    groups: tuple[GroupEpsilon, ...] = ()
    histogram: Histogram | None = None
    release_epsilon: float | None = None
    estimates: EstimateQuality | None = None
    loss_correlation: float | None = None


@dataclass(frozen=True)
class PublishedAttack:
    """Membership inference on one group by a loss threshold: exact, so whatever shows it is sensitive.

    examples: measured, half of them members. success_rate: share of right guesses, of which chance gives 0.5.
    """

    name: str
    examples: int
    success_rate: float
    standard_error: float


@dataclass(frozen=True)
class PublishedEpoch:
    """One epoch of training, counted from 0; ``step`` is the number of steps taken when it ended.

    clipping_bounds: by group name, or under ``"all"`` where one bound serves everybody; public values only (a bound
    derived from noisy counts is, the thresholds of individual clipping are not). metrics: such as
    ``{"test_accuracy": 0.9, "epsilon": 1.2}``.
    """

    epoch: int
    step: int
    noise_multiplier: float
    clipping_bounds: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedDataset:
    """Training data by name and by digest of its specification, never by content. ``digest``: at most 36 characters."""

    name: str
    digest: str
    source: str
    profile: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedTrial:
    """One trial of the grid.

    labels: the values that tell the trials of a sweep apart, ``clipping``, ``schedule`` and ``seed`` among them.
    error: why it did not finish. Finished trials whose labels differ only in ``seed`` are one setting, and are
    averaged. Whatever is unknown, because the trial failed or has not run, is None or empty. Of a stopped trial,
    privacy is what it had cost when it was stopped, and quality what it had reached.

    params: flat; numbers where a number is meant (``epochs: 30``, ``noise.initial_noise_multiplier: 1.3``). More of
    them may come while the trial runs, but none may change. started and ended: of training, in seconds since 1970 UTC.
    """

    key: str
    labels: Mapping[str, Label]
    state: TrialState
    error: str | None = None
    privacy: PublishedPrivacy | None = None
    quality: PublishedQuality | None = None
    individuals: IndividualStatistics | None = None
    attacks: tuple[PublishedAttack, ...] = ()
    history: tuple[PublishedEpoch, ...] = ()
    notes: tuple[str, ...] = ()
    params: Mapping[str, Label] = field(default_factory=dict)
    dataset: PublishedDataset | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None

    @property
    def wall_seconds(self) -> float | None:
        """How long training took; None before it ended."""
        return self.ended - self.started if self.started is not None and self.ended is not None else None

    @property
    def is_baseline(self) -> bool:
        """Whether the trial is known to be a non-private one."""
        return self.privacy is not None and not self.privacy.is_private

    @property
    def setting(self) -> dict[str, Label]:
        """The labels without the seed."""
        return {name: value for name, value in self.labels.items() if name != "seed"}


@dataclass(frozen=True)
class PublishedSweep:
    """A sweep, as shown. ``provenance`` is the manifest in flat words: versions, git state, hardware, data."""

    name: str
    trials: tuple[PublishedTrial, ...]
    delta: float
    disclosure: Disclosure = "none"
    created: str = ""
    provenance: Mapping[str, str] = field(default_factory=dict)
