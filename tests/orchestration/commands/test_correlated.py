"""`dpsweep epsilon` and `calibrate` with allocated or cyclic batches, one fixed order, and correlated noise."""

from __future__ import annotations

import json

import pytest

from dpsweep.accounting import PoissonSampling, Segment, Trace, account
from dpsweep.accounting.mechanism.noise_strategies import BandedNoise, prefix_sum_errors
from dpsweep.accounting.mechanism.samplings import RandomAllocationSampling
from dpsweep.accounting.pld import epsilon_pld
from tests.orchestration.invoking import invoked, printed

SIZES = ("--dataset-size", 1000, "--batch-size", 50)
CYCLIC = ("--sampling", "cyclic_poisson", *SIZES)
BANDED = ("--noise-strategy", "banded:bands=4")
RUN = ("--steps", 40, "--noise-multiplier", 2, "--delta", 1e-5)
BATCHES = ("--sampling", "random_allocation", "--dataset-size", 1000, "--batch-size", 250)
ALLOCATED = (*BATCHES, "--epochs", 3, "--noise-multiplier", 1.5, "--delta", 1e-5)
OF_RATE = ("--sample-rate", 0.1, "--steps", 5, "--noise-multiplier", 1, "--delta", 1e-5)


def test_a_cycle_has_as_many_groups_as_bands() -> None:
    found = json.loads(printed("epsilon", *CYCLIC, *BANDED, *RUN, "--json"))
    same = account(Trace(1000, (Segment(0, 10, PoissonSampling(0.2), 2.0),)), 1e-5)
    assert (found["epsilon"], found["lower_epsilon"]) == (same.epsilon, same.lower_epsilon)
    assert (found["kind"], found["adjacency"], found["steps"]) == ("guarantee", "add_remove", 40)
    errors = (found["mean_squared_error"], found["max_squared_error"])
    assert errors == prefix_sum_errors(BandedNoise(4, 40), 40, 2.0)
    longer = json.loads(printed("epsilon", *CYCLIC, *BANDED, "--cycle-length", 8, *RUN, "--json"))
    assert (found["cycle_length"], longer["cycle_length"]) == (4, 8)
    rounds = account(Trace(1000, (Segment(0, 5, PoissonSampling(0.4), 2.0),)), 1e-5)
    assert longer["epsilon"] == rounds.epsilon


def test_one_fixed_order_needs_no_bands() -> None:
    asked = ("--sampling", "fixed_order", *SIZES, "--noise-strategy", "lambda_cgd:decay=0.5", *RUN, "--json")
    found = json.loads(printed("epsilon", *asked))
    assert (found["lower_epsilon"], found["adjacency"], found["noise_strategy"]) == (
        None,
        "zero_out",
        "lambda_cgd:decay=0.5",
    )
    independent = json.loads(printed("epsilon", *asked[:6], *RUN, "--json"))
    assert 0.0 < independent["epsilon"] < found["epsilon"], "at the same noise, correlation costs more"
    assert "mean_squared_error" not in independent


def test_calibrate_takes_the_same() -> None:
    asked = (*CYCLIC, *BANDED, "--steps", 40, "--target-epsilon", 2, "--delta", 1e-5, "--json")
    found = json.loads(printed("calibrate", *asked))
    assert found["epsilon"] == pytest.approx(2.0, rel=1e-3)
    assert 1.99 < found["lower_epsilon"] <= found["epsilon"] <= 2.0
    assert found["mean_squared_error"] == prefix_sum_errors(BandedNoise(4, 40), 40, found["noise_multiplier"])[0]


def test_tables_say_the_errors_of_a_strategy() -> None:
    mean, largest = prefix_sum_errors(BandedNoise(4, 40), 40, 2.0)
    assert f"mean {mean:.4g}, largest {largest:.4g}" in printed("epsilon", *CYCLIC, *BANDED, *RUN)
    asked = (*CYCLIC, *BANDED, "--steps", 40, "--target-epsilon", 2, "--delta", 1e-5)
    assert "note: noise banded:bands=4: squared error" in printed("calibrate", *asked)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*CYCLIC, *RUN), "--cycle-length is missing"),
        ((*CYCLIC, *RUN, "--cycle-length", 0), "a cycle has 0 groups"),
        ((*CYCLIC, "--noise-strategy", "bisr:bands=4", *RUN), "use banded noise with at most as many bands"),
        ((*CYCLIC, *BANDED, *RUN, "--max-batch-size", 90), "neither --sample-rate nor --max-batch-size"),
        ((*CYCLIC, "--noise-strategy", "tree:buffers=4", *RUN), "unknown noise strategy 'tree'"),
        ((*CYCLIC, "--noise-strategy", "bisr", *RUN), "noise strategy 'bisr' needs bands; valid: bands"),
        (("--sampling", "poisson", *SIZES, "--cycle-length", 4, *RUN), "cycle_length is 4, but belongs to cyclic"),
        (
            ("--sampling", "random_allocation", *SIZES, *BANDED, "--epochs", 2, *RUN[2:]),
            "no bound for banded noise with randomly allocated",
        ),
        ((*CYCLIC, *BANDED, "--schedule", "step:factor=0.5,period=1", *RUN), "use the schedule constant"),
        (ALLOCATED[:4] + ALLOCATED[6:], "needs --dataset-size and --batch-size"),
        ((*OF_RATE, "--per-epoch", 2), "per_epoch is 2, but belongs to"),
        ((*ALLOCATED[:-1], 1e-300), "delta is 1e-300, and pld computes epsilons from 1e-250 on; choose a larger delta"),
    ],
)
def test_what_has_no_proof_is_refused_by_name(arguments: tuple[object, ...], said: str) -> None:
    refused = invoked("epsilon", *arguments)
    assert refused.exit_code != 0
    assert said in str(refused.exception)


def test_allocated_batches_are_certified_from_both_sides() -> None:
    found = json.loads(printed("epsilon", *ALLOCATED, "--per-epoch", 2, "--json"))
    certified = epsilon_pld(Trace(1000, (Segment(0, 12, RandomAllocationSampling(4, 2), 1.5),)), 1e-5)
    assert (found["epsilon"], found["lower_epsilon"]) == (certified.upper, certified.lower)
    assert (found["kind"], found["adjacency"], found["steps"]) == ("guarantee", "add_remove", 12)
    assert (found["sampling"], found["per_epoch"]) == ("random_allocation", 2)
    groups = json.loads(printed("epsilon", *ALLOCATED, "--per-epoch", 2, "--group-size", "1,2", "--json"))
    assert [each["group_size"] for each in groups] == [1, 2]
    assert certified.upper == groups[0]["epsilon"] < groups[1]["epsilon"]
    none = json.loads(printed("epsilon", *ALLOCATED[:-4], "--noise-multiplier", 0, "--delta", 1e-5, "--json"))
    assert (none["epsilon"], none["private"], none["kind"]) == (None, False, "none")
