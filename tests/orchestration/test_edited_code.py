"""The user's code is edited between runs: nothing mixes results of one version with another."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dpsweep
from dpsweep.orchestration.execution import cluster
from dpsweep.orchestration.pipeline.run import run_sweep
from dpsweep.orchestration.pipeline.stage import NoDisplay, RunRequest
from dpsweep.orchestration.store.status import SweepStatus
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.data import load_dataset
from dpsweep.workers.models.networks import resnet20_gn
from tests.orchestration.invoking import invoked
from tests.orchestration.processes import environment

NET = """
from torch import nn
from edited_layers import ACTIVATION, H

def net(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(30, H), ACTIVATION(), nn.Linear(H, num_classes))
"""
LAYERS = "from torch import nn\nH = 4\nACTIVATION = nn.Tanh\n"
SWEEP = {
    "name": "edited",
    "data": "breast_cancer",
    "model": "edited_net:net",
    "sampling": {"method": "poisson", "batch_size": 64},
    "epochs": 2,
    "clipping": "flat",
    "optimizer": {"name": "sgd", "learning_rate": 1.0},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-5, "accountant": "rdp"},
}
CHANGED = r"edited_layers\.py has changed since"


def edit(folder: Path, before: str = "H = 4", after: str = "H = 9") -> None:
    """Edit the module that the named one imports, keeping its time and, by default, its size."""
    file = folder / "edited_layers.py"
    times, source = file.stat(), file.read_text()
    assert before in source
    file.write_text(source.replace(before, after))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def width(model: nn.Module) -> int:
    return len(model.state_dict()["1.bias"])


def run(folder: Path, output: str = "out", **options: Any) -> dpsweep.StoredSweep:
    """Run the sweep of a folder in this process, as the cell of a notebook does."""
    sweep = {**SWEEP, **options.pop("changes", {})}
    (folder / "sweep.json").write_text(json.dumps(sweep))
    given = {"address": "in-process", "tracking_uri": "none", **options}
    return dpsweep.run(folder / "sweep.json", output=folder / output, **given)


def one(sweep: dpsweep.StoredSweep) -> dpsweep.Trial:
    (trial,) = sweep.trials.values()
    assert trial.state == "finished", trial.error
    return trial


def agrees(trial: dpsweep.Trial) -> bool:
    """Whether predictions have the stored accuracy, which tells tanh from relu."""
    test = load_dataset(trial.spec.data).test
    result: Any = trial.result
    return bool((trial.predict(test.features).argmax(1) == test.labels.numpy()).mean() == result.evaluation.accuracy)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "edited_net.py").write_text(NET)
    (tmp_path / "edited_layers.py").write_text(LAYERS)
    return tmp_path


def test_an_edit_in_one_process_is_trained_and_an_earlier_model_stays_what_it_was(folder: Path) -> None:
    before = one(run(folder))
    edit(folder)
    after = one(run(folder, "other"))
    assert [width(trial.model()) for trial in (before, after, before)] == [4, 9, 4]
    assert agrees(before)
    assert agrees(after)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="continue"),
        pytest.param({"seeds": [0, 1]}, id="grow"),
        pytest.param({"epochs": 3}, id="kept-though-no-longer-asked"),
    ],
)
def test_a_sweep_is_not_continued_beside_results_of_other_code(folder: Path, changes: dict[str, Any]) -> None:
    key = one(run(folder)).key
    edit(folder)
    with pytest.raises(dpsweep.InvalidInput, match=CHANGED) as refused:
        run(folder, changes=changes)
    kept = folder / "out" / "trials" / key / "code" / "edited_layers.py"
    assert f"restore what {kept.parent} holds" in str(refused.value)
    assert ("retry=['all']" in str(refused.value)) == ("epochs" not in changes)
    with pytest.raises(dpsweep.InvalidInput, match=CHANGED):
        run(folder, changes=changes, retry=["failed"])
    shutil.copy(kept, folder)
    assert {trial.state for trial in run(folder, changes=changes).trials.values()} == {"finished"}


@pytest.mark.long
def test_retried_trials_are_trained_with_the_code_as_it_is_and_stay_counted(folder: Path) -> None:
    cost = one(run(folder)).key
    edit(folder)
    again = run(folder, retry=["all"])
    assert width(one(again).model()) == 9
    assert agrees(one(again))
    assert len(list((folder / "out" / "attempts" / cost).iterdir())) == 2


@pytest.mark.long
def test_a_trial_that_other_code_began_and_that_showed_nothing_starts_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training fails in its first epoch, and the edit mends it."""
    (folder / "edited_layers.py").write_text(
        "import torch\nfrom torch import nn\nH = 4\n"
        "class ACTIVATION(nn.Tanh):\n    def forward(self, x):\n"
        "        if self.training and len(x) > 40:\n            raise RuntimeError('too many')\n"
        "        return super().forward(x)\n"
    )
    (failed,) = run(folder).failed
    began = folder / "out" / "trials" / failed.key
    assert (began / "code" / "edited_layers.py").exists()
    edit(folder, "len(x) > 40", "len(x) > 4000")
    assert one(run(folder)).error is None


