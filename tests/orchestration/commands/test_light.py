"""Commands that only read stored sweeps load neither torch nor Ray nor MLflow, which takes longer than they do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.orchestration.sample_results import stored_sample

READ = """
import json, sys
from typer.testing import CliRunner
from dpsweep.orchestration.commands.main import app
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
print(*sorted({"torch", "ray", "mlflow"} & set(sys.modules)))
"""


def test_commands_that_read_load_no_torch(tmp_path: Path) -> None:
    for name in ("one", "two"):
        stored_sample(tmp_path / name, model={"name": "mlp", "hidden": [16]})
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    asked = [
        ["list", str(tmp_path)],
        ["best", one],
        ["compare", one, two],
        ["export", one, "--to", str(tmp_path / "trials.csv")],
    ]
    done = subprocess.run([sys.executable, "-c", READ, json.dumps(asked)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
