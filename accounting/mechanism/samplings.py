"""How the batches of a run are drawn: a class per sampling, and the registry of their names.

A sampling states all that accountants, planner, files and the command line need to know. To add one, write a class and
a line of `SAMPLINGS` here, and a sampler in `dpsweep.workers.sampling.samplers` that draws its batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass
from enum import Enum
from typing import Any, ClassVar, Final, Literal, Protocol, Self, assert_never, final

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism, count_of, keep_finite, keep_whole
from dpsweep.accounting.registry import lookup, one_of

Array = NDArray[np.float64]
Adjacency = Literal["add_remove", "zero_out", "fixed_graph", "replace_one"]
"""``add_remove``: one data set is the other plus one record. ``zero_out``: one record is replaced by a null record that
contributes nothing; the size is the same. Shuffled runs use it, because their batches stay aligned under it.
``fixed_graph``: so are all records that one user owns or shares. ``replace_one``: one record is replaced by any other.
Covered where nothing is sampled: full batches and reshuffled epochs, whose sums move by at most twice the sensitivity
(docs/group-proof.md, Theorem 5).
"""


class Draws(Enum):
    """How one round of a sampling draws examples, which decides which theorems apply.

    INDEPENDENT: each example joins each batch independently, with the same probability. SUBSET: batches are independent
    of each other, and given the number of a group's members in a batch, all subsets of that size are equally likely.
    EPOCH: each example is in exactly one batch of every epoch, which is one round. IN_TURN: each example may join only
    every so many batches, and joins those independently. ALLOCATED: each example joins one batch of every block, which
    is one round, chosen uniformly and independently of other examples.
    """

    INDEPENDENT = 1
    SUBSET = 2
    EPOCH = 3
    IN_TURN = 4
    ALLOCATED = 5


SMALLEST_RATE = 1e-12
"""Smallest accepted sample rate q: below it, rounding 1 - q to a double loses too many digits of q."""


class Sampling(Protocol):
    """Interface of all samplings. Implementations are frozen dataclasses of numbers; files store fields by name."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    stored_name: ClassVar[str]
    """Name in the file of a trace."""
    words: ClassVar[str]
    """Words for the batches in messages, in the plural."""
    displaced: ClassVar[int]
    """Number of other examples that leave a batch when an example joins it; each may contribute in full."""

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:
        """Adjacencies under which runs can be accounted for; the first is the default of planned runs."""

    @property
    def draws(self) -> Draws:
        """Return how one round draws examples."""

    @property
    def draws_its_pair(self) -> bool:
        """Return whether a run with these batches is its rounds' pairs, so that their lower bounds are its own."""

    @property
    def sample_rate(self) -> float:
        """The probability that a given example is in a given round: a step, or an epoch where that is one round."""

    @property
    def steps_per_epoch(self) -> int:
        """Data-set size over (expected) batch size, rounded up."""

    @property
    def steps_per_round(self) -> int:
        """Number of steps of one round: 1, or as many as an epoch or a block has (`Draws`)."""

    def members_drawn(self, group_size: int) -> tuple[Array, Array]:
        """Return the possible numbers of a group's members in a round, ascending, and their log-probabilities up to a
        common constant; both [numbers].
        """

    def require_fits(self, dataset_size: int) -> None:
        """Raise `InvalidInput` if a data set of ``dataset_size`` examples cannot have such batches."""


class SizedSampling(Sampling, Protocol):
    """A sampling determined by the sizes of data set and batch."""

    @classmethod
    def of_sizes(cls, dataset_size: int, batch_size: int) -> Self:
        """Return the sampling with batches of ``batch_size`` (expected, for Poisson) of ``dataset_size`` examples.

        Raises: InvalidInput unless both are whole and 1 <= batch_size <= dataset_size.
        """


def _unsampled(always: tuple[Adjacency, ...], sample_rate: float) -> tuple[Adjacency, ...]:
    """``always``, and ``replace_one`` where every example is in every batch."""
    return (*always, "replace_one") if sample_rate == 1.0 else always


