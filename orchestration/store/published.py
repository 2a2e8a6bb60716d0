"""Publishable records: results leave a sweep for the report and MLflow only in these types.

No type here can hold a value of a single training example. Only `IndividualStatistics` holds statistics of the training
examples' epsilons, and says whether they were released with differential privacy or are exact; None means that they are
withheld. `PublishedAccount`, `PublishedAttack`, `MembershipAttack`, `PublishedAudit` and `PublishedCourse` are exact,
and present only where exact statistics are shown. Everything else is public by construction: configuration, the
mechanism's own noise, clipping bounds post-processed from noisy values, worst-case guarantees, and evaluations on held-
out test data.

Epsilons are plain floats: ``math.inf`` means not private, None means not computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import NonNegativeInt

from dpsweep.accounting.attacks import AttackRisk
from dpsweep.accounting.mechanism.estimates import Kind
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.accounting.mechanism.samplings import Adjacency
from dpsweep.accounting.mechanism.units import EXAMPLE, UnitName
from dpsweep.orchestration.store.attempts import Attempt
from dpsweep.orchestration.store.release_modes import Disclosure
from dpsweep.workers.evaluation.attack_results import ExposureAttack, MembershipAttack
from dpsweep.workers.evaluation.rates import ConfusionCounts
from dpsweep.workers.machine.memory import DeviceUse
from dpsweep.workers.spec import AuditKind, Transcript
from dpsweep.workers.tasks import main_score

Label = str | int | float | bool
RUNS = ("seed", "split_seed")
"""Labels that distinguish the runs of one setting: the training seed, and the seed of the data splits."""
NON_PRIVATE = "non-private"
"""The clipping label of a trial without clipping, which has no privacy guarantee."""


class TrialState(StrEnum):
    """State of a trial, with its word and its style on a terminal. STOPPED: stopped early by the scheduler.

    >>> TrialState.ACCOUNTING.word, TrialState.ACCOUNTING.is_running, TrialState.STOPPED.has_ended
    ('running', True, True)
    """

    PENDING = "pending"
    TRAINING = "training"
    ACCOUNTING = "accounting"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def has_ended(self) -> bool:
        """Return whether the trial is finished, stopped or failed."""
        return self in (TrialState.FINISHED, TrialState.STOPPED, TrialState.FAILED)

    @property
    def is_running(self) -> bool:
        """Return whether the trial is training or being accounted."""
        return self in (TrialState.TRAINING, TrialState.ACCOUNTING)

    @property
    def word(self) -> str:
        """The word for the state in results.json, the report and MLflow."""
        return "running" if self.is_running else self.value

    @property
    def style(self) -> str:
        """The rich style of the state on a terminal."""
        return _STYLES[self]


_STYLES: Mapping[TrialState, str] = {
    TrialState.PENDING: "yellow",
    TrialState.TRAINING: "bold",
    TrialState.ACCOUNTING: "cyan",
    TrialState.FINISHED: "green",
    TrialState.STOPPED: "yellow",
    TrialState.FAILED: "red",
}


@dataclass(frozen=True)
class PublishedPrivacy:
    """The worst-case (epsilon, delta) of one trial, with its accountant, kind and adjacency.

    `group_epsilons`: epsilon of any group of k records, at the same delta, by group size k.
    `group_kinds`: their kinds, which may be weaker than that of one record: a filter limits single records alone.
    `risks`: upper bounds on attacks on any k records, by group size k including 1; empty without noise.
    `reasons`: why epsilon is an estimate (`dpsweep.accounting.mechanism.reasons`).
    `unit`: whose privacy it is, "example" or "user".
    `noise_strategy`: as of `NoiseSpec`.
    `squared_errors`: as of a `TrainingResult`.
    """

    epsilon: float
    delta: float
    accountant: str
    kind: Kind = "guarantee"
    adjacency: Adjacency = "add_remove"
    noise_strategy: str = "independent"
    squared_errors: tuple[float, float] | None = None
    unit: UnitName = EXAMPLE.name
    group_epsilons: Mapping[int, float] = field(default_factory=dict)
    group_kinds: Mapping[int, Kind] = field(default_factory=dict)
    risks: Mapping[int, AttackRisk] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()

    @property
    def is_private(self) -> bool:
        """Return whether epsilon is finite."""
        return self.epsilon < math.inf

    @property
    def holds_for(self) -> str:
        """Return the adjacency, and the noise strategy unless noise is independent, in words."""
        correlated = "" if self.noise_strategy == "independent" else f", noise {self.noise_strategy}"
        return f"{self.adjacency}{correlated}"


@dataclass(frozen=True)
class PublishedCourse:
    """Course of training for the training examples of one group: exact, so any page or run that shows it is sensitive.

    Means over ``examples``, one for each of the last epochs; None if no gradient was finite. `losses`, `norms`: loss,
    and gradient norm before clipping. `biases`, `noises`: the two error terms of the group's mean gradient (paper D,
    Section 4.2). The first is the norm of the difference that clipping makes. The second is the root mean square norm
    of the noise, divided by the expected number of the group's examples in a batch.
    """

    examples: int
    losses: tuple[float | None, ...]
    norms: tuple[float | None, ...]
    biases: tuple[float | None, ...]
    noises: tuple[float | None, ...]


@dataclass(frozen=True)
class PublishedGroup:
    """Loss on one group of the test data, with its accuracy or, for a task besides classification, scores by name.

    `accuracy_change`: accuracy minus the accuracy of the non-private baseline with the same data, model and seed, in
    [-1, 1] (negative: accuracy lost to privacy); None without a baseline. `training`: course of the group's training
    examples; None if exact statistics are not shown. `on_training`: as in `PublishedQuality`, for the group's training
    examples.
    """

    name: str
    test_examples: int
    accuracy: float | None
    loss: float | None = None
    accuracy_change: float | None = None
    counts: ConfusionCounts | None = None
    training: PublishedCourse | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    on_training: float | None = None
    user_accuracy: float | None = None
    """As in `dpsweep.workers.evaluation.scores.GroupEvaluation`."""

    @property
    def main(self) -> float | None:
        """The main score of the task, such as accuracy; None if it is not defined."""
        return main_score(self.accuracy, self.scores)


@dataclass(frozen=True)
class PublishedQuality:
    """Evaluation on test data. `task`: a name in `dpsweep.workers.tasks.TASKS`.

    `accuracy`, `accuracy_change`, `fairness`, `counts`: for classification only.
    `fairness`: gaps between groups by name (`dpsweep.workers.evaluation.rates.gaps`).
    `counts`: over all groups.
    `scores`, `parts`: for other tasks, scores by name, and scores of single labels or targets. The change of a score is
    named after the score with ``_change``.
    `on_training`: ``main`` on the training examples; None if it was not asked for, or exact statistics are not shown.
    `hidden`: names of groups that are not in ``groups``, because they are too small in the test data or would give away
    one that is.
    `constant`: as of an `Evaluation`.
    """

    accuracy: float | None
    loss: float
    accuracy_change: float | None = None
    groups: tuple[PublishedGroup, ...] = ()
    fairness: Mapping[str, float] = field(default_factory=dict)
    counts: ConfusionCounts | None = None
    task: str = "classification"
    scores: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    on_training: float | None = None
    hidden: tuple[str, ...] = ()
    user_accuracy: float | None = None
    constant: float | None = None

    @property
    def main(self) -> float | None:
        """As in `PublishedGroup`."""
        return main_score(self.accuracy, self.scores)


@dataclass(frozen=True)
class GroupEpsilon:
    """Mean epsilon_i over the training examples of one group.

    standard_error: that of the release's noise (disclosure ``private``), or of the mean (``raw``).
    loss_correlation: as in `IndividualStatistics`, over the examples of the group.
    """

    name: str
    mean: float
    standard_error: float | None = None
    examples: float | None = None
    loss_correlation: float | None = None


@dataclass(frozen=True)
class EpsilonHistogram:
    """``counts[j]`` examples have epsilon_i in [edges[j], edges[j + 1]); noisy counts may be negative or fractional."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True)
