"""Results of trials as they are stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.sealed import read_sealed, write_sealed
from dpsweep.orchestration.store.published import Density
from dpsweep.orchestration.store.results import (
    StoredResult,
    read_exact_statistics,
    read_result,
    read_result_of,
    write_exact_statistics,
    write_result,
)
from dpsweep.orchestration.sweeps.grid import grid
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.sample_grids import small
from tests.orchestration.sample_results import EXACT, result_of, stopped_of


def test_the_reasons_of_a_trial_are_stored_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    point = grid(parse_sweep(small(clipping="flat", noise="constant", seeds=0)))[0]
    results: list[StoredResult] = [result_of(point, 0.7), replace(stopped_of(point), reasons=("own_clipping",))]
    for place, result in enumerate(results):
        uri = str(tmp_path / f"result{place}.json")
        write_result(uri, result)
        assert read_result(uri) == result
        values = json.loads(read_sealed(uri, "") or b"")
        assert values["reasons"] == list(result.reasons) != []
        write_sealed(uri, json.dumps({**values, "reasons": ["no_such_reason"]}).encode())
        with pytest.raises(DataCorruption, match="is no result of this version"):
            read_result(uri)


@pytest.mark.parametrize("key", ["other", "../../other/trials/x"])
def test_the_result_of_another_trial_is_damage(tmp_path: Path, key: str) -> None:
    point = grid(parse_sweep(small(clipping="flat", noise="constant", seeds=0)))[0]
    uri, result = str(tmp_path / "result.json"), result_of(point, 0.7)
    write_result(uri, result)
    assert read_result_of(result.key, uri) == result
    values = json.loads(read_sealed(uri, "") or b"")
    write_sealed(uri, json.dumps(values).replace(f'"{result.key}"', f'"{key}"').encode())
    with pytest.raises(DataCorruption, match=rf"result\.json is the result of another trial than {result.key}"):
        read_result_of(result.key, uri)


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no training example": lambda result: result["training"].update(train_size=0),
    "no parameter": lambda result: result["training"].update(parameters=-1),
    "a size that is no number": lambda result: result["training"].update(test_size="NaN"),
    "a time that no calendar has": lambda result: result.update(ended="Infinity"),
    "a group of nobody": lambda result: result["counters"].update(courses=[{"group": 0, "examples": 0}]),
    "a group that is not there": lambda result: result["counters"].update(courses=[{"group": 2, "examples": 1}]),
    "an epsilon without its epoch": lambda result: result.update(epsilons=[*result["epsilons"], 1.0]),
    "epochs that end before they begin": lambda result: result["training"]["history"][1].update(step=0),
    "more right guesses than guesses": lambda result: result["attacks"].update(
        loss_threshold=[{"name": "a", "examples": 10, "threshold": 0.5, "correct": 11}]
    ),
    "an unknown task": lambda result: result["training"]["evaluation"].update(task="other"),
    "a matrix that is no square": lambda result: result["training"]["evaluation"].update(
        counts={"confusion": [[1, 2], [3]], "log_loss": 0.5, "calibration_error": 0.1}
    ),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_number_that_readers_cannot_use_is_damage(tmp_path: Path, forged: str) -> None:
    """Readers divide by some, take roots, look groups up and ask calendars: each ended in an error of its own."""
    point = grid(parse_sweep(small(clipping="flat", noise="constant", seeds=0)))[0]
    uri = str(tmp_path / "result.json")
    write_result(uri, result_of(point, 0.7))
    values = json.loads(read_sealed(uri, "") or b"")
    FORGED[forged](values)
    write_sealed(uri, json.dumps(values).encode())
    with pytest.raises(DataCorruption, match=r"is no result of this version|counts epochs or groups"):
        read_result(uri)


def test_a_negative_count_of_an_exact_density_is_damage(tmp_path: Path) -> None:
    """Figures show the logarithm of one more."""
    uri = str(tmp_path / "summary.json")
    forged = Density((0.0, 1.0), (0.0, 1.0), ((-1,),))
    write_exact_statistics(uri, replace(EXACT, loss_density=forged))
    with pytest.raises(DataCorruption, match="holds no statistics of this version"):
        read_exact_statistics(uri, "restore it")