def test_weights_replaced_while_a_sweep_runs_are_refused_by_its_trials(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    model = {"name": "resnet20_gn", "initial_weights": str(weights)}
    few = {"name": "digits", "keep": {str(digit): 6 for digit in range(10)}, "test_fraction": 0.1}
    sampling = {"method": "poisson", "batch_size": 30}
    text = json.dumps({**SWEEP, "data": few, "model": model, "sampling": sampling, "epochs": 1})
    torch.save(resnet20_gn((1, 8, 8), 10).state_dict(), weights)
    before = weights.read_bytes()

    class Replacing(NoDisplay):
        def watching(self, status: SweepStatus) -> AbstractContextManager[None]:
            torch.save(resnet20_gn((1, 8, 8), 10).state_dict(), weights)
            return super().watching(status)

    request = RunRequest(parse_sweep(text), text, str(tmp_path / "out"), "in-process", "none")
    run_sweep(request, Replacing())
    (trial,) = dpsweep.open(tmp_path / "out").trials.values()
    assert trial.state == "failed"
    assert re.search(r"weights\.pt has changed since the run began, .*; restore the weights", str(trial.error))
    weights.write_bytes(before)
    run_sweep(replace(request, retry=("failed",)))
    one(dpsweep.open(tmp_path / "out"))


def test_models_of_other_code_are_refused_by_a_new_reader(folder: Path, tmp_path: Path) -> None:
    """In a folder that was copied elsewhere, as to another machine."""
    before = one(run(folder))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder / "out", elsewhere / "out")
    for name in ("edited_net.py", "edited_layers.py"):
        shutil.copy(folder / name, elsewhere)
    allowed = [str(elsewhere / "edited_net.py")]
    assert agrees(one(dpsweep.open(elsewhere / "out", allow_code=allowed)))
    edit(elsewhere, "Tanh", "ReLU")
    reader = one(dpsweep.open(elsewhere / "out", allow_code=allowed))
    for load in (reader.model, lambda: reader.predict(np.zeros((1, 30), "f4"))):
        with pytest.raises(dpsweep.InvalidInput, match=CHANGED) as refused:
            load()
    kept = elsewhere / "out" / "trials" / before.key / "code"
    assert f"allow the files there in place of yours: {kept}/" in str(refused.value)
    assert agrees(one(dpsweep.open(elsewhere / "out", allow_code=[str(kept / "edited_net.py")])))
    edit(elsewhere / "out" / "trials" / before.key / "code", "Tanh", "ReLU")
    with pytest.raises(dpsweep.DataCorruption, match=r"code/edited_layers.py: its sha256 differs"):
        one(dpsweep.open(elsewhere / "out", allow_code=[str(kept / "edited_net.py")])).model()


def test_trials_of_other_code_are_not_taken_from_another_folder(folder: Path) -> None:
    run(folder)
    edit(folder)
    with pytest.raises(dpsweep.InvalidInput, match=f"{CHANGED} .*train anew, without `sources`"):
        run(folder, "other", sources=[folder / "out"])


