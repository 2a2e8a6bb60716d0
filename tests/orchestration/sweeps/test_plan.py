"""Plans: calibrated noise, costs, and why a trial would be refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.calibration import planned_runs
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.sweeps import plan as plan_module
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import Plan
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.workers.trials.trial import run_trial
from tests.orchestration.sample_grids import small

PRIVACY = {"target_epsilon": 5, "delta": 1e-5, "accountant": "rdp"}


def planned(**changes: object) -> Plan:
    sweep = parse_sweep(small(**{"privacy": PRIVACY, "seeds": 0, **changes}))
    return plan_sweep(sweep, permitted(sweep, Path(__file__).parent))


def batch_normalised(feature_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))


def test_every_private_trial_meets_the_target_by_its_own_trace() -> None:
    plan = planned()
    assert plan.refusals == ()
    for trial in plan.trials:
        if trial.spec.is_private:
            spent = account(trial.trace, 1e-5, "rdp").epsilon
            assert 4.9 < spent <= 5.0
            assert trial.worst_case.epsilon == spent
        else:
            assert not trial.worst_case.is_private


def test_side_queries_and_releases_are_paid_for_inside_the_target() -> None:
    flat, plain = planned(clipping=["flat", "dpsgd_f"], noise="constant").trials
    (released,) = planned(clipping="dpsgd_f", noise="constant", release="private").trials
    assert [release.name for release in released.trace.releases]
    assert released.worst_case.epsilon <= 5.0
    noise = [trial.spec.noise.initial_noise_multiplier for trial in (released, plain, flat)]
    assert noise[0] > noise[1] > noise[2]


POISSON: dict[str, Any] = {"method": "poisson", "batch_size": 40}


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("sampling", "refused"),
    [
        (POISSON, False),
        ({"method": "shuffle", "batch_size": 40}, False),
        ({"method": "fixed", "batch_size": 40}, True),
        ({"method": "poisson", "batch_size": 40, "max_batch_size": 70}, True),
    ],
)
def test_statistics_are_released_only_where_an_example_changes_no_other_epsilon(
    sampling: dict[str, Any], refused: bool
) -> None:
    common = {"clipping": "flat", "noise": "constant", "sampling": sampling}
    plan = planned(**common, release="private", norms={"refreshes_per_epoch": "when_sampled"})
    assert [("one example changes in its own epsilon" in reason) for reason in plan.reasons()] == [True] * refused
    for others in ({"release": "private"}, {"norms": {"refreshes_per_epoch": "when_sampled"}}):
        assert not planned(**common, **others).reasons()


def test_a_reason_names_the_first_refused_trials_and_counts_the_others() -> None:
    privacy = {"noise_multiplier": 1.0, "delta": 1e-5, "budget": {"epsilon": 0.01}, "accountant": "rdp"}
    for seeds, ending in ((5, ")"), (12, " and 7 more)")):
        plan = planned(clipping="flat", noise="constant", privacy=privacy, seeds=list(range(seeds)))
        (reason,) = plan.reasons()
        first = ", ".join(refusal.key for refusal in plan.refusals[:5])
        assert reason.endswith(f"(trials: {first}{ending}")
        assert "does not pay for one epoch" in reason
        assert len(plan.refusals) == seeds


def test_a_plan_says_how_often_norms_are_taken() -> None:
    """As the sweep leaves it to `auto`, by clipping method and sampling."""
    plan = planned(
        clipping=["flat", "individual"], noise="constant", sampling=[POISSON, {**POISSON, "method": "fixed"}]
    )
    found = {
        (each.spec.clipping.name, each.spec.sampling.method): each.spec.norms.refreshes_per_epoch
        for each in plan.trials
    }
    assert found == {
        ("flat", "poisson"): "when_sampled",
        ("flat", "fixed"): 1.0,
        ("individual", "poisson"): 1.0,
        ("individual", "fixed"): 1.0,
    }


def test_further_accountants_are_each_accounted_for() -> None:
    (trial,) = planned(clipping="flat", noise="constant", accounting={"also": ["pld", "rdp-classic"]}).trials
    assert [(each.accountant, each.epsilon) for each in trial.others] == [
        (name, account(trial.trace, 1e-5, name).epsilon) for name in ("pld", "rdp-classic")
    ]


def test_noise_is_calibrated_by_the_accountant_that_is_shown() -> None:
    privacy = {**PRIVACY, "accountant": "rdp-classic"}
    (trial,) = planned(clipping="flat", noise="constant", privacy=privacy).trials
    assert 4.99 < trial.worst_case.epsilon <= 5.0


def test_a_plan_tells_steps_and_bytes() -> None:
    trial = planned(norms={"refreshes_per_epoch": 2}).trials[1]
    assert trial.trace.steps == 2 * -(-trial.dataset.train_size // 128)
    snapshot = trial.dataset.train_size * 24 + 8192
    assert trial.shard_bytes == 2 * 2 * snapshot
    (often,) = planned(norms={"refreshes_per_epoch": 1e9}, clipping="flat", noise="constant").trials
    assert often.shard_bytes == often.trace.steps * snapshot, "norms are taken once a step at most"
    (tracked,) = planned(norms={"exact_examples": 10}, clipping="flat", noise="constant").trials
    assert tracked.shard_bytes == 2 * snapshot + tracked.trace.steps * (10 * 24 + 8192)


def test_given_noise_is_kept_and_a_budget_shortens_the_run() -> None:
    spent = planned(privacy={"noise_multiplier": 2.0, "delta": 1e-5, "accountant": "rdp"}, epochs=6).trials[1]
    shorter = planned(
        privacy={"noise_multiplier": 2.0, "delta": 1e-5, "budget": {"epsilon": 1.5}, "accountant": "rdp"},
        epochs=6,
        clipping=["none", "flat"],
    ).trials[1]
    assert shorter.spec.noise.initial_noise_multiplier == spent.spec.noise.initial_noise_multiplier == 2.0
    assert 0 < shorter.trace.steps < spent.trace.steps


def test_a_budget_of_training_alone_says_what_the_whole_run_costs() -> None:
    """rho 1 / (2 * 2^2) for an epoch, 1 / (2 * 16^2) for the bound that is released."""
    changes = {
        "sampling": {"method": "shuffle", "batch_size": "full"},
        "clipping": {"name": "flat", "bound": {"median_multiple": 1.0, "noise_multiplier": 16}},
        "noise": "constant",
        "epochs": 10,
    }
    privacy = {"noise_multiplier": 2.0, "delta": 1e-5, "accountant": "zcdp"}
    whole, training = (
        planned(**changes, privacy={**privacy, "budget": {"rho": 0.5, **covers}})
        for covers in ({}, {"covers": "training"})
    )
    assert [plan.trials[0].trace.steps for plan in (whole, training)] == [3, 4]
    assert whole.warnings == ()
    (warning,) = training.warnings
    assert "pays rho 0.5 of 0.5; with median norm at initialisation the trial costs rho 0.501953, and every" in warning
    rho = 0.5 + 1 / 512
    assert training.trials[0].worst_case.epsilon == pytest.approx(rho + 2.0 * (rho * math.log(1e5)) ** 0.5, rel=1e-9)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("clipping", ["flat", {"name": "dpsgd_f", "count_noise_multiplier": 0.001}])
def test_noise_that_protects_nobody_has_a_cost_all_the_same(accountant: str, clipping: object) -> None:
    for sigma in (0.001, 0.0003, 1e-5):
        plan = planned(
            privacy={"noise_multiplier": sigma, "delta": 1e-5, "accountant": accountant},
            clipping=clipping,
            noise="constant",
        )
        (trial,) = plan.trials
        assert 1e5 < trial.worst_case.epsilon < float("inf")


def test_a_run_without_noise_releases_no_statistics() -> None:
    given = {"noise": {"name": "constant", "noise_multiplier": 0}, "privacy": {"delta": 1e-5}}
    (trial,) = planned(clipping="flat", release="private", **given).trials
    assert (trial.releases, trial.trace.releases) == ((), ())


def test_every_plan_reads_the_data_anew(tmp_path: Path) -> None:
    """What one plan worked out ends with it: a file may have been mended since."""
    table = tmp_path / "table.csv"

    def size(rows: int) -> int:
        table.write_text("x,y\n" + "".join(f"{row / rows},{row % 2}\n" for row in range(rows)))
        data = {"name": "csv", "path": str(table), "label": "y"}
        changes = {"sampling": {"method": "poisson", "batch_size": 8}, "clipping": "flat", "noise": "constant"}
        plan = planned(data=data, privacy={"noise_multiplier": 2.0, "delta": 1e-5, "accountant": "rdp"}, **changes)
        assert plan.refusals == ()
        return plan.trials[0].dataset.train_size

    assert (size(100), size(200)) == (80, 160)


def test_notes_of_the_data_are_warnings(tmp_path: Path) -> None:
    rows = "".join(f"{row / 99},{'ab'[row % 2]}\n" for row in range(99))
    (tmp_path / "table.csv").write_text(f"x,y\n{rows},a\n")
    data = {"name": "csv", "path": str(tmp_path / "table.csv"), "label": "y", "ranges": {"x": [0, 1]}}
    plan = planned(data=data, sampling={"method": "poisson", "batch_size": 8})
    assert plan.refusals == ()
    assert plan.warnings == (
        "data table: 1 of 100 rows (1.0%) are left out: they lack a value ('x' 1)",
        "data table: no guarantee (classes_from_rows): the classes were read off the rows, which no ε covers; declare "
        "`classes`",
    )


def test_trials_of_equal_mechanism_are_calibrated_and_accounted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(module: ModuleType, name: str) -> None:
        function = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(planned_runs, "calibrate_noise_multiplier")
    for name in ("worst_cases", "load_dataset", "check_feasible"):
        counted(plan_module, name)
    plan = planned(seeds=[0, 1, 2], clipping="flat", noise="constant")
    assert len(plan.trials) == 3
    assert sorted(calls) == ["calibrate_noise_multiplier", "check_feasible", "load_dataset", "worst_cases"]
    calls.clear()
    unmet = {**PRIVACY, "target_epsilon": 0.001}
    plan = planned(seeds=[0, 1, 2], clipping="flat", noise="constant", release="private", privacy=unmet)
    assert ["epsilon 0.001 is unreachable" in each.reason for each in plan.refusals[1:]] == [True, True]
    assert calls.count("calibrate_noise_multiplier") == 2, "with others, and again for its reason"


def test_delta_above_one_over_n_is_a_warning() -> None:
    size = planned(clipping="flat", noise="constant").trials[0].dataset.train_size
    for delta, warned in ((1.01 / size, True), (0.99 / size, False)):
        plan = planned(privacy={**PRIVACY, "delta": delta}, clipping="flat", noise="constant")
        assert bool(plan.warnings) == warned
    plan = planned(privacy={**PRIVACY, "delta": 0.01})
    assert plan.refusals == ()
    assert "1/n" in " ".join(plan.warnings)
    assert planned().warnings == ()


def test_tracked_examples_whose_epsilons_nobody_computes_are_noted() -> None:
    norms = {"exact_examples": 10}
    for unestimated in ("none", {"name": "filter", "bound": 2.0}):
        notes = planned(clipping=unestimated, noise="constant", norms=norms).warnings
        assert any(note.startswith("norms.exact_examples is of no use") for note in notes)
    assert planned(norms=norms).warnings == ()


def test_both_rates_of_adam_are_meant_by_the_name_of_both() -> None:
    plan = planned(optimizer={"name": "adam", "betas": [0.9, 0.999]}, clipping="flat", noise="constant")
    assert "unknown key 'betas' of optimizer 'adam'; did you mean 'beta1' or 'beta2'?" in plan.refusals[0].reason


REFUSED = {
    "batch larger than the data": ({"sampling": {"method": "poisson", "batch_size": 5000}}, r"batch_size is 5000"),
    "unreachable target": (
        {"privacy": {**PRIVACY, "target_epsilon": 0.001}, "release": "private"},
        r"(?i)target|unreachable|cannot",
    ),
    "batch normalisation": ({"model": "test_plan.py:batch_normalised"}, r"BatchNorm1d"),
    "missing data": ({"data": {"name": "csv", "path": "/nowhere.csv", "label": "y"}}, r"nowhere.csv"),
    "unknown model": ({"model": "mpl"}, r"did you mean 'mlp'"),
    "parameter of the wrong type": (
        {"optimizer": {"name": "sgd", "learning_rate": "fast"}},
        r"optimizer 'sgd': learning_rate is 'fast', but must be a number",
    ),
    "unknown clipping": ({"clipping": ["none", "flatt"]}, r"did you mean 'flat'"),
    "unknown group": ({"data": {"name": "digits", "keep": {"eight": 0.1}}}, r"eight"),
    "unknown device": ({"execution": {"device": "gpu"}}, r"unknown device 'gpu'; use auto, cpu, cuda or cuda:N"),
    "validation without public data": (
        {"noise": {"name": "validation", "factor": 0.5, "period": 1}},
        r"needs public data; set data.public_fraction above 0",
    ),
    "noise beyond all use": (
        {"privacy": {"noise_multiplier": 1e300, "delta": 1e-5}},
        r"noise_multiplier is 1e\+300, but must be at most 1000000000.0",
    ),
    "a side query without noise": (
        {"clipping": {"name": "dpsgd_f", "count_noise_multiplier": 1e-300}},
        r"noise_multiplier of side query 'group counts' is 1e-300, but must be at least 1e-06",
    ),
    "more canaries than parameters": (
        {"audit": {"canaries": 700, "kind": "gradient"}, "clipping": "flat", "model": "logistic"},
        r"audit\.canaries is 700, but the model has 650 trainable parameters, .*; choose at most 650",
    ),
    "unknown accountant": ({"privacy": {**PRIVACY, "accountant": "pdl"}}, r"did you mean 'pld'"),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_trials_that_cannot_run_are_refused_on_one_line(changes: dict[str, object], reason: str) -> None:
    reasons = planned(**changes).reasons()
    assert any(re.search(reason, line) for line in reasons), reasons
    assert all("\n" not in line for line in reasons)


def test_an_unknown_release_is_a_mistake_of_the_whole_sweep() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'private'"):
        planned(release="privat")


def test_models_are_checked_on_the_features_they_will_get() -> None:
    pca = {"name": "dp_pca", "dimensions": 10, "noise_multiplier": 8.0}
    plan = planned(preprocessing=pca, model={"name": "pca_mlp", "hidden": 8})
    assert plan.refusals == ()
    assert "dp_pca" in [release.name for release in plan.trials[1].trace.releases]
    assert plan.trials[1].worst_case.epsilon <= 5.0


FILTER = {"name": "filter", "bound": 2.0, "noise_factor": 0.8}


def test_a_filter_has_the_target_as_budget_and_less_noise() -> None:
    asked = {"clipping": [{"name": "flat", "bound": 2.0}, FILTER], "noise": "constant", "noise_source": "os_entropy"}
    (flat, filtered) = planned(**asked).trials
    sigma = flat.spec.noise.initial_noise_multiplier
    assert filtered.spec.noise.initial_noise_multiplier == pytest.approx(0.8 * sigma, rel=1e-5)
    assert filtered.spec.clipping.params["epsilon"] == 5.0
    worst = filtered.worst_case
    assert (worst.accountant, worst.kind) == ("filter", "guarantee")
    assert 4.999 < worst.epsilon <= 5.0
    assert filtered.trace.filter is not None
    assert flat.trace.filter is None


def test_a_filter_keeps_to_its_own_budget_at_noise_as_given() -> None:
    given = {"noise_multiplier": 0.7, "delta": 1e-5}
    (trial,) = planned(clipping={"name": "filter", "epsilon": 2.0}, noise="constant", privacy=given).trials
    assert trial.spec.noise.initial_noise_multiplier == 0.7
    assert 1.999 < trial.worst_case.epsilon <= 2.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy": {"noise_multiplier": 1.0, "delta": 1e-5}}, "'filter' needs epsilon, the budget of every example"),
        ({"clipping": {**FILTER, "epsilon": 3}}, "is privacy.target_epsilon; leave out its epsilon 3"),
        ({"clipping": {**FILTER, "noise_factor": 0}}, "noise_factor is 0"),
        ({"sampling": {"method": "fixed", "batch_size": 128}}, "not fixed batches with"),
        ({"sampling": {"method": "shuffle", "batch_size": 128}}, "use poisson sampling and noise"),
    ],
)
def test_a_filter_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    (refusal,) = planned(**{"clipping": FILTER, "noise": "constant", **changes}).refusals
    assert reason in refusal.reason


@pytest.mark.parametrize(("release", "quoted"), [("none", False), ("private", False), ("raw", True)])
def test_a_refusal_quotes_an_error_only_where_everything_is_shown(
    release: str, quoted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("bad row 17")

    monkeypatch.setattr(plan_module, "check_spec", refuse)
    (reason,) = planned(clipping="flat", noise="constant", release=release).reasons()
    assert ("row 17" in reason) == quoted
    assert "RuntimeError" in reason


def test_a_worst_group_by_a_rate_of_two_classes_needs_two_classes() -> None:
    chosen = {"clipping": "flat", "noise": "constant", "seeds": 0, "compare": {"worst_group": "fpr"}}
    (reason,) = plan_sweep(parse_sweep(small(**chosen))).reasons()
    assert "compare.worst_group is false_positive_rate, which needs two classes, but digits has 10" in reason
    assert not plan_sweep(parse_sweep(small(**chosen, data="breast_cancer"))).refusals


def test_what_the_caller_has_set_for_all_of_torch_changes_no_plan() -> None:
    """Notebooks set a default device or dtype."""
    usual = plan_sweep(parse_sweep(small(seeds=0)))
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = plan_sweep(parse_sweep(small(seeds=0)))
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert found.reasons() == usual.reasons() == []
    assert [each.spec for each in found.trials] == [each.spec for each in usual.trials]


def test_all_components_with_mistakes_are_named_at_once() -> None:
    sweep = small(
        seeds=0,
        model={"name": "mlp", "hiden": [8]},
        clipping={"name": "flat", "bond": 1.0},
        optimizer={"name": "sgd", "learing_rate": 1.0},
    )
    (told,) = {re.sub(r"noise schedule '.*", "", each) for each in plan_sweep(parse_sweep(sweep)).reasons()}
    assert re.search(r"'hiden' of model .*; unknown key 'bond' of clipping .*; unknown key 'learing_rate' of opt", told)


def test_trials_on_a_gpu_are_told_how_passes_are_recorded() -> None:
    asked = {"resources": {"cpus": 1, "gpus": 0.5}}
    (warning,) = planned(**asked).warnings
    assert "execution.micro_batch_size is null" in warning
    assert planned().warnings == ()
    assert planned(**asked, execution={"micro_batch_size": 64, "last_micro_batch": "padded"}).warnings == ()


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("clipping", ["flat", {"name": "flat", "bound": 1.0}]),
        ("noise", [{"name": "step", "factor": 0.5, "period": 2}, {"name": "step", "factor": 0.4, "period": 2}]),
    ],
)
def test_a_default_that_is_written_out_is_said_to_be_the_same_setting(axis: str, values: list[object]) -> None:
    warnings = plan_sweep(parse_sweep(small(**{"noise": "constant", axis: values}))).warnings
    said = f"the sweep lists a value of {axis} twice, once with a default written out; these are different trials of"
    assert [warning.startswith(said) for warning in warnings] == [True] * (axis == "clipping"), warnings


def test_a_value_that_is_listed_twice_is_told_by_its_key() -> None:
    noise = ["constant", {"name": "exponential", "decay": 0.1}, {"name": "constant"}]
    assert plan_sweep(parse_sweep(small(noise=noise))).warnings == (
        "the sweep lists a value of noise twice; trials that are the same run once",
    )


def test_an_audit_changes_neither_mechanism_nor_claim() -> None:
    (plain,), (audited,) = (
        planned(clipping="flat", noise="constant", **extra).trials for extra in ({}, {"audit": {"canaries": 200}})
    )
    assert audited.trace == plain.trace
    assert audited.worst_case == plain.worst_case
    assert plain.spec.audit is None


def test_maxima_and_adjacencies_are_planned(tmp_path: Path) -> None:
    """A sweep that caps its batches: labels, calibration, training and its stored trace agree."""
    most = {"method": "poisson", "batch_size": 128, "max_batch_size": 160}
    chosen = {"clipping": "flat", "noise": "constant", "epochs": 1, "privacy": {"target_epsilon": 5, "delta": 1e-5}}
    plain, capped = planned(**chosen, sampling=[{"method": "poisson", "batch_size": 128}, most]).trials
    assert capped.point.labels["sampling"] == "poisson (max batch size 160)"
    assert capped.worst_case.epsilon <= 5.0
    assert capped.spec.noise.initial_noise_multiplier > plain.spec.noise.initial_noise_multiplier
    run_trial(capped.spec, str(tmp_path))
    assert read_trace(TrialFiles(str(tmp_path)).trace).segments == capped.trace.segments
    chosen |= {"privacy": {"target_epsilon": 5, "delta": 1e-5, "adjacency": "replace_one"}}
    (trial,) = planned(**chosen, sampling={"method": "shuffle", "batch_size": 128}).trials
    assert trial.worst_case.adjacency == trial.trace.adjacency == "replace_one"
    (refused,) = planned(**chosen, sampling={"method": "poisson", "batch_size": 128}).refusals
    assert "Poisson batches (PoissonSampling) have no accounting under 'replace_one'" in refused.reason
