"""The records that may be shown: results leave a sweep only in these types, for the report and for MLflow.

No type here can hold a value of a single training example. Statistics of the training examples' epsilons are held only
by `IndividualStatistics`, which says whether they were released with differential privacy or are exact; where it is
None they are withheld. `PublishedAccount`, `PublishedAttack`, `PublishedAudit` and `PublishedCourse` are exact, and
present only where exact statistics are shown. Everything else is public by construction: configuration, the
mechanism's own noise and post-processed bounds, worst-case guarantees, and evaluations on held-out test data.

Epsilons are plain floats: ``math.inf`` means not private, None means not computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from accounting.curves import AttackRisk
from accounting.estimates import Kind
from accounting.samplings import Adjacency
from orchestration.records.attempts import Attempt
from orchestration.records.release_modes import Disclosure
from orchestration.records.states import TrialState
from workers.rates import Counts
from workers.tasks import main_score

Label = str | int | float | bool
RUNS = ("seed", "split_seed")
"""Labels that tell the runs of one setting apart: of training, and of the splits of the data."""
NON_PRIVATE = "non-private"
"""The clipping label of a trial without clipping, which has no privacy guarantee."""


@dataclass(frozen=True)
class PublishedPrivacy:
    """The worst-case (epsilon, delta) of one trial, with its accountant, kind and adjacency.

    group_epsilons: group size k to the epsilon, at the same delta, of any group of k records. risks: group size k, 1
    included, to what no attack on any k records exceeds; empty without noise, and for trials of older versions.
    """

    epsilon: float
    delta: float
    accountant: str
    kind: Kind = "guarantee"
    adjacency: Adjacency = "add_remove"
    group_epsilons: Mapping[int, float] = field(default_factory=dict)
    risks: Mapping[int, AttackRisk] = field(default_factory=dict)

    @property
    def is_private(self) -> bool:
        """Whether epsilon is finite."""
        return self.epsilon < math.inf


@dataclass(frozen=True)
class PublishedCourse:
    """How training went for the training examples of one group: exact, so whatever shows it is sensitive.

    Means over ``examples``, one for each of the last epochs; None where no gradient was finite. losses, norms: the
    loss, and the norm of the gradient before clipping. biases, noises: the two terms by which the mean gradient of the
    group errs (paper D, Section 4.2): the norm of what clipping takes off, and the root mean square norm of the noise
    over the number of the group's examples expected in a batch.
    """

    examples: int
    losses: tuple[float | None, ...]
    norms: tuple[float | None, ...]
    biases: tuple[float | None, ...]
    noises: tuple[float | None, ...]


@dataclass(frozen=True)
class PublishedGroup:
    """Loss on one group of the test data, with accuracy or, of another task than classification, scores by name.

    accuracy_change: accuracy minus that of the non-private baseline with the same data, model and seed, in [-1, 1]
    (negative: accuracy lost to privacy); None without a baseline. counts: None for trials of older versions. training:
    of the group's training examples; None where exact statistics are not shown. on_training: as of `PublishedQuality`.
    """

    name: str
    test_examples: int
    accuracy: float | None
    loss: float | None = None
    accuracy_change: float | None = None
    counts: Counts | None = None
    training: PublishedCourse | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    on_training: float | None = None

    @property
    def main(self) -> float | None:
        """The number by which models of the task are compared first; None where it is not defined."""
        return main_score(self.accuracy, self.scores)


@dataclass(frozen=True)
class PublishedQuality:
    """Evaluation on test data. fairness: gaps between groups by name (`workers.rates.gaps`). counts: of all groups.

    accuracy, accuracy_change, fairness, counts: of classification. task: a name in `workers.tasks.TASKS`; of others,
    scores by name, and of single labels or targets in ``parts``. A change has the name of its score and ``_change``.
    on_training: ``main`` on the training examples; None where it was not asked for, or exact statistics are not shown.
    """

    accuracy: float | None
    loss: float
    accuracy_change: float | None = None
    groups: tuple[PublishedGroup, ...] = ()
    fairness: Mapping[str, float] = field(default_factory=dict)
    counts: Counts | None = None
    task: str = "classification"
    scores: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    on_training: float | None = None

    @property
    def main(self) -> float | None:
        """As of `PublishedGroup`."""
        return main_score(self.accuracy, self.scores)


@dataclass(frozen=True)
class GroupEpsilon:
    """Mean epsilon_i over the training examples of one group.

    standard_error: of the release's noise (disclosure ``private``), or of the mean (``raw``).
    loss_correlation: as in `IndividualStatistics`, over the examples of the group.
    """

    name: str
    mean: float
    standard_error: float | None = None
    examples: float | None = None
    loss_correlation: float | None = None


@dataclass(frozen=True)
class Histogram:
    """``counts[j]`` examples have epsilon_i in [edges[j], edges[j + 1]); noisy counts may be negative or fractional."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True)
