"""Nothing that a sweep writes or prints calls an epsilon a guarantee where whoever knows the seed knows the noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestration.commands.main import app
from orchestration.comparison.research_mode import KNOWN_NOISE
from orchestration.execution.environment import IN_PROCESS
from orchestration.pipeline import RunRequest, run_sweep
from orchestration.records.layout import SweepFiles
from orchestration.sweeps.schema import parse_sweep
from tests.orchestration.sample_grids import key_in, small

from mlflow import MlflowClient  # isort: skip


def run(folder: Path, noise_source: str) -> SweepFiles:
    text = small(
        clipping={"name": "flat", "bound": 1.0},
        noise="constant",
        seeds=0,
        epochs=1,
        release="raw",
        noise_source=noise_source,
        accounting={"group_sizes": [1, 2]},
    )
    return run_sweep(RunRequest(parse_sweep(text), text, str(folder / "out"), IN_PROCESS)).files


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def kinds(found: Any) -> set[str]:
    """All values of a field that ends in ``kind``, however deep."""
    if isinstance(found, list):
        return set().union(*map(kinds, found))
    if not isinstance(found, dict):
        return set()
    own = {value for name, value in found.items() if name.endswith("kind") and isinstance(value, str)}
    return own.union(*map(kinds, found.values()))


@pytest.mark.parametrize(("noise_source", "claim"), [("seeded", "estimate"), ("os_entropy", "guarantee")])
def test_every_output_claims_what_the_noise_allows(tmp_path: Path, noise_source: str, claim: str) -> None:
    files = run(tmp_path, noise_source)
    key = key_in(files.root, "flat-seed0")
    trial, seeded = files.trial(key).root, noise_source == "seeded"
    again = ("account", files.root, "--address", "in-process", "--group-sizes", "2", "--json")
    answers = {
        "results.json": json.loads(Path(files.results).read_text()),
        "epsilon": json.loads(printed("epsilon", "--trial", trial, "--delta", "1e-5", "--risk", "--json")),
        "account": json.loads(printed(*again)),
        "owner": json.loads(printed("owner-report", trial, "--example-id", "0", "--json")),
    }
    for name, answer in answers.items():
        assert kinds(answer) <= {claim, *(() if seeded else ("output_specific", "estimate"))}, name
        assert name == "owner" or claim in kinds(answer), name
    table = printed("epsilon", "--trial", trial, "--delta", "1e-5")
    assert (KNOWN_NOISE in table.replace("\n", " ")) is seeded
    report = Path(files.report).read_text()
    assert (f"<small class='claim'>{claim}, add_remove</small>") in report
    assert ("<small class='claim'>guarantee" in report) is not seeded
    client = MlflowClient(f"sqlite:///{files.root}/mlflow.db")
    experiment = client.get_experiment_by_name("dpsweep")
    assert experiment is not None
    for each in client.search_runs([experiment.experiment_id]):
        tags = {name: value for name, value in each.data.tags.items() if name.endswith("_kind")}
        assert not seeded or "guarantee" not in tags.values(), tags
        assert each.data.tags.get("dpsweep.trial_key") != key or tags["epsilon_kind"] == claim
