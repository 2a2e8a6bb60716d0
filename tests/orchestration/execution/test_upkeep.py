"""`dpsweep verify` names what is damaged; `dpsweep prune --norms` deletes only norms that are no longer needed."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.files import list_files
from dpsweep.accounting.records.sealed import write_private
from dpsweep.orchestration.execution.completion import Times, complete_trial
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.manifest import new_manifest, write_manifest
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.trials.trial import run_trial
from tests.orchestration.invoking import invoked, printed, refused
from tests.orchestration.sample_grids import keys_of, small

TEXT = small(
    data={"name": "digits", "keep": dict.fromkeys(range(10), 0.1)},
    sampling={"method": "poisson", "batch_size": 16},
    clipping={"name": "flat", "bound": 1.0},
    noise="constant",
    seeds=[0, 1],
    model="logistic",
    epochs=1,
)
"""Of few steps, where `pld` takes long for each example, and few examples."""
KEYS = list(keys_of(TEXT).values())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SweepFiles:
    return trained_sweep(tmp_path_factory.mktemp("trained") / "out", TEXT)


@pytest.fixture
def files(trained: SweepFiles, tmp_path: Path) -> SweepFiles:
    """A sweep of two accounted trials, the first of which ended ten days ago."""
    return SweepFiles(str(shutil.copytree(trained.root, tmp_path / "out")))


def trained_sweep(folder: Path, text: str) -> SweepFiles:
    """A sweep of two accounted trials in the folder, as `files`."""
    sweep, files = parse_sweep(text), SweepFiles(str(folder))
    write_manifest(files, new_manifest(sweep, text))
    for planned, days in zip(plan_sweep(sweep).trials, (10.0, 0.0), strict=True):
        run_trial(planned.spec, files.trial(planned.key).root, releases=planned.releases)
        ended = time.time() - days * 86_400.0
        complete_trial(planned, files.trial(planned.key), sweep, Times(ended - 1.0, ended))
    return files


def test_verify_names_every_damaged_file_of_every_trial(files: SweepFiles) -> None:
    assert "2 trained trials: every file is as it was" in printed("verify", files.root)
    for key in KEYS:
        shard = next(Path(files.trial(key).norms).glob("*/*.arrow"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    damaged = invoked("verify", files.root, "--json")
    found = json.loads(damaged.stdout)
    assert found["trials"] == 2
    assert [key in line and "sha256" in line for key, line in zip(KEYS, found["damaged"], strict=True)] == [True, True]
    assert isinstance(damaged.exception, DataCorruption)


def test_verify_reads_the_files_of_the_tuning_too(files: SweepFiles) -> None:
    tuning = SweepFiles(str(shutil.copytree(files.root, f"{files.root}-copy")))
    shutil.move(tuning.root, files.tuning)
    said = printed("verify", files.root)
    assert said.startswith("2 trained trials and 2 of the tuning: every file is as it was")
    model = Path(files.of_tuning.trial(KEYS[1]).model)
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    Path(files.of_tuning.report_digests).write_text("damaged")
    lines = refused(DataCorruption, "verify", files.root).splitlines()
    assert [line.split()[0].strip(":") for line in lines] == [str(model), f"{files.tuning}/digests.json"]


def test_prune_deletes_norms_and_nothing_else(files: SweepFiles) -> None:
    before = {key: read_epsilons(files.trial(key).epsilons) for key in KEYS}
    for key in KEYS:
        write_private(f"{files.trial(key).rows_by_user}/part-00000.arrow", b"of an accounting that was killed")
    assert "give --norms" in refused(InvalidInput, "prune", files.root)
    old = printed("prune", files.root, "--norms", "--older-than", "5", "--json")
    assert json.loads(old) == {"pruned": KEYS[:1]}
    assert [bool(list_files(files.trial(key).norms)) for key in KEYS] == [False, True]
    assert [Path(files.trial(key).rows_by_user).exists() for key in KEYS] == [False, True]
    rest = printed("prune", files.root, "--norms")
    assert f"deleted the norms of {KEYS[1]}" in rest
    assert "can no longer be accounted" in rest.replace("\n", " ")
    assert "nothing was deleted" in printed("prune", files.root, "--norms")
    for key in KEYS:
        assert (read_epsilons(files.trial(key).epsilons).upper == before[key].upper).all()
    assert invoked("verify", files.root).exit_code == 0, "what was deleted as a whole is not missed"


def test_prune_keeps_the_norms_of_a_trial_with_damaged_epsilons(files: SweepFiles) -> None:
    part = next(Path(files.trial(KEYS[0]).epsilons).glob("*.arrow"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    refused(DataCorruption, "prune", files.root, "--norms")
    assert list_files(files.trial(KEYS[0]).norms)