class Density:
    """``counts[i][j]`` examples have x in [x_edges[i], x_edges[i + 1]) and y in [y_edges[j], y_edges[j + 1])."""

    x_edges: tuple[float, ...]
    y_edges: tuple[float, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class EstimateQuality:
    """Estimated epsilon_i compared with those of ``examples`` random examples whose norms are taken at every step.

    correlation: Pearson's r; None if either side is constant. Errors: absolute differences of epsilons. density: of the
    exact epsilon_i (x) and the estimated ones (y); None for trials of older versions.
    """

    examples: int
    correlation: float | None
    mean_error: float
    largest_error: float
    density: Density | None = None


@dataclass(frozen=True)
class IndividualStatistics:
    """Statistics over the epsilon_i of all training examples.

    disclosure: ``private`` if every number here was released with DP (its cost is part of the trial's epsilon), ``raw``
    if they are exact, so that any page or run that shows them is sensitive. kind: of the single epsilon_i. method:
    their accounting, ``filter`` if a filter enforced them, "" if an older version wrote the file.
    release_epsilon (``private`` only): epsilon of the release alone. estimates (``raw`` only): present if the sweep
    sets ``norms.exact_examples``. loss_correlation (``raw`` only): Pearson's r of epsilon_i and the log of the
    example's loss when norms were last taken; None where it is undefined. loss_density (``raw`` only): of the log of
    that loss (x) and epsilon_i (y), over the examples whose loss is positive and finite.
    """

    disclosure: Disclosure
    kind: Kind
    method: str = ""
    mean: float | None = None
    median: float | None = None
    quantiles: Mapping[float, float] = field(default_factory=dict)
    groups: tuple[GroupEpsilon, ...] = ()
    histogram: Histogram | None = None
    release_epsilon: float | None = None
    estimates: EstimateQuality | None = None
    loss_correlation: float | None = None
    loss_density: Density | None = None


@dataclass(frozen=True)
class PublishedAccount:
    """What `dpsweep account` found of a trial: exact, so any page or run that shows it is sensitive.

    name: of its folder. epsilon, accountant, kind: in the worst case at ``delta``; group_epsilons: of any k records.
    method, individual_kind: of the epsilon_i, with their mean and median; group_means: mean epsilon_i by group.
    """

    name: str
    delta: float
    method: str
    epsilon: float
    accountant: str
    kind: Kind
    individual_kind: Kind
    mean: float | None
    median: float | None
    group_epsilons: Mapping[int, float] = field(default_factory=dict)
    group_means: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedTuning:
    """What was tried for the setting of a trial before it was trained. by: what a candidate is best by.

    chosen: values by place. tried: each candidate's values and its score; None where it failed.
    """

    by: str
    chosen: Mapping[str, object]
    tried: tuple[tuple[Mapping[str, object], float | None], ...]


@dataclass(frozen=True)
class PublishedAttack:
    """Loss-threshold membership inference on one group: exact, so any page or run that shows it is sensitive.

    examples: attacked examples, half of them members. success_rate: share of correct guesses; guessing gives 0.5.
    """

    name: str
    examples: int
    success_rate: float
    standard_error: float


@dataclass(frozen=True)
class PublishedMembership:
    """Membership inference by likelihood ratios on one group: exact, so whatever shows it is sensitive.

    auc, lower, upper: area under the ROC curve with its 95% interval; guessing gives 0.5. loss_auc: of the loss alone.
    """

    name: str
    examples: int
    auc: float
    lower: float
    upper: float
    loss_auc: float


@dataclass(frozen=True)
class PublishedDepartures:
    """When the training examples of one group left: exact, so whatever shows it is sensitive.

    left: after each epoch, how many of the group's ``examples`` had spent the whole budget of a filter.
    """

    name: str
    examples: int
    left: tuple[int, ...]


@dataclass(frozen=True)
class PublishedAudit:
    """Lower bounds on epsilon from a one-run audit: exact, so any page or run that shows it is sensitive.

    epsilon: from all canaries, of which ``guesses`` were guessed, ``correct`` of them right. groups: by name, from the
    canaries of the group. All bounds hold together with probability ``confidence``; 0 means that nothing was proved.
    """

    confidence: float
    epsilon: float
    guesses: int
    correct: int
    groups: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedEpoch:
    """One epoch of training, counted from 0; ``step`` is the number of steps taken when it ended.

    clipping_bounds: by group name, or under ``"all"`` if all groups share one bound; public values only (a bound
    derived from noisy counts is public, the thresholds of individual clipping are not). metrics: by name, such as
    ``{"test_accuracy": 0.9, "epsilon": 1.2}``.
    """

    epoch: int
    step: int
    noise_multiplier: float
    clipping_bounds: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedDataset:
    """Training data by name and by digest of its specification, never of its content (``digest``: at most 36
    characters)."""

    name: str
    digest: str
    source: str
    profile: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedTrial:
    """One trial of the grid.

    Unknown values, of a trial that failed or has not run, are None or empty. For a stopped trial, privacy and quality
    are those at the time it was stopped.

    labels: the values that distinguish the trials of a sweep; always ``clipping``, ``schedule`` and ``seed``. Finished
    trials whose labels differ only in `RUNS` form one setting and are averaged. error: why the trial failed.
    params: flat, numbers as numbers (``epochs: 30``, ``noise.initial_noise_multiplier: 1.3``); entries may be added
    while the trial runs, but none may change. attempts: what every start of the trial has released; for its cost, see
    `comparison.ledger`. accounts: what accounting it again has found. started, ended: of training, in seconds since
    1970 UTC. is_asked: by the sweep file, not by an earlier version of it alone. tuning: None without one, and where
    what was tried is private. candidates: what an unaccounted tuning released on the same records before it chose.
    """

    key: str
    labels: Mapping[str, Label]
    state: TrialState
    error: str | None = None
    privacy: PublishedPrivacy | None = None
    quality: PublishedQuality | None = None
    individuals: IndividualStatistics | None = None
    attacks: tuple[PublishedAttack, ...] = ()
    memberships: tuple[PublishedMembership, ...] = ()
    departures: tuple[PublishedDepartures, ...] = ()
    audit: PublishedAudit | None = None
    history: tuple[PublishedEpoch, ...] = ()
    notes: tuple[str, ...] = ()
    params: Mapping[str, Label] = field(default_factory=dict)
    dataset: PublishedDataset | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    attempts: tuple[Attempt, ...] = ()
    accounts: tuple[PublishedAccount, ...] = ()
    started: float | None = None
    ended: float | None = None
    is_asked: bool = True
    tuning: PublishedTuning | None = None
    candidates: tuple[Attempt, ...] = ()

    @property
    def wall_seconds(self) -> float | None:
        """Duration of training in seconds; None until it has ended."""
        return self.ended - self.started if self.started is not None and self.ended is not None else None

    @property
    def is_baseline(self) -> bool:
        """Whether the trial is known to be non-private."""
        return self.privacy is not None and not self.privacy.is_private

    @property
    def setting(self) -> dict[str, Label]:
        """The labels without those of `RUNS`."""
        return {name: value for name, value in self.labels.items() if name not in RUNS}


@dataclass(frozen=True)
class PublishedSweep:
    """A sweep, as shown.

    provenance: flat entries of the manifest (versions, git state, hardware, data). worst_group: the metric of groups by
    whose worst value settings are compared.
    """

    name: str
    trials: tuple[PublishedTrial, ...]
    delta: float
    disclosure: Disclosure = "none"
    created: str = ""
    provenance: Mapping[str, str] = field(default_factory=dict)
    worst_group: str = "accuracy"

    @property
    def task(self) -> str:
        """The task of the trials that were tested; all trials of a sweep have one."""
        return task_of(self.trials)


def task_of(trials: Iterable[PublishedTrial]) -> str:
    """The task of the first trial that was tested; classification where none was."""
    return next((trial.quality.task for trial in trials if trial.quality is not None), "classification")
