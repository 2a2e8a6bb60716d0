"""`dpsweep epsilon --sampling random_allocation`: certified from both sides, and all else refused by name."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from dpsweep.accounting.pld import epsilon_of_allocation
from dpsweep.orchestration.commands.main import app

ALLOCATED = (
    *("--sampling", "random_allocation", "--dataset-size", 1000, "--batch-size", 500, "--epochs", 3),
    *("--noise-multiplier", 1.5, "--delta", 1e-5),
)
OF_RATE = ("--sample-rate", 0.1, "--steps", 5, "--noise-multiplier", 1, "--delta", 1e-5)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["epsilon", *map(str, arguments)])


def test_it_is_certified_from_both_sides() -> None:
    found = json.loads(run(*ALLOCATED, "--json").stdout)
    certified = epsilon_of_allocation(1.5, 2, 3, 1e-5)
    assert (found["epsilon"], found["lower_epsilon"]) == (certified.upper, certified.lower)
    assert (found["kind"], found["adjacency"], found["steps"], found["per_epoch"]) == ("guarantee", "add_remove", 6, 1)
    assert "each example in a random one 2 times an epoch" in run(*ALLOCATED, "--per-epoch", 2).stdout
    none = json.loads(run(*ALLOCATED[:-4], "--noise-multiplier", 0, "--delta", 1e-5, "--json").stdout)
    assert (none["epsilon"], none["private"], none["kind"]) == (None, False, "none")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*ALLOCATED, "--group-size", 2), "drop --group-size"),
        ((*ALLOCATED, "--schedule", "exponential:decay=0.1", "--risk"), "drop --risk, --schedule"),
        ((*ALLOCATED, "--adjacency", "zero_out", "--accountant", "rdp"), "drop --accountant, --adjacency"),
        (ALLOCATED[:4] + ALLOCATED[6:], "--batch-size is missing"),
        ((*ALLOCATED, "--per-epoch", 3), "per_epoch is 3, but must be at most 2"),
        ((*OF_RATE, "--per-epoch", 2), "--per-epoch belongs to"),
    ],
)
def test_all_else_is_refused_by_name(arguments: tuple[object, ...], said: str) -> None:
    refused = run(*arguments)
    assert refused.exit_code != 0
    assert said in str(refused.exception)


def test_calibrate_says_that_it_does_not_know_it() -> None:
    asked = ("--target-epsilon", 1, *ALLOCATED[:8], "--delta", 1e-5)
    refused = CliRunner().invoke(app, ["calibrate", *map(str, asked)])
    assert "no calibration yet" in str(refused.exception)