class Density:
    """``counts[i][j]`` examples have x in [x_edges[i], x_edges[i + 1]) and y in [y_edges[j], y_edges[j + 1])."""

    x_edges: tuple[float, ...]
    y_edges: tuple[float, ...]
    counts: tuple[tuple[NonNegativeInt, ...], ...]


@dataclass(frozen=True)
class EstimateQuality:
    """Estimated epsilon_i compared with exact ones, of ``examples`` random examples with norms taken at every step.

    `correlation`: Pearson's r; None if either side is constant. `mean_error`, `largest_error`: absolute differences of
    epsilons. `density`: exact epsilon_i (x) against estimated epsilon_i (y).
    """

    examples: int
    correlation: float | None
    mean_error: float
    largest_error: float
    density: Density | None = None


@dataclass(frozen=True)
class IndividualStatistics:
    """Statistics over the epsilon_i of all training examples.

    `disclosure`: ``private`` if every number here was released with DP, at a cost in the trial's epsilon; ``raw`` if
    they are exact. Any page or run that shows exact ones is sensitive.
    `kind`: kind of claim of each epsilon_i.
    `method`: accounting method of the epsilon_i, ``filter`` if a filter enforced them. `release_epsilon` (``private``
    only): epsilon of the release alone. `estimates` (``raw`` only): present if the sweep sets ``norms.exact_examples``
    and no filter enforced the epsilon_i. `loss_correlation` (``raw`` only): Pearson's r of epsilon_i and the log of the
    example's loss when norms were last taken; None if undefined. `loss_density` (``raw`` only): the log of that loss
    (x) against epsilon_i (y), over the examples whose loss is positive and finite.
    `reasons`: why each epsilon_i is an estimate.
    """

    disclosure: Disclosure
    kind: Kind
    method: str = ""
    mean: float | None = None
    median: float | None = None
    quantiles: Mapping[float, float] = field(default_factory=dict)
    groups: tuple[GroupEpsilon, ...] = ()
    histogram: EpsilonHistogram | None = None
    release_epsilon: float | None = None
    estimates: EstimateQuality | None = None
    loss_correlation: float | None = None
    loss_density: Density | None = None
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class UserEpsilons:
    """Median and largest epsilon of ``users`` users, each for all of up to ``most_records`` records of the user."""

    users: int
    most_records: int
    median: float | None
    largest: float