@final
@dataclass(frozen=True)
class PoissonSampling:
    """Each example joins each batch independently with probability ``sample_rate``."""

    stored_name: ClassVar[str] = "poisson"
    words: ClassVar[str] = "Poisson batches"
    draws: ClassVar[Draws] = Draws.INDEPENDENT
    steps_per_round: ClassVar[int] = 1
    draws_its_pair: ClassVar[bool] = True
    displaced: ClassVar[int] = 0

    sample_rate: float

    def __post_init__(self) -> None:
        keep_finite(self, "sample_rate", "sample_rate", at_least=SMALLEST_RATE, at_most=1.0)

    @classmethod
    def of_sizes(cls, dataset_size: int, batch_size: int) -> Self:
        sizes = FixedBatchSampling(dataset_size, batch_size)
        return cls(sizes.batch_size / sizes.dataset_size)

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:
        return _unsampled(("add_remove", "zero_out"), self.sample_rate)

    @property
    def steps_per_epoch(self) -> int:
        """1/q rounded up; the rounding error of q = B/n, 1e-16 relative, does not add a step.

        >>> PoissonSampling.of_sizes(dataset_size=60_000, batch_size=256).steps_per_epoch
        235
        """
        return math.ceil(1.0 / self.sample_rate * (1.0 - 1e-12))

    def members_drawn(self, group_size: int) -> tuple[Array, Array]:
        """Return Binomial(k, q)."""
        if self.sample_rate == 1.0:
            return np.array([float(group_size)]), np.zeros(1)
        drawn = np.arange(group_size)
        odds = np.log(group_size - drawn) - np.log(drawn + 1.0) + np.log(self.sample_rate) - np.log1p(-self.sample_rate)
        return np.arange(group_size + 1.0), np.concatenate(([0.0], np.cumsum(odds)))

    def require_fits(self, dataset_size: int) -> None:
        """Accept every size."""


@final
@dataclass(frozen=True)
class FixedBatchSampling:
    """Each batch is a uniformly random subset of exactly ``batch_size`` of ``dataset_size`` examples.

    An example that joins a batch displaces another from it. Not accounted for under zero-out: a batch with the blanked
    example holds one fewer of the others, which reveals its presence and so defeats the amplification by sampling
    (docs/group-proof.md).
    """

    stored_name: ClassVar[str] = "fixed"
    words: ClassVar[str] = "fixed batches"
    draws: ClassVar[Draws] = Draws.SUBSET
    steps_per_round: ClassVar[int] = 1
    draws_its_pair: ClassVar[bool] = True
    displaced: ClassVar[int] = 1

    dataset_size: int
    batch_size: int

    def __post_init__(self) -> None:
        keep_whole(self, "dataset_size", "dataset_size", at_least=1)
        keep_whole(self, "batch_size", "batch_size", at_least=1)
        if self.batch_size > self.dataset_size:
            raise InvalidInput(
                f"batch_size is {self.batch_size}, but the data set has {count_of(self.dataset_size, 'example')}; "
                "choose a batch_size no larger than the data set"
            )

    @classmethod
    def of_sizes(cls, dataset_size: int, batch_size: int) -> Self:
        return cls(dataset_size, batch_size)

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]:
        return _unsampled(("add_remove",), self.sample_rate)

    @property
    def sample_rate(self) -> float:
        return self.batch_size / self.dataset_size

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.dataset_size / self.batch_size)

    def members_drawn(self, group_size: int) -> tuple[Array, Array]:
        """Return Hypergeometric(n, k, B). Raises InvalidInput for a group larger than the data set."""
        size, batch = self.dataset_size, self.batch_size
        if group_size > size:
            raise InvalidInput(
                f"group_size is {group_size}, but the data set has {count_of(size, 'example')}; ask about at most "
                "all of them"
            )
        fewest, most = max(0, group_size + batch - size), min(group_size, batch)
        drawn = np.arange(fewest, most)
        odds = (
            np.log(group_size - drawn)
            + np.log(batch - drawn)
            - np.log(drawn + 1.0)
            - np.log(size - group_size - batch + drawn + 1.0)
        )
        return np.arange(fewest, most + 1.0), np.concatenate(([0.0], np.cumsum(odds)))

    def require_fits(self, dataset_size: int) -> None:
        _require_same_size(self, dataset_size)


