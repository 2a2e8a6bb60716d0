"""The pages build as a site."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SWEEP = """
name: tumours
data: breast_cancer
model: logistic
sampling: {method: poisson, batch_size: 64}
epochs: 1
clipping: flat
privacy: {target_epsilon: 3, delta: 1e-5}
"""


@pytest.mark.long
def test_the_site_has_the_pages_the_api_and_a_report(tmp_path: Path) -> None:
    """Sphinx takes half a minute, and fails for a link or a cross-reference that leads nowhere."""
    pytest.importorskip("sphinx", reason="pip install -e '.[docs]'")
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    command = [sys.executable, "-m", "docs", "--sweep", "sweep.yaml", "--output", "site"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    site = tmp_path / "site"
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "examples" / "README.md"]:
        assert (site / page.relative_to(ROOT).with_suffix(".html")).exists()
    api = (site / "docs" / "reference.html").read_text()
    assert 'id="dpsweep.PrivateTraining.step"' in api
    assert "tumours" in (site / "report.html").read_text()
    assert "privatetraining" in (site / "searchindex.js").read_text()
