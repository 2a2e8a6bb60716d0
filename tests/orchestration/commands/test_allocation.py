"""`dpsweep epsilon` and `calibrate` with `--sampling random_allocation`: certified, and what is unproven is refused."""

from __future__ import annotations

import json

import pytest

from dpsweep.accounting import Segment, Trace
from dpsweep.accounting.mechanism.samplings import RandomAllocationSampling
from dpsweep.accounting.pld import epsilon_pld
from tests.orchestration.invoking import invoked, printed

BATCHES = ("--sampling", "random_allocation", "--dataset-size", 1000, "--batch-size", 250)
ALLOCATED = (*BATCHES, "--epochs", 3, "--noise-multiplier", 1.5, "--delta", 1e-5)
OF_RATE = ("--sample-rate", 0.1, "--steps", 5, "--noise-multiplier", 1, "--delta", 1e-5)


def test_it_is_certified_from_both_sides() -> None:
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (ALLOCATED[:4] + ALLOCATED[6:], "needs --dataset-size and --batch-size"),
        ((*OF_RATE, "--per-epoch", 2), "per_epoch is 2, but belongs to"),
        ((*ALLOCATED[:-1], 1e-300), "delta is 1e-300, and pld computes epsilons from 1e-250 on; choose a larger delta"),
    ],
)
def test_what_is_not_proven_is_refused_by_name(arguments: tuple[object, ...], said: str) -> None:
    refused = invoked("epsilon", *arguments)
    assert refused.exit_code != 0
    assert said in str(refused.exception)
