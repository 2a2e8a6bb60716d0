"""A sweep that is recorded nowhere but in its folder."""

from __future__ import annotations

from pathlib import Path

from dpsweep.orchestration.store.layout import DATABASE
from tests.orchestration.processes import dpsweep
from tests.orchestration.sample_grids import small
from tests.orchestration.tracking.recordings import client_of, runs_of


def test_it_leaves_no_store_and_is_recorded_later_by_a_run_with_mlflow(tmp_path: Path) -> None:
    file, out = tmp_path / "sweep.yaml", tmp_path / "out"
    file.write_text(small(model="logistic", clipping=["none", "flat"], noise="constant", seeds=0, epochs=1))
    run = ("run", file, "--output", out, "--address", "in-process")
    done = dpsweep(*run, "--tracking-uri", "none")
    assert (done.returncode, "Open the report:" in done.stdout, "MLflow" in done.stdout) == (0, True, False)
    assert (out / "report.html").exists()
    assert not (out / DATABASE).exists()
    shown = dpsweep("report", out)
    assert (shown.returncode, "Open the report:" in shown.stdout, "MLflow" in shown.stdout) == (0, True, False)
    refused = dpsweep("best", out, "--register", "winner", "--tracking-uri", "none")
    assert refused.returncode == 2
    assert "give the --tracking-uri of one in place of 'none'" in refused.stderr
    again = dpsweep(*run)
    assert (again.returncode, "Open MLflow:" in again.stdout) == (0, True)
    kinds = [found.data.tags["dpsweep.kind"] for found in runs_of(client_of(out))]
    assert sorted(kinds) == ["sweep", "trial", "trial"]
