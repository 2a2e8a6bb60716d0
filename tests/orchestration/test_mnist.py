"""A short variant of sweeps/mnist.yaml on the real data."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from tests.orchestration.processes import dpsweep

MNIST = Path(__file__).parents[2] / "sweeps" / "mnist.yaml"


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get("DPSWEEP_DATA"), reason="needs real data: set DPSWEEP_DATA")
def test_mnist_with_few_examples_of_class_8(tmp_path: Path) -> None:
    sweep = yaml.safe_load(MNIST.read_text())
    sweep |= {"epochs": 1, "seeds": [0], "noise": ["constant"], "clipping": ["none", {"name": "dpsgd_f", "bound": 1.0}]}
    sweep["data"]["keep"] = {str(digit): 300 for digit in range(10)} | {"8": 30}
    sweep["resources"]["cpus"] = sweep["execution"]["threads"] = 1
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep))
    done = dpsweep("run", file, "--output", tmp_path / "out", "--json", "--address", "in-process")
    assert done.returncode == 0, done.stderr
    baseline, private = json.loads(done.stdout)["trials"]
    assert baseline["accuracy"] > 0.15
    assert 6.4 < private["epsilon"] <= 6.55
    assert private["group_accuracies"].keys() == {str(digit) for digit in range(10)}
