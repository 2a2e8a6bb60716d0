"""Privacy accounting of DP-SGD runs: for one example, for groups, and for each example by its own contributions.

    >>> from dpsweep.accounting import PoissonSampling, account, parse_schedule, planned_trace
    >>> trace = planned_trace(parse_schedule("constant", 1.1), PoissonSampling(0.01), 10, 100, dataset_size=60_000)
    >>> round(account(trace, delta=1e-5).epsilon, 3)
    1.515

The names exported here are the library's interface. Importing it loads neither torch, ray nor mlflow;
`dpsweep.accounting.jobs` accounts a stored trial part by part, `dpsweep.accounting.jobs.parallel` the parts of many as
Ray tasks.
"""

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.joint_cost import account_together, epsilon_of_examples_together
from dpsweep.accounting.accountants.one_run import ACCOUNTANTS
from dpsweep.accounting.accountants.selection import account_choice, account_selection
from dpsweep.accounting.attacks import (
    AttackRisk,
    CertifiedInterval,
    PrivacyCurve,
    attack_risk,
    curve_of_examples,
    privacy_curve,
)
from dpsweep.accounting.calibration.budgets import AdvantageBudget, EpsilonBudget, RhoBudget, TruePositiveRateBudget
from dpsweep.accounting.calibration.parameter_search import (
    calibrate_decay,
    calibrate_noise_multiplier,
    count_within_budget,
    length_within_budget,
    noise_multiplier_within_budget,
)
from dpsweep.accounting.errors import (
    DataCorruption,
    DpsweepError,
    InvalidInput,
    StorageError,
    Unreachable,
    UnsupportedMechanism,
)
from dpsweep.accounting.individual import INDIVIDUAL_ACCOUNTANTS, IndividualEpsilons, individual_epsilons
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.noise_strategies import (
    BandedNoise,
    BufferedNoise,
    IndependentNoise,
    InverseRootNoise,
    LambdaNoise,
)
from dpsweep.accounting.mechanism.random_trials import ExponentialChoice, RandomTrials
from dpsweep.accounting.mechanism.samplings import (
    SAMPLINGS,
    CyclicPoissonSampling,
    FixedBatchSampling,
    FixedOrderSampling,
    PoissonSampling,
    RandomAllocationSampling,
    Sampling,
    ShuffledSampling,
    TruncatedPoissonSampling,
)
from dpsweep.accounting.mechanism.schedules import (
    SCHEDULES,
    NoiseSchedule,
    make_schedule,
    parse_schedule,
    planned_trace,
)
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Release, Segment, SideQuery, Trace
from dpsweep.accounting.mechanism.units import Example, User
from dpsweep.accounting.pld import CertifiedEpsilon, epsilon_of_examples, group_epsilons
from dpsweep.accounting.records.traces import read_trace, write_trace

__all__ = [
    "ACCOUNTANTS",
    "INDIVIDUAL_ACCOUNTANTS",
    "SAMPLINGS",
    "SCHEDULES",
    "AdvantageBudget",
    "AttackRisk",
    "BandedNoise",
    "BufferedNoise",
    "CertifiedEpsilon",
    "CertifiedInterval",
    "CyclicPoissonSampling",
    "DataCorruption",
    "DpsweepError",
    "EpsilonBudget",
    "Example",
    "ExponentialChoice",
    "FixedBatchSampling",
    "FixedOrderSampling",
    "GaussianRelease",
    "IndependentNoise",
    "IndividualEpsilons",
    "InvalidInput",
    "InverseRootNoise",
    "LambdaNoise",
    "NoiseSchedule",
    "PoissonSampling",
    "PrivacyCurve",
    "PrivacyEstimate",
    "PureRelease",
    "RandomAllocationSampling",
    "RandomTrials",
    "Release",
    "RhoBudget",
    "Sampling",
    "Segment",
    "ShuffledSampling",
    "SideQuery",
    "StorageError",
    "Trace",
    "TruePositiveRateBudget",
    "TruncatedPoissonSampling",
    "Unreachable",
    "UnsupportedMechanism",
    "User",
    "account",
    "account_choice",
    "account_selection",
    "account_together",
    "attack_risk",
    "calibrate_decay",
    "calibrate_noise_multiplier",
    "count_within_budget",
    "curve_of_examples",
    "epsilon_of_examples",
    "epsilon_of_examples_together",
    "group_epsilons",
    "individual_epsilons",
    "length_within_budget",
    "make_schedule",
    "noise_multiplier_within_budget",
    "parse_schedule",
    "planned_trace",
    "privacy_curve",
    "read_trace",
    "write_trace",
]
