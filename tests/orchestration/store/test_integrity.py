"""`dpsweep report` on a trial with damaged, missing or older files, private and public ones."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dpsweep.accounting.errors import DataCorruption
from dpsweep.accounting.records.files import digest_of, read_bytes
from dpsweep.accounting.records.sealed import read_sealed, write_private_sealed
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.completion import Times, complete_trial
from dpsweep.orchestration.pipeline import render_again
from dpsweep.orchestration.store.integrity import met_other_data, write_public_reports
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.results import TrialResult, read_result
from dpsweep.orchestration.sweeps.manifest import new_manifest, write_manifest
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.workers.trials.trial import run_trial
from tests.orchestration import own_people
from tests.orchestration.invoking import invoked, refused
from tests.orchestration.sample_grids import small


class Trained(NamedTuple):
    files: TrialFiles
    complete: Callable[[], object]


@pytest.fixture
def trial(trained: Trained) -> TrialFiles:
    """The one trial of a sweep that is complete in ``tmp_path``, but for MLflow."""
    trained.complete()
    return trained.files


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """The one trial of a sweep in ``tmp_path``, which is not accounted yet."""
    own_people.store(tmp_path / "people.npy", 41_000.0)
    text = small(
        data={"name": f"{own_people.__file__}:people", "path": str(tmp_path / "people.npy")},
        model="logistic",
        clipping={"name": "flat", "bound": 1.0},
        noise="constant",
        sampling={"method": "poisson", "batch_size": 20},
        seeds=0,
        release="private",
    )
    sweep, files = parse_sweep(text), SweepFiles(str(tmp_path))
    write_manifest(files, new_manifest(sweep, text))
    code = permitted(sweep, tmp_path, [own_people.__file__])
    (planned,) = plan_sweep(sweep, code).trials
    found = files.trial(planned.spec.key)
    run_trial(planned.spec, found.root, code=code, releases=planned.releases)
    return Trained(found, partial(complete_trial, planned, found, sweep, Times(0.0, 1.0)))


def test_a_forged_fingerprint_of_data_is_damage(tmp_path: Path) -> None:
    trial = SweepFiles(str(tmp_path)).trial("flat")
    for forged in (b"{}", b'{"data": 1}'):
        write_private_sealed(trial.data_fingerprint, forged)
        with pytest.raises(DataCorruption, match="holds no fingerprint of data"):
            met_other_data(trial, "0")


def test_digests_of_private_files_are_private(trial: TrialFiles, tmp_path: Path) -> None:
    result = read_result(trial.result)
    assert isinstance(result, TrialResult)
    assert set(result.digests) == {
        "spec.json",
        "trace.arrow",
        "model.pt",
        "inputs.pt",
        "training.json",
        "device.json",
        "released.json",
        f"code{own_people.__file__}",
    }
    private = json.loads(read_sealed(trial.private_digests, "") or b"")
    assert set(private) == {
        f"private/{name}"
        for name in (
            *("data.json", "norms/complete.json", "epsilons/manifest.jsonl"),
            *("summary.json", "training.json", "outcomes.ipc"),
        )
    }
    assert stat.S_IMODE(Path(trial.private_digests).stat().st_mode) == 0o600
    assert not any(digest in Path(trial.result).read_text() for digest in private.values())


def test_damage_between_training_and_accounting_is_noticed(trained: Trained, tmp_path: Path) -> None:
    """The worker notes the digests of what it writes, and nobody reads a model again to compute them."""
    files = trained.files
    intact = {uri: Path(uri).read_bytes() for uri in (files.model, files.outcomes)}
    for uri, content in intact.items():
        Path(uri).write_bytes(content[:-1] + b"?")
    trained.complete()
    with pytest.raises(DataCorruption, match=rf"{files.model}: its sha256 differs(.|\n)*{files.outcomes}: its sha256"):
        render_again(str(tmp_path))
    for uri, content in intact.items():
        Path(uri).write_bytes(content)
    render_again(str(tmp_path))
    Path(files.result).unlink()
    Path(files.private_digests).write_text("damaged")
    trained.complete()
    render_again(str(tmp_path))


def test_report_notices_damage_to_private_and_public_files(trial: TrialFiles, tmp_path: Path) -> None:
    render_again(str(tmp_path))
    for uri in (trial.model, trial.training, trial.private_training, f"{trial.norms}/complete.json"):
        intact = Path(uri).read_bytes()
        Path(uri).write_bytes(intact[:-1])
        with pytest.raises(DataCorruption, match=rf"{uri}: its sha256 differs .*; restore .* or delete"):
            render_again(str(tmp_path))
        Path(uri).write_bytes(intact)
    digests = Path(trial.private_digests)
    digests.write_text(digests.read_text().replace("0", "1"))
    with pytest.raises(DataCorruption, match=rf"{digests} is damaged.*; delete {trial.result} and resume"):
        render_again(str(tmp_path))
    digests.unlink()
    with pytest.raises(DataCorruption, match=rf"{digests} is missing; .* delete {trial.result} and resume"):
        render_again(str(tmp_path))


def test_verify_notices_damage_to_the_report_and_its_tables(trial: TrialFiles, tmp_path: Path) -> None:
    render_again(str(tmp_path))
    files = SweepFiles(str(tmp_path))
    assert invoked("verify", tmp_path).exit_code == 0
    for uri in (files.report, files.results, files.comparison, files.private_report):
        written = Path(uri).read_bytes()
        for changed in (written.replace(b"a", b"e", 1), None):
            Path(uri).unlink() if changed is None else Path(uri).write_bytes(changed)
            damaged = invoked("verify", tmp_path).exception
            assert isinstance(damaged, DataCorruption)
            assert str(damaged).startswith(f"{uri}: it")
            assert str(damaged).endswith(f"`dpsweep report {tmp_path}` writes it again")
        Path(uri).write_bytes(written)
    Path(files.report).write_text("")
    Path(files.report_digests).write_text("damaged")
    assert refused(DataCorruption, "verify", tmp_path).startswith(f"{files.report_digests} is damaged")
    render_again(str(tmp_path))
    assert invoked("verify", tmp_path).exit_code == 0


def test_no_file_of_the_report_is_read_to_note_its_digest(
    trial: TrialFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SweepFiles(str(tmp_path))
    written = (files.report, files.results, files.comparison, files.private_report)

    def refusing(read: Callable[[str], Any]) -> Callable[[str], Any]:
        def refused(uri: str) -> Any:
            assert uri not in written, f"{uri} is read back"
            return read(uri)

        return refused

    with monkeypatch.context() as patch:
        patch.setattr("dpsweep.accounting.records.sealed.read_bytes", refusing(read_bytes))
        patch.setattr("dpsweep.orchestration.store.integrity.digest_of", refusing(digest_of))
        render_again(str(tmp_path))
    assert invoked("verify", tmp_path).exit_code == 0
    Path(files.results).write_text("[]")
    write_public_reports(files, {files.report: b"a page that grows"}, sensitive=False)
    (line,) = refused(DataCorruption, "verify", tmp_path).splitlines()
    assert line.startswith(f"{files.results}: its sha256 differs"), "what was noted of other files stays"
