"""The same sweep on three nodes: same models and epsilons; storage and user code reach every node.

Three nodes take a minute to start; the gate tries refusals for lack of resources on one, in test_nodes.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ray._private import utils as ray_utils

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.files import exists
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.cluster import _sigterm_handler_kept, connected, stderr_without
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from tests.orchestration.execution.recorded_tasks import nodes_and_tasks
from tests.orchestration.execution.test_upkeep import KEYS, TEXT, trained_sweep
from tests.orchestration.execution.three_nodes import CLOSED, Nodes, three_nodes
from tests.orchestration.processes import PATIENCE, dpsweep, script, start, wait_until
from tests.orchestration.reference import assert_same_trial, run_undisturbed
from tests.orchestration.sample_grids import keys_of, small
from tests.orchestration.servers import mute
from tests.workers.rank_runs import ended, started

QUICKSTART = Path(__file__).parents[3] / "sweeps" / "quickstart.yaml"
SWEEP = small(
    clipping=["none", "flat", "dpsgd_f", "individual"],
    noise={"name": "exponential", "decay": 0.1},
    model="my_models:narrow",
    seeds=0,
    epochs=3,
    release="private",
    norms={"rows_per_part": 512},
    accounting={"individual": "rdp", "resource": "accounting", "cpus": 0},
)
MY_MODELS = """
import math
from torch import nn

def narrow(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(feature_shape), 8), nn.Tanh(), nn.Linear(8, num_classes))
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with three_nodes(tmp_path_factory.mktemp("nodes")) as found:
        yield found


@pytest.fixture
def address(nodes: Nodes) -> str:
    return nodes.address