def _require_same_size(sampling: FixedBatchSampling | TruncatedPoissonSampling, dataset_size: int) -> None:
    if sampling.dataset_size != dataset_size:
        raise InvalidInput(
            f"{sampling.words} are drawn from {count_of(sampling.dataset_size, 'example')}, but the data set of "
            f"the trace has {dataset_size}; give both the same dataset_size"
        )


@dataclass(frozen=True)
class _OneVisit(ABC):
    """Each epoch visits every example once, in ``steps_per_epoch`` disjoint batches, and is one round.

    Not accounted for under add/remove: one record more shifts every later batch of the epoch.
    """

    draws: ClassVar[Draws] = Draws.EPOCH
    displaced: ClassVar[int] = 0
    sample_rate: ClassVar[float] = 1.0

    steps_per_epoch: int

    def __post_init__(self) -> None:
        keep_whole(self, "steps_per_epoch", "steps_per_epoch", at_least=1)

    @property
    @abstractmethod
    def draws_its_pair(self) -> bool:
        """As in `Sampling`."""

    @property
    def steps_per_round(self) -> int:
        return self.steps_per_epoch

    @classmethod
    def of_sizes(cls, dataset_size: int, batch_size: int) -> Self:
        return cls(FixedBatchSampling(dataset_size, batch_size).steps_per_epoch)

    def members_drawn(self, group_size: int) -> tuple[Array, Array]:
        """Return all members, in every epoch."""
        return np.array([float(group_size)]), np.zeros(1)

    def require_fits(self, dataset_size: int) -> None:
        if self.steps_per_epoch > dataset_size:
            raise InvalidInput(
                f"steps_per_epoch is {self.steps_per_epoch}, but an epoch over {count_of(dataset_size, 'example')} has "
                "at most as many batches; give the data set's own size"
            )


@final
@dataclass(frozen=True)
class ShuffledSampling(_OneVisit):
    """Each epoch visits every example once, in a fresh random order, in ``steps_per_epoch`` disjoint batches.

    Not accounted for under add/remove: one record more shifts every later batch of the epoch.
    """

    stored_name: ClassVar[str] = "shuffled"
    words: ClassVar[str] = "shuffled epochs"
    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("zero_out", "replace_one")

    @property
    def draws_its_pair(self) -> bool:
        """Only in epochs of one step: the pair is that of the worst order, and the order is random."""
        return self.steps_per_epoch == 1


@final
@dataclass(frozen=True)
class FixedOrderSampling(_OneVisit):
    """Every epoch visits every example once, in the same order, in ``steps_per_epoch`` disjoint batches.

    Two visits of one example are as many steps apart (min-separation), and nothing is sampled. Not accounted for under
    add/remove, as `ShuffledSampling` is not.
    """

    stored_name: ClassVar[str] = "fixed_order"
    words: ClassVar[str] = "epochs of one order"
    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("zero_out",)
    draws_its_pair: ClassVar[bool] = False


