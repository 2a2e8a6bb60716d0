"""Sections of a sweep file: privacy, accounting, the scheduler and the baseline. Pure."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.individual import INDIVIDUAL_ACCOUNTANTS
from dpsweep.accounting.mechanism.samplings import Adjacency
from dpsweep.accounting.mechanism.units import UnitName, protects_users
from dpsweep.orchestration.sweeps.fields import Axis, Budget, Named, Quantity, Several, SweepSection
from dpsweep.workers.spec import Delta, MaxRecords, NoiseMultiplier, UserSampling, name_in

OWN_NOISE: Final = "noise_multiplier"
"""Parameter of a noise schedule that fixes its initial noise multiplier; such a schedule is not calibrated."""
ONE_LEVEL: Final = "give exactly one of target_epsilon (calibrated) and noise_multiplier (as given)"


Users = Annotated[int, Field(ge=1)]


def _whole_key(value: object) -> object:
    """Read a key of a map as a whole number: JSON, in which a sweep file is checked, has keys of text alone."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class RowsPerUserSettings(SweepSection):
    """Numbers of rows per user, by which ``dpsweep plan`` recommends a way to protect users (users.md)."""

    users: Annotated[dict[Annotated[MaxRecords, BeforeValidator(_whole_key)], Users], Field(min_length=1)]
    """Number of users by their number of rows. It changes no trial."""
    noise_multiplier: Annotated[float, Field(ge=1.0)] | None = None
    """Noise that these numbers were released with, which every private trial pays for; leave it out only if they are
    public."""

    @property
    def histogram(self) -> tuple[tuple[int, int], ...]:
        """The numbers as (rows, users), ascending by rows."""
        return tuple(sorted(self.users.items()))


class PrivacySettings(SweepSection):
    """Privacy of every private trial: calibrated to a target epsilon, or with given noise multipliers."""

    delta: Delta
    """Delta of every (epsilon, delta) claim; choose it well below 1/n."""
    target_epsilon: Axis[Annotated[float, Field(gt=0.0)]] | None = None
    """Epsilon of everything that a private trial releases; its noise is calibrated to it."""
    noise_multiplier: Axis[NoiseMultiplier] | None = None
    """Noise standard deviation divided by sensitivity; with a schedule, its initial value."""
    budget: Budget | None = None
    """Training stops before the first epoch that would exceed this budget."""
    adjacency: Adjacency | None = None
    """Adjacency of the claims; by default that of the sampling. ``fixed_graph``, of users whose rows may have several
    owners, takes as known who owns which (users.md)."""
    accountant: str = "auto"
    """Accountant for calibration and for the worst-case epsilon in reports."""
    unit: UnitName = "example"
    """Whose privacy every epsilon is: that of one row, or of a ``user`` with all their rows (users.md)."""
    user_sampling: Axis[UserSampling] | None = None
    """With unit ``user``: ``els`` samples and clips rows, ``uls`` samples users and clips the mean gradient of each."""
    max_records_per_user: Axis[MaxRecords] | None = None
    """With unit ``user``: how many rows each user keeps at most, chosen at random once per trial."""
    rows_per_user: RowsPerUserSettings | None = None
    """With unit ``user``: how many users have how many rows."""

    @model_validator(mode="after")
    def _one_level(self) -> Self:
        if self.target_epsilon is not None and self.noise_multiplier is not None:
            raise InvalidInput(ONE_LEVEL)
        return self

    @model_validator(mode="after")
    def _users_are_described(self) -> Self:
        of_users = protects_users(self.unit)
        if self.rows_per_user is not None and not of_users:
            raise InvalidInput("rows_per_user is given, but unit is example; set unit: user, or leave it out")
        if self.adjacency == "fixed_graph" and not of_users:
            raise InvalidInput("adjacency is fixed_graph, which is of users, but unit is example; set unit: user")
        if self.adjacency == "fixed_graph" and self.rows_per_user is not None:
            raise InvalidInput(
                "rows_per_user is given, but fixed_graph takes them as known from the data; leave it out"
            )
        given = {"user_sampling": self.user_sampling, "max_records_per_user": self.max_records_per_user}
        for key, value in given.items():
            if of_users and value is None:
                raise InvalidInput(f"unit is user, but {key} is missing; give {_OF_USERS[key]}")
            if value is not None and not of_users:
                raise InvalidInput(f"{key} is given, but unit is example; set unit: user, or leave it out")
        return self


_OF_USERS: Final = {
    "user_sampling": "els (rows are sampled), uls (users are sampled), or a list of both",
    "max_records_per_user": "how many rows each user keeps at most, or a list of numbers",
}


class AccountingSettings(SweepSection):
    """Accounting of trained trials."""

    individual: Annotated[str, name_in(INDIVIDUAL_ACCOUNTANTS)] = "rdp"
    """Accountant of the per-example epsilons."""
    also: Several[str] = ()
    """Further accountants to report besides privacy.accountant."""
    group_sizes: Several[Annotated[int, Field(ge=1, le=10_000)]] = (1,)
    """Sizes of groups whose worst-case epsilon is reported."""
    actors: int | None = Field(default=None, ge=1, le=1024)
    """Most parts that are accounted at the same time; by default as many as fit."""
    cpus: Quantity | None = Field(default=None, ge=0.0)
    """CPUs that each part reserves. By default 1 on a running cluster, and none on an embedded one."""
    resource: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")] | None = None
    """Custom Ray resource of which each part reserves 1, such as ``accounting`` of nodes that were started with it
    (``ray start --resources='{"accounting": 4}'``). Not used on an embedded cluster."""


class SchedulerSettings(SweepSection):
    """Scheduling of trials. ``fifo`` trains each trial to its end. ``asha`` compares trials of one setting and seed,
    and stops those with a low metric; it never stops a baseline. On private data, this selection costs privacy. The
    epsilon of a stopped trial is an estimate, because results decided how long it trained."""

    name: Literal["fifo", "asha"] = "fifo"
    """``asha`` stops trials early."""
    metric: Literal["public_accuracy", "test_accuracy"] = "public_accuracy"
    """Metric that ``asha`` compares: accuracy, or the main score of another task, such as r2."""
    grace_epochs: int = Field(default=1, ge=1)
    """Epochs that every trial trains before ``asha`` may stop it."""
    reduction_factor: int = Field(default=3, ge=2)
    """``asha`` continues one in ``reduction_factor`` trials at each check."""
    accept_unaccounted_selection: bool = False
    """Allow selection by private data, which no epsilon covers."""


class BaselineSettings(SweepSection):
    """Settings that differ for the non-private baseline."""

    optimizer: Named | None = None
    """Optimizer in place of the sweep's; unclipped gradients are larger and may need a smaller learning rate."""