def test_verify_and_best_name_what_has_changed(folder: Path) -> None:
    """In the user's own files, which the sweep was last run with; another place is named."""
    key = one(run(folder)).key

    def verified(*more: str) -> tuple[str, dict[str, Any]]:
        said = invoked("verify", folder / "out", *more)
        as_json = invoked("verify", folder / "out", *more, "--json")
        assert said.exit_code == as_json.exit_code == 0, said.output
        return said.output, json.loads(as_json.stdout)["own_files"]

    net, layers = str(folder / "edited_net.py"), str(folder / "edited_layers.py")
    said, own = verified()
    assert f"your own files are as the trials keep them: {net}, {layers}" in said
    assert own == {"compared": [net, layers], "changed": {}, "not_found": []}
    edit(folder)
    said, own = verified()
    assert f"warning: {layers} has changed since 1 trial began" in said
    assert own["changed"] == {layers: [key]}
    best = invoked("best", folder / "out")
    assert f"warning: {layers} has changed since 1 trial began" in best.stderr
    (folder / "edited_layers.py").unlink()
    assert verified()[1]["changed"] == {"edited_layers.py": [key]}, "it is gone"
    elsewhere = (folder / "edited_net.py").rename(folder / "out" / "edited_net.py")
    said, own = verified()
    assert f"{folder} is not here, so your own code was not compared" in said
    assert own == {"compared": [], "changed": {}, "not_found": [str(folder)]}
    (elsewhere.parent / "edited_layers.py").write_text(LAYERS)
    assert verified("--code", str(elsewhere))[1]["changed"] == {}


@pytest.mark.long
def test_a_tuning_of_other_code_is_refused(folder: Path) -> None:
    tune = {
        "data": {"name": "breast_cancer", "public_fraction": 0.2},
        "tune": {"parameters": {"optimizer.learning_rate": [0.5, 1.0]}, "privacy": "unaccounted"},
    }
    run(folder, changes=tune)
    edit(folder)
    with pytest.raises(dpsweep.InvalidInput, match=CHANGED):
        run(folder, changes=tune, retry=["all"])


LOAD = """
import sys
import mlflow, numpy
sys.path.insert(0, "")
models = [mlflow.pyfunc.load_model(uri) for uri in sys.argv[1:]]
rows = numpy.linspace(-1, 1, 60, dtype="f4").reshape(2, 30)
for _ in range(2):
    for model in models:
        print(*model.predict(rows).ravel().tolist())
"""


@pytest.mark.long
def test_a_logged_model_carries_its_code(folder: Path, tmp_path: Path) -> None:
    """Two versions of one module load in one new process, in another folder, with the modules edited and gone."""
    rows, expected, addresses = torch.linspace(-1, 1, 60).reshape(2, 30), [], []
    store = f"sqlite:///{tmp_path}/mlflow.db"
    for output, activation in (("tanh", "Tanh"), ("relu", "ReLU")):
        sweep = run(
            folder, output, tracking_uri=store, changes={"epochs": 12, "clipping": {"name": "flat", "bound": 1}}
        )
        addresses.append(sweep.register(sweep.best(), output, tracking_uri=store).address)
        expected.append(one(sweep).predict(rows.numpy()).ravel().tolist())
        edit(folder, activation, "ReLU")
    (folder / "edited_net.py").unlink()
    away = tmp_path / "away"
    away.mkdir()
    (away / "edited_layers.py").write_text("raise RuntimeError('not this one')\n")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *addresses],
        cwd=away,
        env=environment(MLFLOW_TRACKING_URI=store),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [[float(value) for value in line.split()] for line in done.stdout.splitlines()[-4:]]
    assert np.allclose(found, [*expected, *expected], atol=1e-6)
    assert not np.allclose(expected[0], expected[1], atol=1e-3)


@pytest.mark.long
def test_workers_of_ray_train_the_code_that_was_planned(folder: Path) -> None:
    """tanh became relu in one kernel: by an edit that is planned, while an edit during the run is not seen by it."""
    before = one(run(folder))
    edit(folder, "Tanh", "ReLU")
    during: list[Callable[[], None]] = [lambda: edit(folder, "ReLU", "GELU")]

    def connected(*arguments: Any) -> Any:
        during.pop()()
        return cluster.connected(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpsweep.orchestration.execution.on_ray.connected", connected)
        after = one(run(folder, "ray", address="local"))
    assert not during, "the edit was made once Ray was there, before a worker imported anything"
    assert isinstance(after.model()[2], nn.ReLU)  # type: ignore[index]
    assert agrees(before)
    assert agrees(after)
    with pytest.raises(dpsweep.InvalidInput, match=CHANGED):
        run(folder, "ray", address="local")