@final
@dataclass(frozen=True)
class RandomAllocationSampling:
    """Each example joins one step of every block of an epoch, chosen uniformly and independently of other examples.

    An epoch of ``steps_per_epoch`` steps consists of ``per_epoch`` blocks of equal length; each draws its own choices.
    Accounted for one example, by privacy loss distributions (docs/accounting-proofs.md, "Random allocation").
    """

    stored_name: ClassVar[str] = "random_allocation"
    words: ClassVar[str] = "randomly allocated batches"
    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("add_remove", "zero_out")
    draws: ClassVar[Draws] = Draws.ALLOCATED
    draws_its_pair: ClassVar[bool] = True
    displaced: ClassVar[int] = 0
    sample_rate: ClassVar[float] = 1.0

    steps_per_epoch: int
    per_epoch: int = 1

    def __post_init__(self) -> None:
        keep_whole(self, "steps_per_epoch", "steps_per_epoch", at_least=1)
        keep_whole(self, "per_epoch", "per_epoch", at_least=1, at_most=self.steps_per_epoch)
        if self.steps_per_epoch % self.per_epoch:
            raise InvalidInput(
                f"per_epoch is {self.per_epoch}, but must divide the {self.steps_per_epoch} steps of an epoch, into "
                "equal blocks"
            )

    @classmethod
    def of_sizes(cls, dataset_size: int, batch_size: int, per_epoch: int = 1) -> Self:
        """Return epochs of ``dataset_size`` / ``batch_size`` steps, rounded up."""
        return cls(FixedBatchSampling(dataset_size, batch_size).steps_per_epoch, per_epoch)

    @property
    def steps_per_round(self) -> int:
        """Number of steps of a block; an example joins one of them."""
        return self.steps_per_epoch // self.per_epoch

    def members_drawn(self, group_size: int) -> tuple[Array, Array]:
        """Raise `UnsupportedMechanism`: members may join different steps of a block."""
        raise UnsupportedMechanism(f"no law of the members of a group is known in {self.words}")

    def require_fits(self, dataset_size: int) -> None:
        """Accept every size: a batch may be empty."""


@final
@dataclass(frozen=True)
class TruncatedPoissonSampling:
    """Poisson batches of ``dataset_size`` examples, cut to a uniformly random subset of at most ``max_batch_size``.

    In a batch that is cut, an example that joins may displace another. A step is one of several cases, by a public
    draw: the event that the other examples left no room has the same law with the example and without
    (`dpsweep.accounting.mechanism.reductions.cases_of`). A maximum of ``dataset_size`` or more cuts nothing, whoever
    joins. Not accounted for under zero-out, for the same reason as `FixedBatchSampling`, nor under replace-one. Proof:
    docs/group-proof.md, Theorem 4.
    """

    stored_name: ClassVar[str] = "truncated_poisson"
    words: ClassVar[str] = "truncated Poisson batches"
    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("add_remove",)
    draws: ClassVar[Draws] = Draws.INDEPENDENT
    steps_per_round: ClassVar[int] = 1
    draws_its_pair: ClassVar[bool] = False
    displaced: ClassVar[int] = 1

    dataset_size: int
    sample_rate: float
    max_batch_size: int

    def __post_init__(self) -> None:
        keep_whole(self, "dataset_size", "dataset_size", at_least=1)
        keep_finite(self, "sample_rate", "sample_rate", at_least=SMALLEST_RATE, at_most=1.0)
        keep_whole(self, "max_batch_size", "max_batch_size", at_least=1)

    @classmethod
    def of_sizes(cls, dataset_size: int, batch_size: int, max_batch_size: int) -> Self:
        """Return batches of ``batch_size`` expected examples, cut to at most ``max_batch_size``.

        Raises: InvalidInput unless batch_size <= max_batch_size <= dataset_size.
        """
        whole = PoissonSampling.of_sizes(dataset_size, batch_size)
        if not batch_size <= max_batch_size <= dataset_size:
            raise InvalidInput(
                f"max_batch_size is {max_batch_size}, but must be between the expected batch_size {batch_size} and the "
                f"{dataset_size} examples; leave it out for batches of any size"
            )
        return cls(dataset_size, whole.sample_rate, max_batch_size)

    @property
    def uncut(self) -> PoissonSampling:
        """The Poisson sampling of the batches before they are cut."""
        return PoissonSampling(self.sample_rate)

    @property
    def steps_per_epoch(self) -> int:
        return self.uncut.steps_per_epoch

    def members_drawn(self, group_size: int) -> tuple[Array, Array]:
        """Return Binomial(k, q): members drawn before a batch is cut."""
        return self.uncut.members_drawn(group_size)

    def require_fits(self, dataset_size: int) -> None:
        _require_same_size(self, dataset_size)


