"""What `import accounting` gives, and that names stand in one registry each."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from pydantic import ValidationError

from dpsweep.accounting import ACCOUNTANTS, INDIVIDUAL_ACCOUNTANTS, SAMPLINGS
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.registry import one_of
from dpsweep.orchestration.commands.epsilon import IndividualMethod, epsilon
from dpsweep.orchestration.commands.run_flags import RunFlags
from dpsweep.orchestration.sweeps.sections import AccountingSettings

EXPORTED = {
    "dpsweep.accounting": """ACCOUNTANTS INDIVIDUAL_ACCOUNTANTS SAMPLINGS SCHEDULES AdvantageBudget AttackRisk
        BandedNoise BufferedNoise CertifiedEpsilon CertifiedInterval DataCorruption DpsweepError EpsilonBudget Example
        ExponentialChoice CyclicPoissonSampling FixedBatchSampling FixedOrderSampling GaussianRelease IndependentNoise
        IndividualEpsilons InverseRootNoise LambdaNoise
        InvalidInput NoiseSchedule PoissonSampling PrivacyCurve PrivacyEstimate PureRelease RandomTrials
        RandomAllocationSampling
        Release RhoBudget Sampling Segment ShuffledSampling SideQuery StorageError Trace TruePositiveRateBudget
        TruncatedPoissonSampling Unreachable User
        UnsupportedMechanism account account_choice account_selection account_together attack_risk
        calibrate_decay calibrate_noise_multiplier
        count_within_budget curve_of_examples epsilon_of_examples epsilon_of_examples_together group_epsilons
        individual_epsilons length_within_budget make_schedule noise_multiplier_within_budget parse_schedule
        planned_trace privacy_curve read_trace write_trace""",
    "dpsweep.accounting.individual": """FILTERED INDIVIDUAL_ACCOUNTANTS IndividualEpsilons
        epsilon_of_many_rounds individual_claim individual_epsilons individual_reasons""",
    "dpsweep.accounting.pld": """AllocatedRound CertifiedDelta CertifiedEpsilon CertifiedProfile Chain Direction EvenLaw
        GroupRounds LatticeLoss MIN_DELTA TOLERANCE PairBounds RoundLaw SensitivityMixture delta_pld discretise
        epsilon_of_chain epsilon_of_examples epsilon_of_rounds epsilon_pld examples_law group_epsilons group_law
        grows_at_least_linearly linear_growth mean_from_above profile_of_chain profile_of_rounds require_pld_delta
        rounds_of_examples rounds_of_group rounds_or_chain upper_epsilon_of_rounds upper_of_many_levels
        upper_of_prefixes vadhan_epsilon""",
}


@pytest.mark.parametrize("package", EXPORTED)
def test_exported_names(package: str) -> None:
    module = importlib.import_module(package)
    named = {name for name, value in vars(module).items() if not name.startswith("_") and not inspect.ismodule(value)}
    modules = {path.stem for path in Path(module.__path__[0]).glob("*.py")} - named
    assert named == {name for name in module.__all__ if name not in modules} == set(EXPORTED[package].split())


def test_the_command_line_offers_what_is_registered() -> None:
    offered = get_type_hints(RunFlags, include_extras=True)["sampling"].__metadata__[0].help
    assert offered == f"How batches are drawn: {one_of(SAMPLINGS)}."
    with pytest.raises(InvalidInput, match="unknown sampling 'poison'; did you mean 'poisson'"):
        RunFlags(sampling="poison", sample_rate=0.1, steps=1).mechanism()
    assert get_args(IndividualMethod) == (*INDIVIDUAL_ACCOUNTANTS, "rdp-algorithm-2")
    shown = inspect.signature(epsilon, eval_str=True).parameters["accountant"].annotation.__metadata__[0].help
    assert shown.rstrip(".").replace(" or ", ", ").split(", ") == list(ACCOUNTANTS)


def test_a_sweep_takes_every_registered_individual_accountant() -> None:
    for name in INDIVIDUAL_ACCOUNTANTS:
        assert AccountingSettings(individual=name).individual == name
    with pytest.raises(ValidationError, match="Input should be 'rdp', 'rdp-classic' or 'pld'"):
        AccountingSettings(individual="gdp")
