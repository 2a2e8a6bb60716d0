"""What a scheduler may compare: trials of one setting and seed that differ in what is adapted."""

from __future__ import annotations

from typing import Any

import pytest

from dpsweep.orchestration.sweeps.grid import grid, rivals
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.sample_grids import small

ASHA = {"name": "asha", "accept_unaccounted_selection": True}


def groups(**changes: Any) -> list[str | None]:
    """Of every trial of a sweep with one private trial and its baseline, but for ``changes``."""
    sweep = parse_sweep(small(**{"clipping": ["none", "flat"], "noise": "constant", "seeds": 0, **changes}))
    return [rivals(point) for point in grid(sweep)]


def test_a_baseline_has_no_rivals() -> None:
    found = groups(optimizer=[{"name": "sgd", "learning_rate": rate} for rate in (0.1, 0.2)])
    assert found[:2] == [None, None]
    assert found[2] == found[3] is not None


@pytest.mark.parametrize(
    "adapted",
    [
        {"optimizer": ["sgd", {"name": "adam", "learning_rate": 0.01}]},
        {"learning_rate_schedule": ["constant", "cosine"]},
        {"clipping": {"name": "flat", "bound": [0.5, 1.0]}},
        {"sampling": {"method": "poisson", "batch_size": [64, 128]}},
        {"epochs": [2, 4]},
    ],
)
def test_trials_that_differ_in_what_is_adapted_are_rivals(adapted: dict[str, Any]) -> None:
    found = [group for group in groups(**adapted) if group]
    assert len(found) == 2
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    "compared",
    [
        {"clipping": ["flat", "dpsgd_f"]},
        {"noise": ["constant", "exponential"]},
        {"seeds": [0, 1]},
        {"privacy": {"target_epsilon": [2, 5], "delta": 1e-5}},
        {"privacy": {"noise_multiplier": [2, 5], "delta": 1e-5}},
        {"data": [{"name": "digits", "split_seed": 0}, {"name": "digits", "split_seed": 1}]},
        {"model": ["logistic", "mlp"]},
    ],
)
def test_what_a_sweep_compares_are_no_rivals(compared: dict[str, Any]) -> None:
    found = [group for group in groups(**compared) if group]
    assert len(set(found)) == len(found) == 2


def test_a_scheduler_without_anything_to_compare_is_warned_about() -> None:
    alone = small(clipping=["none", "flat", "dpsgd_f"], noise="constant", scheduler=ASHA)
    (warning,) = plan_sweep(parse_sweep(alone)).warnings
    assert "no two of these do, so it will stop none" in warning
    several = small(clipping={"name": "flat", "bound": [0.5, 1.0]}, noise="constant", scheduler=ASHA)
    assert plan_sweep(parse_sweep(several)).warnings == ()


def test_a_scheduler_that_may_stop_trials_only_after_their_end_is_warned_about() -> None:
    bounds: dict[str, Any] = {"clipping": {"name": "flat", "bound": [0.5, 1.0]}, "noise": "constant", "epochs": [2, 3]}
    (warning,) = plan_sweep(parse_sweep(small(**bounds, scheduler={**ASHA, "grace_epochs": 3}))).warnings
    assert warning == (
        "scheduler asha stops no trial before its grace_epochs, 3, and no trial takes more than 3, so it will stop "
        "none; set grace_epochs lower"
    )
    assert plan_sweep(parse_sweep(small(**bounds, scheduler={**ASHA, "grace_epochs": 2}))).warnings == ()