@final
@dataclass(frozen=True)
class CyclicPoissonSampling:
    """Examples are in ``cycle_length`` groups that take turns: the group of a step joins by ``sample_rate`` each.

    The group of an example is known before the run and depends on no other example, so that adding an example leaves
    the others where they are. Lower bounds are for an example of the group whose turn comes first. The cost of a turn
    is proven for one example (docs/accounting-proofs.md, "Correlated noise").
    """

    stored_name: ClassVar[str] = "cyclic_poisson"
    words: ClassVar[str] = "cyclic Poisson batches"
    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("add_remove", "zero_out")
    draws: ClassVar[Draws] = Draws.IN_TURN
    steps_per_round: ClassVar[int] = 1
    draws_its_pair: ClassVar[bool] = True
    displaced: ClassVar[int] = 0

    cycle_length: int
    sample_rate: float

    def __post_init__(self) -> None:
        keep_whole(self, "cycle_length", "cycle_length", at_least=1)
        keep_finite(self, "sample_rate", "sample_rate", at_least=SMALLEST_RATE, at_most=1.0)

    @classmethod
    def of_sizes(cls, dataset_size: int, batch_size: int, cycle_length: int = 1) -> Self:
        """Return batches of ``batch_size`` expected examples, in groups of about ``dataset_size / cycle_length``.

        Raises: InvalidInput if a group has fewer examples than a batch.
        """
        sizes = FixedBatchSampling(dataset_size, batch_size)
        if not isinstance(cycle_length, int) or not 1 <= cycle_length * batch_size <= dataset_size:
            raise InvalidInput(
                f"a cycle has {cycle_length} groups, but {count_of(dataset_size, 'example is', 'examples are')} enough "
                f"for 1 to {count_of(dataset_size // batch_size, 'group')} of at least the batch_size {batch_size}; "
                "choose fewer groups or smaller batches"
            )
        return cls(cycle_length, cycle_length * sizes.batch_size / sizes.dataset_size)

    @property
    def steps_per_epoch(self) -> int:
        """Cycles until every example has been met once on average, in steps, rounded up."""
        return math.ceil(self.cycle_length / self.sample_rate * (1.0 - 1e-12))

    def members_drawn(self, group_size: int) -> tuple[Array, Array]:
        """Raise `UnsupportedMechanism`: members may take turns in different steps."""
        raise UnsupportedMechanism(f"no law of the members of a group is known in {self.words}")

    def require_fits(self, dataset_size: int) -> None:
        """Accept every size."""


@final
@dataclass(frozen=True)
class DisplacingSampling:
    """A bound, not a way to draw batches: the batches of ``base``, with every example displacing one other.

    It dominates truncated batches (docs/group-proof.md, Theorem 4) and replaced records (Theorem 5).
    """

    stored_name: ClassVar[str] = "displacing"
    words: ClassVar[str] = "batches in which examples displace others"
    adjacencies: ClassVar[tuple[Adjacency, ...]] = ("add_remove", "zero_out")
    displaced: ClassVar[int] = 1

    base: Sampling

    @property
    def draws(self) -> Draws:
        return self.base.draws

    @property
    def draws_its_pair(self) -> bool:
        return self.base.draws_its_pair

    @property
    def sample_rate(self) -> float:
        return self.base.sample_rate

    @property
    def steps_per_epoch(self) -> int:
        return self.base.steps_per_epoch

    @property
    def steps_per_round(self) -> int:
        return self.base.steps_per_round

    def members_drawn(self, group_size: int) -> tuple[Array, Array]:
        return self.base.members_drawn(group_size)

    def require_fits(self, dataset_size: int) -> None:
        self.base.require_fits(dataset_size)