@dataclass(frozen=True)
class PublishedAccount:
    """Result of `dpsweep account` for a trial: exact, so any page or run that shows it is sensitive.

    `name`: name of its folder.
    `epsilon`, `accountant`, `kind`: the worst case at ``delta``.
    `group_epsilons`: epsilon of any k records, by k.
    `method`, `individual_kind`, `mean`, `median`: for the epsilon_i.
    `group_means`: mean epsilon_i by group.
    `of_users`: of users, if they were asked for.
    `reasons`: why epsilon is an estimate.
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
    of_users: UserEpsilons | None = None
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class PublishedTuning:
    """Tuning of a trial's setting before the trial was trained. `by`: the score that selected the best candidate.

    `chosen`: chosen values by parameter. `tried`: values and score of each candidate; the score is None if it failed.
    """

    by: str
    chosen: Mapping[str, object]
    tried: tuple[tuple[Mapping[str, object], float | None], ...]


@dataclass(frozen=True)
class PublishedAttack:
    """Loss-threshold membership inference on one group: exact, so any page or run that shows it is sensitive.

    `examples`: attacked examples, half of them members. `success_rate`: share of correct guesses; random guesses have
    0.5.
    """

    name: str
    examples: int
    success_rate: float
    standard_error: float


@dataclass(frozen=True)
class PublishedDepartures:
    """Training examples of one group that left training: exact, so any page or run that shows it is sensitive.

    `left`: number of the group's ``examples`` that had spent their whole filter budget, after each epoch.
    """

    name: str
    examples: int
    left: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PublishedAudit:
    """Lower bounds on epsilon from a one-run audit: exact, so any page or run that shows it is sensitive.

    `name`: of an audit by `dpsweep audit`, on a copy of the trial; "" for one of the trial itself.
    `kind`, `transcript`: as of `dpsweep.workers.spec.AuditSpec`.
    `of_canary`: epsilon that made-up canaries pay.
    `lower_bound`: on epsilon, from ``correct`` right guesses among ``guesses``, over all canaries.
    `lower_bounds`: of each test that was made on all canaries, by name.
    `groups`: bounds from the canaries of each group, by name.
    All bounds hold together with probability ``confidence``; 0 means that nothing was proved.
    """

    name: str
    kind: AuditKind
    transcript: Transcript
    canaries: int
    confidence: float
    of_canary: float | None
    lower_bound: float
    lower_bounds: Mapping[str, float]
    groups: Mapping[str, float]
    guesses: int
    correct: int


@dataclass(frozen=True)
class PublishedEpoch:
    """One epoch of training, counted from 0; ``step`` is the number of steps taken when it ended.

    `clipping_bounds`: by group name, or under ``"all"`` if all groups share one bound; public values only (a bound
    derived from noisy counts is public, the thresholds of individual clipping are not). `metrics`: by name, such as
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
    profile: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedTrial:
    """One trial of the grid.

    Values that are unknown, because the trial failed or has not run, are None or empty. For a stopped trial, privacy
    and quality are those at the time it was stopped.

    `labels`: the values that distinguish the trials of a sweep; always ``clipping``, ``schedule`` and ``seed``.
    Finished trials whose labels differ only in `RUNS` form one setting and are averaged.
    `error`: why the trial failed.
    `params`: flat, numbers as numbers (``epochs: 30``, ``noise.initial_noise_multiplier: 1.3``); entries may be added
    while the trial runs, but none may change.
    `attempts`: releases of every start of the trial; for their cost, see `comparison.ledger`.
    `accounts`, `audits`: results of `dpsweep account` and `dpsweep audit`.
    `started`, `ended`: start and end of training, in seconds since 1970 UTC.
    `is_asked`: False if only an earlier version of the sweep file asked for it.
    `tuning`: None without tuning, and if its candidates are private.
    `candidates`: releases of the candidates of an unaccounted tuning, which trained on the same records.
    `references`: scores of simple models that were trained beside a baseline (`dpsweep.workers.evaluation.references`).
    `is_added`: whether results may have decided that there is such a trial: it was added to a sweep that had shown some
    (`Manifest.added`), its sweep adds seeds (``compare.looks``), or another sweep is compared with its own.
    """

    key: str
    labels: Mapping[str, Label]
    state: TrialState
    error: str | None = None
    privacy: PublishedPrivacy | None = None
    quality: PublishedQuality | None = None
    individuals: IndividualStatistics | None = None
    attacks: tuple[PublishedAttack, ...] = ()
    memberships: tuple[MembershipAttack, ...] = ()
    exposure: ExposureAttack | None = None
    departures: tuple[PublishedDepartures, ...] = ()
    audit: PublishedAudit | None = None
    audits: tuple[PublishedAudit, ...] = ()
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
    device: DeviceUse | None = None
    references: Mapping[str, float] = field(default_factory=dict)
    is_added: bool = False

    @property
    def every_audit(self) -> tuple[PublishedAudit, ...]:
        """Return the audit of the trial itself, if there was one, and the audits of its copies."""
        return (*((self.audit,) if self.audit else ()), *self.audits)

    @property
    def wall_seconds(self) -> float | None:
        """Duration of training in seconds; None until it has ended."""
        return self.ended - self.started if self.started is not None and self.ended is not None else None

    @property
    def is_selected(self) -> bool:
        """Return whether the trial is the best of candidates by a private selection."""
        return any(attempt.trace.selection is not None for attempt in self.attempts)

    @property
    def is_baseline(self) -> bool:
        """Return whether the trial is known to be non-private."""
        return self.privacy is not None and not self.privacy.is_private

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Return why the epsilon of the trial is an estimate; empty if it is a guarantee, and for a baseline."""
        return self.privacy.reasons if self.privacy else ()

    @property
    def setting(self) -> dict[str, Label]:
        """The labels except those in `RUNS`."""
        return {name: value for name, value in self.labels.items() if name not in RUNS}


@dataclass(frozen=True)
class PublishedSweep:
    """A sweep as shown in the report and in MLflow.

    `provenance`: flat entries of the manifest (versions, git state, hardware). `worst_group`: the group metric whose
    worst value over groups compares settings. `looks`: ``compare.looks`` of the sweep file.
    """

    name: str
    trials: tuple[PublishedTrial, ...]
    delta: float
    disclosure: Disclosure = "none"
    created: str = ""
    provenance: Mapping[str, str] = field(default_factory=dict)
    worst_group: str = "accuracy"
    looks: int = 0

    @property
    def task(self) -> str:
        """The task of the sweep, which all its trials share."""
        return task_of(self.trials)


def task_of(trials: Iterable[PublishedTrial]) -> str:
    """Return the task of the first evaluated trial; classification if none was evaluated."""
    return next((trial.quality.task for trial in trials if trial.quality is not None), "classification")


def has_groups(trials: Iterable[PublishedTrial]) -> bool:
    """Return whether any trial has several groups of test examples, so that there is a worst-served one."""
    return any(len(trial.quality.groups) > 1 for trial in trials if trial.quality)
