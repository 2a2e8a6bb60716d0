"""Results of attacks and audits as data, and the file that keeps them. Private data.

Imports no torch, because commands that compare trials read results only.

Scores of how telling the final model is about single examples are stored for their owners, without noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ConfigDict, TypeAdapter, ValidationError
from scipy import special

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.arrow_tables import encode_table, read_table
from dpsweep.accounting.records.files import exists
from dpsweep.accounting.records.sealed import read_private, read_private_sealed, write_private, write_private_sealed
from dpsweep.workers.evaluation.scores import Evaluation
from dpsweep.workers.spec import AuditKind, Transcript

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

_COLUMNS: Final = {
    "example_id": pa.int64(),
    "group": pa.int32(),
    "is_member": pa.int8(),
    "log_ratio": pa.float64(),
    "gradient_norm": pa.float64(),
}


@dataclass(frozen=True)
class MembershipScores:
    """Scores of training examples, the members, and of test examples; arrays [n].

    `example_ids`: in the source. `log_ratios`: of the likelihood under the attacked model to that under reference
    models. `gradient_norms`: under the attacked model.
    """

    example_ids: Whole
    groups: Whole
    is_member: npt.NDArray[np.bool_]
    log_ratios: Floats
    gradient_norms: Floats


def write_membership(uri: str, scores: MembershipScores) -> None:
    """Store the scores, readable by the owner of the data only."""
    values = (scores.example_ids, scores.groups, scores.is_member, scores.log_ratios, scores.gradient_norms)
    arrays = [
        pa.array(column.astype(kind.to_pandas_dtype())) for column, kind in zip(values, _COLUMNS.values(), strict=True)
    ]
    write_private(uri, encode_table(pa.table(arrays, names=list(_COLUMNS))))


def read_membership(uri: str) -> MembershipScores | None:
    """Return the stored scores, or None if there are none. Raises: DataCorruption."""
    if not exists(uri):
        return None
    try:
        table = read_table(read_private(uri))
        columns = [table[name].cast(kind).to_numpy() for name, kind in _COLUMNS.items()]
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataCorruption(
            f"{uri} is damaged; restore it from a backup, or delete it: owners are told of fewer attacks"
        ) from error
    ids, groups, is_member, ratios, norms = columns
    return MembershipScores(ids.astype(np.int64), groups.astype(np.int64), is_member.astype(np.bool_), ratios, norms)


_TAIL: Final = 0.025
"""Probability that the truth lies beyond one end of a 95% interval."""


@dataclass(frozen=True)
class GroupAttack:
    """Attack on one group, measured on ``examples`` examples, half of them members.

    `threshold`: examples with at most this loss are predicted to be members; chosen on other examples than the measured
    ones. `correct`: number of correct predictions; guessing gives half.
    """

    name: str
    examples: int
    threshold: float
    correct: int

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")

    def __post_init__(self) -> None:
        if not (0 <= self.correct <= self.examples and self.examples > 0):
            raise ValueError(f"{self.correct} of {self.examples} predictions cannot be correct")

    @property
    def success_rate(self) -> float:
        """Share of correct predictions."""
        return self.correct / self.examples

    @property
    def standard_error(self) -> float:
        """Binomial standard error of the success rate, computed at the rate (correct + 1) / (examples + 2).

        At the success rate itself it would be 0 whenever all predictions are correct, even for two examples.
        """
        rate = (self.correct + 1) / (self.examples + 2)
        return math.sqrt(rate * (1.0 - rate) / self.examples)


@dataclass(frozen=True)
class GroupAudit:
    """Audit on the canaries of one group, or of all groups.

    `canaries`: number of canaries.
    `guesses`: number of them that were guessed.
    `correct`: number of correct guesses.
    `epsilon`: lower bound on the trial's epsilon that these guesses prove; 0 if they prove none.
    """

    name: str
    canaries: int
    guesses: int
    correct: int
    epsilon: float


@dataclass(frozen=True)
class AuditTest:
    """Lower bound by one test. `name`: ``steinke``, ``ranks``, ``gdp`` or ``f_dp`` (see `dpsweep.accounting.audits`).

    `guesses`, `correct`: among the canaries that count for the test, and the right ones of these. `lower_bound`: on
    epsilon.
    """

    name: str
    canaries: int
    guesses: int
    correct: int
    lower_bound: float


@dataclass(frozen=True)
class AuditResult:
    """Lower bounds on epsilon at ``delta`` that hold together with probability ``confidence``. Private data.

    `everyone`: the best bound from all canaries.
    `groups`: bounds from the canaries of each group with enough to prove anything.
    `tests`: the bound of each test that was made on all canaries.
    `kind`, `transcript`: as of the `AuditSpec`.
    `of_canary`: epsilon that made-up canaries pay; bounds above it contradict it, even below the claim.
    """

    delta: float
    confidence: float
    everyone: GroupAudit
    groups: tuple[GroupAudit, ...]
    tests: tuple[AuditTest, ...] = ()
    kind: AuditKind = "rows"
    transcript: Transcript = "last_model"
    of_canary: float | None = None


@dataclass(frozen=True)
class MembershipAttack:
    """RMIA on one group, measured on ``examples`` examples, half of them members.

    `auc`: probability that a member scores above a non-member, ties counting half; guessing gives 0.5. `lower`,
    `upper`: 95% interval of auc. `loss_auc`, `gradient_auc`: auc of the negative loss, and of the negative norm of the
    gradient, as the score, on the same examples; for their intervals, see `auc_interval`.
    """

    name: str
    examples: int
    auc: float
    lower: float
    upper: float
    loss_auc: float
    gradient_auc: float


@dataclass(frozen=True)
class ExposureAttack:
    """Exposure of secrets in bits (see `dpsweep.workers.trials.exposure`), its mean with a 95% interval over secrets.

    `canaries`: number of secrets, each in ``repeats`` training examples, and ranked among ``candidates``. `extracted`:
    how many have rank 1.
    """

    canaries: int
    repeats: int
    candidates: int
    mean: float
    lower: float
    upper: float
    extracted: int


def auc_interval(auc: float, per_side: int) -> tuple[float, float]:
    """Return a 95% interval of an AUC measured on ``per_side`` members and equally many non-members.

    For all distributions of scores the variance is at most auc (1 - auc) / per_side (van Dantzig 1951), the variance of
    a binomial proportion. So this is the interval of Clopper and Pearson for a proportion. Where one side has equal
    scores the AUC is such a proportion, and the interval covers it with at least 95%; an approximate interval would not
    near 0 and 1. It has positive width even at auc 1.

    >>> [round(end, 3) for end in auc_interval(1.0, 50)]
    [0.929, 1.0]
    """
    found = auc * per_side
    low = special.betaincinv(found, per_side - found + 1.0, _TAIL) if found > 0.0 else 0.0
    high = special.betaincinv(found + 1.0, per_side - found, 1.0 - _TAIL) if found < per_side else 1.0
    return float(low), float(high)


@dataclass(frozen=True)
class AttackResults:
    """Results of the audit and the attacks on one trial, named as in `dpsweep.workers.spec.AttackSpec`. Private data.

    `training_scores`: evaluation of the final model on its training examples, with every group that has any.
    """

    loss_threshold: tuple[GroupAttack, ...] = ()
    audit: AuditResult | None = None
    rmia: tuple[MembershipAttack, ...] = ()
    exposure: ExposureAttack | None = None
    training_scores: Evaluation | None = None

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")


_RESULTS: TypeAdapter[AttackResults] = TypeAdapter(AttackResults)


def write_attacks(uri: str, results: AttackResults) -> None:
    """Store the results in a file that only its owner may read."""
    write_private_sealed(uri, _RESULTS.dump_json(results))


def read_attacks(uri: str) -> AttackResults:
    """Return the stored results; empty if the trial was not attacked. Raises: DataCorruption when they are damaged."""
    next_step = "restore it from a backup, or delete it: the trial is then shown without attacks"
    content = read_private_sealed(uri, next_step)
    try:
        return AttackResults() if content is None else _RESULTS.validate_json(content)
    except ValidationError as error:
        raise DataCorruption(f"{uri} holds no attacks of this version of dpsweep; {next_step}") from error
