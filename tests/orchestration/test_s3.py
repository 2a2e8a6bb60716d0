"""A whole sweep in an object store that speaks S3: a real server, spoken to by pyarrow and boto3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.processes import dpsweep
from tests.orchestration.reference import run_undisturbed
from tests.orchestration.sample_grids import keys_of, small
from tests.orchestration.servers import has_s3, objects_in, s3, sent_in_pieces

TEXT = small(model="logistic", clipping=["none", "flat"], noise="constant", seeds=0)
MORE = small(model="logistic", clipping=["none", "flat"], noise="constant", seeds=[0, 1])


@pytest.mark.skipif(not has_s3(), reason="no moto for an S3 server")
def test_a_sweep_runs_grows_and_is_watched_and_deleted_in_an_object_store(tmp_path: Path) -> None:
    file, out = tmp_path / "sweep.yaml", "s3://bucket/sweeps/small"
    file.write_text(TEXT)
    with s3("bucket") as store:

        def ends_well(*arguments: object) -> str:
            done = dpsweep(*arguments, **store)
            assert done.returncode == 0, done.stderr
            return done.stdout

        run = ("run", file, "--output", out, "--address", "in-process")
        store["MLFLOW_TRACKING_URI"] = f"sqlite:///{tmp_path}/mlflow.db"
        ends_well(*run)
        status = json.loads(ends_well("status", out, "--json"))
        assert (status["state"], status["counts"]["finished"]) == ("finished", 2)
        before = objects_in("bucket", store)
        assert sent_in_pieces("bucket", store) == [], "small objects are one request each"
        alone = run_undisturbed(parse_sweep(TEXT), tmp_path / "alone")
        for key in keys_of(TEXT).values():
            mine = Path(SweepFiles(alone.root).trial(key).model).read_bytes()
            assert before[f"sweeps/small/trials/{key}/model.pt"] == mine
        file.write_text(MORE)
        assert "2 of 4 trials have results" in dpsweep(*run, **store).stderr
        after = objects_in("bucket", store)
        trials = {name: data for name, data in before.items() if "/trials/" in name}
        assert trials.items() <= after.items(), "every byte of finished trials"
        assert "4 trained trials" in ends_well("verify", out)
        assert "small" in ends_well("list", "s3://bucket/sweeps")
        ends_well("delete", out, "--yes")
        left = {name.split("/")[2] for name in objects_in("bucket", store)}
        assert left - {""} == {"attempts"}, "and what marks the folder"