SAMPLINGS: Mapping[str, type[SizedSampling]] = {
    "poisson": PoissonSampling,
    "fixed": FixedBatchSampling,
    "shuffle": ShuffledSampling,
    "random_allocation": RandomAllocationSampling,
    "cyclic_poisson": CyclicPoissonSampling,
    "fixed_order": FixedOrderSampling,
}
"""Samplings by their name in sweep files and on the command line."""
RANDOM_ALLOCATION: Final = RandomAllocationSampling.stored_name
CYCLIC_POISSON: Final = CyclicPoissonSampling.stored_name
FIXED_ORDER: Final = FixedOrderSampling.stored_name


def stored_kinds() -> tuple[type[Sampling], ...]:
    """Return every sampling class that the file of a trace may name."""
    return (*SAMPLINGS.values(), TruncatedPoissonSampling)


OWN_NUMBERS: Final[Mapping[str, str]] = {"per_epoch": RANDOM_ALLOCATION, "cycle_length": CYCLIC_POISSON}
"""Further parameters of ``of_sizes`` by name, each with the one sampling that takes it."""


def own_numbers(method: str, numbers: Mapping[str, int | None]) -> dict[str, int]:
    """Return the given numbers of `OWN_NUMBERS`. Raises: InvalidInput for one that belongs to another method."""
    own = {name: value for name, value in numbers.items() if value is not None}
    for name, value in own.items():
        if (owner := OWN_NUMBERS[name]) != method:
            raise InvalidInput(f"{name} is {value}, but belongs to {owner}, not to {method}: leave it out")
    return own


def sampling_of_sizes(
    method: str, dataset_size: int, batch_size: int, max_batch_size: int | None = None, **numbers: int | None
) -> Sampling:
    """Return the sampling called ``method`` with batches of ``batch_size``, none larger than ``max_batch_size``.

    numbers: of `OWN_NUMBERS`. Raises: InvalidInput for an unknown method, a number that belongs
    to another method, and sizes that do not fit.
    """
    kind = lookup(SAMPLINGS, method, "sampling")
    if max_batch_size is not None and kind is not PoissonSampling:
        raise InvalidInput(
            f"max_batch_size is {max_batch_size}, but {kind.words} are not cut: leave it out, or choose the method "
            "poisson"
        )
    own = own_numbers(method, numbers)
    if max_batch_size is None:
        return kind.of_sizes(dataset_size, batch_size, **own)
    return TruncatedPoissonSampling.of_sizes(dataset_size, batch_size, max_batch_size)


def require_known(sampling: Sampling) -> None:
    """Raise `UnsupportedMechanism` for a sampling that is not registered, or that draws in its own way.

    No theorem is known for such batches, so that no accountant may take them for the usual ones. Theorems on rounds of
    several steps (`Draws`) need every example in each round.
    """
    if not isinstance(sampling, (*stored_kinds(), DisplacingSampling)) or not isinstance(sampling.draws, Draws):
        kinds = one_of([kind.__name__ for kind in stored_kinds()])
        raise UnsupportedMechanism(f"no accountant knows the sampling {type(sampling).__name__}; use {kinds}")
    if sampling.draws in (Draws.EPOCH, Draws.ALLOCATED) and sampling.sample_rate != 1.0:
        raise UnsupportedMechanism(
            f"{sampling.words} leave no example out of a round, but their sample rate is {sampling.sample_rate:g}"
        )


def draws_by_epoch(sampling: Sampling) -> bool:
    """Return whether rounds are epochs, or blocks of epochs. Raises: UnsupportedMechanism as `require_known`."""
    require_known(sampling)
    match sampling.draws:
        case Draws.EPOCH | Draws.ALLOCATED:
            return True
        case Draws.INDEPENDENT | Draws.SUBSET | Draws.IN_TURN:
            return False
        case unknown:
            assert_never(unknown)