def run_on(
    address: str, folder: Path, sweep: str, *options: object, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run ``sweep`` on the cluster, with ``my_models`` beside it."""
    (folder / "sweep.yaml").write_text(sweep)
    (folder / "my_models.py").write_text(MY_MODELS)
    arguments = ("run", folder / "sweep.yaml", "--output", folder / "out", "--address", address, "--json", *options)
    return dpsweep(*arguments, **{**CLOSED, **changes})


def parts_by_pool(address: str, folder: Path) -> Counter[str]:
    """How many parts the nodes of each pool have accounted so far."""
    counted = Counter[str]()
    for node, parts in nodes_and_tasks(address, "account_part", folder):
        counted[node["Labels"].get("pool", "head")] += parts
    return counted


@pytest.mark.long
def test_three_nodes_give_the_results_of_one_process(address: str, tmp_path: Path) -> None:
    """Parts run where the sweep keeps them, beside a trial that reserves the node's only CPU."""
    before = parts_by_pool(address, tmp_path)
    done, files = run_on(address, tmp_path, SWEEP), SweepFiles(str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert [trial["status"] for trial in trials] == ["finished"] * 4
    parts = sum(len(NormShards(files.trial(trial["key"]).norms).parts) for trial in trials if trial["private"])
    assert parts >= 9, "each of three private trials has several"
    assert parts_by_pool(address, tmp_path) - before == {"account": parts}

    reference = parse_sweep(SWEEP)
    undisturbed = run_undisturbed(reference, tmp_path / "undisturbed", permitted(reference, tmp_path))
    for trial in trials:
        assert_same_trial(files.trial(trial["key"]), undisturbed.trial(trial["key"]), trial["private"])


LONGER = small(
    clipping="individual",
    noise="constant",
    seeds=[0, 1],
    epochs=40,
    norms={"refreshes_per_epoch": 0.5},
    execution={"checkpoint_every_epochs": 0.3},
    accounting={"individual": "rdp"},
)
"""Long enough for a node to be lost in the middle of a trial."""

SEARCH = """
import sys
from pathlib import Path
import ray
from dpsweep.accounting.calibration.planned_runs import Calibration, TrialMechanism, solved
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.schedules import make_schedule
from dpsweep.orchestration.execution import backends

run = TrialMechanism(make_schedule("constant", 1.0), PoissonSampling(0.05), 2_000, (), (), "estimate")
asked = [Calibration(run, 4 + number, 2.0, 1e-5, "rdp") for number in range(6)]
found = backends.OnCluster(sys.argv[1], Path(sys.argv[2]))(asked)
assert found == [solved(each) for each in asked], found
backends.solved = lambda each: ray.get_runtime_context().get_node_id()
print(len(set(backends.OnCluster(sys.argv[1], Path(sys.argv[2]))(asked))))
"""


@pytest.mark.long
def test_calibrations_are_searched_on_the_nodes(address: str, tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    with script(SEARCH, address, tmp_path / "ray.log", errors=said, **CLOSED) as process:
        answer, _ = process.communicate(timeout=PATIENCE)
    assert answer == "2\n", said.read_text()


@pytest.mark.long
def test_a_node_that_trains_is_lost(nodes: Nodes, tmp_path: Path) -> None:
    """Its trial goes on elsewhere from its checkpoint: none fails, and all have the bits of an undisturbed run."""
    files, log = SweepFiles(str(tmp_path / "out")), tmp_path / "log"
    (tmp_path / "sweep.yaml").write_text(LONGER)
    trials = [files.trial(key) for key in keys_of(LONGER).values()]

    def in_the_middle() -> bool:
        return any(exists(trial.checkpoint) and not exists(trial.training) for trial in trials)

    driver = start(
        "run", tmp_path / "sweep.yaml", "--output", files.root, "--address", nodes.address, log=log, **CLOSED
    )
    wait_until(lambda: in_the_middle() or driver.poll() is not None, "a trial to train")
    assert nodes.lose_one_that_trains(), log.read_text()
    assert driver.wait(PATIENCE) == 0, log.read_text()
    undisturbed = run_undisturbed(parse_sweep(LONGER), tmp_path / "undisturbed")
    for key in keys_of(LONGER).values():
        assert exists(files.trial(key).result)
        assert_same_trial(files.trial(key), undisturbed.trial(key), True)


@pytest.mark.long
def test_trials_are_accounted_again_on_the_nodes(address: str, tmp_path: Path) -> None:
    """With the bits that this process gives, for single examples and for what it prints."""
    files = trained_sweep(tmp_path / "out", TEXT)
    arguments = ("account", files.root, "--delta", "1e-7", "--individual", "pld", "--json")
    there = dpsweep(*arguments, "--address", address, **CLOSED)
    assert there.returncode == 0, there.stderr
    waits = "warning: waiting for node"  # of a busy machine
    said = [line for line in there.stderr.splitlines() if not line.startswith((*KEYS, waits))]
    assert [line.partition(" (")[0] for line in said] == ["warning: no guarantee"], (
        "nothing of Ray, such as what it logs as it connects"
    )
    accounts = json.loads(there.stdout)["accounts"]
    stored = [read_epsilons(f"{account['folder']}/epsilons") for account in accounts]
    for account in accounts:
        shutil.rmtree(account["folder"])
    here = dpsweep(*arguments, "--address", "in-process")
    assert json.loads(here.stdout)["accounts"] == accounts
    for account, epsilons in zip(accounts, stored, strict=True):
        np.testing.assert_array_equal(read_epsilons(f"{account['folder']}/epsilons").upper, epsilons.upper)
    assert len(accounts) == 2


@pytest.mark.long
def test_a_private_selection_trains_on_the_nodes_and_leaves_the_best_alone(address: str, tmp_path: Path) -> None:
    text = small(
        data={"name": "digits", "public_fraction": 0.2},
        model="logistic",
        epochs=1,
        clipping="flat",
        noise="constant",
        seeds=0,
        noise_source="os_entropy",
        privacy={"target_epsilon": 5, "delta": 1e-4, "accountant": "rdp"},
        tune={"parameters": {"clipping.bound": [0.01, 1.0]}, "privacy": "private_selection", "trials": 4},
    )
    done, files = run_on(address, tmp_path, text), SweepFiles(str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    (trial,) = json.loads(done.stdout)["trials"]
    assert (trial["status"], trial["tuning"], trial["accountant"]) == ("finished", "private_selection", "selection-rdp")
    assert 4.9 < trial["epsilon"] <= 5.0
    assert [path.name for path in Path(files.trials).iterdir()] == [trial["key"]]
    assert not Path(files.selection).exists()
    assert "candidate" not in done.stderr.replace("candidates", ""), "nothing of single candidates is shown"


@pytest.mark.long
def test_the_quickstart_as_it_is_shipped(address: str, tmp_path: Path) -> None:
    done = run_on(address, tmp_path, QUICKSTART.read_text())
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert [trial["status"] for trial in trials] == ["finished"] * 35
    private = [trial for trial in trials if trial["private"]]
    assert len(private) == 30
    assert all(7.9 < trial["epsilon"] <= 8.0 for trial in private)
    assert all(trial["median_example_epsilon"] < trial["epsilon"] for trial in private)
    assert {trial["tuning"] for trial in trials} == {"unaccounted"}
    assert {trial["composed"]["sweep"]["candidates"] for trial in private} == {12}
    served: dict[str, list[float]] = {}
    for trial in private:
        served.setdefault(trial["labels"]["clipping"], []).append(trial["worst_group_accuracy"])
    assert max(served, key=lambda clipping: sum(served[clipping])) == "dpsgd_f"


@pytest.mark.long
def test_another_token_is_refused_in_words(address: str, tmp_path: Path) -> None:
    done = run_on(address, tmp_path, SWEEP, RAY_AUTH_TOKEN="b2" * 32)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"the Ray cluster at '{address}' requires a token" in line
    assert not (tmp_path / "out").exists()


def test_a_head_that_never_answers_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpsweep.orchestration.execution.cluster._ANSWER_WITHIN", 1.0)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    with mute() as address:
        reason = f"no Ray cluster answers at '{address}' \\(.* takes connections, but has not answered within 1 s\\)"
        with pytest.raises(InvalidInput, match=reason), connected(address, tmp_path / "log"):
            raise AssertionError("nothing answers")


NOTES = """
import math, pathlib, uuid
import ray
from torch import nn


class Notes(nn.Linear):
    def forward(self, x):
        if self.training and not hasattr(self, "noted"):
            self.noted = True
            if ray.is_initialized():
                context = ray.get_runtime_context()
                place = context.get_node_labels().get("pool", "") + " " + str(context.get_assigned_resources())
                (pathlib.Path({notes!r}) / uuid.uuid4().hex).write_text(place)
        return super().forward(x)


def build(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), Notes(math.prod(feature_shape), num_classes))
"""
"""A model that notes, when it is trained or checked by Ray, on which node and with what."""
ON_A100 = {"when": {"clipping": "flat"}, "gpus": 0.5, "labels": {"pool": "train", "ray.io/accelerator-type": "A100"}}


@pytest.mark.long
def test_each_setting_trains_on_what_it_asks_for(address: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "notes_model.py").write_text(NOTES.replace("{notes!r}", repr(str(notes))))
    text = small(
        model="notes_model:build",
        clipping=["none", "flat"],
        noise="constant",
        seeds=0,
        epochs=1,
        resources=[ON_A100, {"cpus": 1}],
        execution={"device": "cpu", "allow_cpu": True},
    )
    done = run_on(address, tmp_path, text)
    assert done.returncode == 0, done.stderr
    found = {note.read_text() for note in notes.iterdir()}  # several of each: checks before training copy the model
    assert len(found) == 2, "the baseline and the private trial"
    (on_gpu,) = [note for note in found if "'GPU': 0.5" in note]
    assert on_gpu.startswith("train "), found
    (other,) = [note for note in found if note != on_gpu]
    assert other.startswith("account "), "off the node with a GPU, as another one can run it"


ON_NODES = small(
    model="notes_model:build",
    clipping="flat",
    noise="constant",
    seeds=0,
    epochs=2,
    execution={"device": "cpu"},
    resources={"cpus": 2, "ranks": 2, "ranks_on": "nodes"},
)


@pytest.mark.long
def test_a_trial_has_ranks_on_two_nodes(address: str, tmp_path: Path) -> None:
    """With the bits of as many ranks on one node. `python -m tests.hosts ranks` does so between hosts, and loses one.

    Neither node has two CPUs, and it is not kept off the one with a GPU.
    """
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "notes_model.py").write_text(NOTES.replace("{notes!r}", repr(str(notes))))
    done, files = run_on(address, tmp_path, ON_NODES), SweepFiles(str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert {note.read_text().split()[0] for note in notes.iterdir()} == {"account", "train"}
    sweep = parse_sweep(ON_NODES)
    (planned,) = plan_sweep(sweep, permitted(sweep, tmp_path)).trials
    assert ended(started({"again": planned.spec}, tmp_path, 2)) == [0, 0]
    there, here = files.trial(planned.key), TrialFiles(str(tmp_path / "again"))
    models = [torch.load(found.model, weights_only=True) for found in (there, here)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert read_trace(there.trace) == read_trace(here.trace)
    (tmp_path / "more").mkdir()
    more = run_on(address, tmp_path / "more", small(resources={"cpus": 3, "ranks": 3, "ranks_on": "nodes"}))
    assert more.returncode == 2
    assert "a trial has 3 ranks on nodes that have room for 2 together" in more.stderr


@pytest.mark.long
def test_a_label_that_no_node_has_is_refused_in_words(address: str, tmp_path: Path) -> None:
    section = {**ON_A100, "labels": {"ray.io/accelerator-type": "H100"}}
    done = run_on(address, tmp_path, small(resources=[section, {}]))
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "a trial with clipping flat reserves 1 CPU and 0.5 GPU and 1 label ray.io/accelerator-type=H100" in line
    assert json.loads(done.stdout or "{}") == {}


@pytest.mark.long
def test_a_node_with_other_versions_is_refused_in_one_line(address: str, tmp_path: Path) -> None:
    """What is installed is read from the packages' metadata, here from some that stand before them on this side."""
    for name, version in (("dpsweep", "0.0.9"), ("torch", "2.11.0")):
        folder = tmp_path / "installed" / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    done = run_on(address, tmp_path, small(seeds=0), PYTHONPATH=str(tmp_path / "installed"))
    assert done.returncode == 2
    first, *others = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(
        r"node .* has dpsweep .* \(0\.0\.9 here\), torch .* \(2\.11\.0 here\); install the same versions", first
    )
    assert len(others) == 2, "a line for each node"


WHERE = """
import os
import sys
from torch import nn
{helper}

def where(feature_shape, num_classes, note):
    with open(note, "a") as out:
        print(__file__, helper.__file__, os.environ.get("PYTHONPATH", ""), sep="|", file=out)
    return nn.Sequential(nn.Flatten(), nn.Linear(feature_shape[-1] ** 2, num_classes))
"""


@pytest.mark.long
def test_allowed_code_from_elsewhere_reaches_the_workers(address: str, tmp_path: Path) -> None:
    """The workers have their own copy of it, and not by PYTHONPATH; a resumed sweep needs the allowance again."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "sweeps"
    package = elsewhere / "elsewhere_models"
    package.mkdir(parents=True)
    folder.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").touch()
    (package / "nets.py").write_text(WHERE.replace("{helper}", "from elsewhere_models import helper"))
    (elsewhere / "alone.py").write_text(WHERE.replace("{helper}", "helper = os"))
    notes = {"elsewhere_models.nets": tmp_path / "module", "../elsewhere/alone.py": tmp_path / "file"}
    models = [{"name": f"{location}:where", "note": str(note)} for location, note in notes.items()]
    sweep = small(clipping="flat", noise="constant", seeds=0, model=models)
    path = {"PYTHONPATH": f"{elsewhere}:{os.environ.get('PYTHONPATH', '')}"}
    allow = ("--allow-code", "elsewhere_models", "--allow-code", elsewhere / "alone.py")
    refused = run_on(address, folder, sweep, *allow[:2], **path)
    assert refused.returncode == 2
    assert "add --allow-code" in refused.stderr
    assert not any(note.exists() for note in notes.values())
    done = run_on(address, folder, sweep, *allow, **path)
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert [trial["status"] for trial in trials] == ["finished", "finished"]
    for note in notes.values():
        here, there = note.read_text().splitlines()[0], note.read_text().splitlines()[-1]
        assert here.startswith(str(elsewhere))
        assert "py_modules_files" in there.split("|")[0], there
        assert str(elsewhere) not in there
    shutil.rmtree(folder / "out" / "trials" / trials[0]["key"])
    resumed = run_on(address, folder, sweep, *allow, **path)
    assert resumed.returncode == 0, resumed.stderr
    assert run_on(address, folder, sweep, **path).returncode == 2


def test_only_the_lines_with_the_text_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with stderr_without(b"level"):
        os.write(2, b"one\nthe level is set\ntwo")
        os.write(2, b"three\n")
    os.write(2, b"the level after the block\n")
    assert capfd.readouterr().err == "one\ntwothree\nthe level after the block\n"


def test_what_is_said_before_a_crash_is_seen() -> None:
    code = """
import os, time
from dpsweep.orchestration.execution.cluster import stderr_without
with stderr_without(b"level"):
    os.write(2, b"the level is set\\nthe reason\\n")
    time.sleep(0.5)
    os.abort()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -6
    assert done.stderr == "the reason\n"


SCRIPT = """
import os, signal, sys
from dpsweep.orchestration.execution.session import told_if_killed
with told_if_killed("the same command continues"):
    exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("os._exit(1)", 1, True),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, True),
        ("pass", 0, False),
        ("raise SystemExit(3)", 3, False),
    ],
)
def test_only_an_end_by_force_is_told(ending: str, code: int, told: bool) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, ending], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "the same command continues\n" if told else "")


def test_ray_takes_no_signal_while_it_connects() -> None:
    """Its handler would end a command with exit code 15, and without a word."""
    mine = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        handler = signal.getsignal(signal.SIGTERM)
        with _sigterm_handler_kept():
            ray_utils.set_sigterm_handler(lambda number, frame: None)  # type: ignore[no-untyped-call]
            assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, mine)
