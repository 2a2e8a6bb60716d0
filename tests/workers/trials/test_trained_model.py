"""A trained model read back from its folder does what the trial's evaluation did, and runs nothing that is stored."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.data import Source, load_dataset
from dpsweep.workers.own_code.imports import NO_CODE, UserCode
from dpsweep.workers.spec import Component, DataSpec, TrialSpec
from dpsweep.workers.trials.trained_model import load_model, load_trained
from dpsweep.workers.trials.trial import run_trial
from tests.workers.devices import NAME
from tests.workers.trial_specs import DROPOUT_NET, TUMOURS, small_trial, tumours
from tests.workers.user_modules import allowed

HERE = allowed(__file__)
CASES: dict[str, tuple[dict[str, Any], UserCode]] = {
    "plain": ({}, NO_CODE),
    "dp_pca": ({"preprocessing": Component("dp_pca", {"dimensions": 6, "noise_multiplier": 4.0})}, NO_CODE),
    "averaged": ({"averaging": Component("ema")}, NO_CODE),
    "secret noise": (
        {"preprocessing": Component("dp_pca", {"dimensions": 6}), "noise_source": "os_entropy"},
        NO_CODE,
    ),
    "pictures": ({"data": DataSpec("digits"), "model": Component("mlp", {"hidden": [8]})}, NO_CODE),
    "own model": ({"model": DROPOUT_NET}, allowed(DROPOUT_NET.name.partition(":")[0])),
    "own preparation": ({"data": DataSpec(f"{__file__}:halved")}, HERE),
}


def halved() -> Source:
    """Tumours whose preparation is code."""
    source = tumours()
    names, train = source.class_names, source.train
    return Source("halved", train, None, source.group_names, names, lambda features: features.float() / 2.0)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """As trials are evaluated: sums in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("changes", "code"), CASES.values(), ids=CASES)
def test_predictions_are_those_of_the_evaluation(tmp_path: Path, changes: dict[str, Any], code: UserCode) -> None:
    spec = small_trial(epochs=1, **changes)
    stored = run_trial(spec, str(tmp_path), code=code).evaluation
    test = load_dataset(spec.data, code).test
    logits = load_trained(TrialFiles(str(tmp_path)), spec, code).logits(test.features.numpy())
    assert logits.dtype == np.float32
    assert (logits.argmax(1) == test.labels.numpy()).mean() == stored.accuracy
    losses = functional.cross_entropy(torch.from_numpy(logits), test.labels, reduction="none")
    # The stored model predicts on the CPU.
    assert losses.double().mean().item() == pytest.approx(stored.loss, rel=0.0 if NAME == "cpu" else 1e-6, abs=0.0)


class TestWithoutTheDataAndTheCode:
    @pytest.fixture(scope="class")
    @staticmethod
    def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrialFiles, TrialSpec]:
        files = TrialFiles(str(tmp_path_factory.mktemp("trial")))
        spec = small_trial(epochs=1)
        run_trial(spec, files.root)
        return files, spec

    def test_named_sources_are_not_read_again(
        self, trained: tuple[TrialFiles, TrialSpec], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unread(*arguments: object) -> None:
            raise AssertionError("data were read")

        monkeypatch.setattr("dpsweep.workers.trials.trained_model.load_source", unread)
        assert load_trained(*trained).logits(np.zeros((3, 30))).shape == (3, 2)
        assert load_trained(*trained).logits(np.zeros((0, 30))).shape == (0, 2)

    @pytest.mark.parametrize(
        "forged",
        [
            {"example_shape": 3},
            {"example_type": "load"},
            {"feature_shape": [-1]},
            {"num_classes": "2"},
            {"offered": None},
            {"fitted": {"projection": 3}},
            {"preparation": None},
            {"preparation": {"name": "evil"}},
            {"preparation": {"name": "scaling", "offset": [0.0] * 7, "scale": [1.0]}},
        ],
    )
    def test_forged_inputs_are_damage(
        self, trained: tuple[TrialFiles, TrialSpec], forged: dict[str, Any], tmp_path: Path
    ) -> None:
        copied = shutil.copytree(trained[0].root, tmp_path / "trial")
        torch.save({**torch.load(copied / "inputs.pt"), **forged}, copied / "inputs.pt")
        reading_a_file = replace(trained[1], data=DataSpec("csv", {"path": "/absent.csv", "label": "x"}))
        with pytest.raises(DataCorruption, match=r"inputs\.pt is damaged; restore it"):
            load_trained(TrialFiles(str(copied)), reading_a_file)

    def test_own_code_needs_permission(self, tmp_path: Path) -> None:
        spec = small_trial(epochs=1, model=DROPOUT_NET)
        run_trial(spec, str(tmp_path), code=CASES["own model"][1])
        with pytest.raises(InvalidInput, match="not among the code that may be run; if you trust it, name its"):
            load_model(TrialFiles(str(tmp_path)), spec)

    @pytest.mark.parametrize(
        ("examples", "message"),
        [
            (np.zeros((3, 29)), r"shape \(3, 29\) and type float64, but must be numbers of shape \[n, 30\]"),
            (np.zeros(30), r"shape \(30,\)"),
            (np.full((3, 30), "a"), "type <U1"),
            (
                np.full((3, 30), np.nan),
                r"NaN, infinity or numbers beyond the range of torch\.float32",
            ),
            (np.full((3, 30), 1e300), "numbers beyond the range"),
        ],
    )
    def test_other_examples_are_refused(
        self, trained: tuple[TrialFiles, TrialSpec], examples: Any, message: str
    ) -> None:
        with pytest.raises(InvalidInput, match=message):
            load_trained(*trained).logits(examples)

    def test_other_parameters_are_refused(self, trained: tuple[TrialFiles, TrialSpec]) -> None:
        with pytest.raises(InvalidInput, match="does not fit the model 'mlp': its code or its parameters have changed"):
            load_model(trained[0], small_trial(model=Component("mlp")))


def test_pixels_that_were_scaled_already_are_refused(tmp_path: Path) -> None:
    trial = small_trial(epochs=1, data=DataSpec(f"{__file__}:bytes_of_pixels"))
    run_trial(trial, str(tmp_path), code=HERE)
    with pytest.raises(InvalidInput, match=r"numbers that torch\.uint8 does not; give .* not yet scaled"):
        load_trained(TrialFiles(str(tmp_path)), trial, HERE).logits(np.full((2, 1, 4, 4), 0.5))


def bytes_of_pixels() -> Source:
    from dpsweep.workers.data import make_split

    images = np.random.default_rng(0).integers(0, 256, (60, 1, 4, 4), dtype=np.uint8)
    return Source("pixels", make_split(images, np.arange(60) % 2), None, ("a", "b"), ("a", "b"))


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("damage", ["cut", "another pickle", "a list", "code"])
@pytest.mark.parametrize("name", ["model", "inputs"])
def test_a_damaged_file_is_one_line_and_runs_nothing(tmp_path: Path, name: str, damage: str) -> None:
    files, spec, marker = TrialFiles(str(tmp_path / "trial")), small_trial(epochs=1), tmp_path / "marker"
    run_trial(spec, files.root)
    file = Path(getattr(files, name))
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "another pickle":
        file.write_bytes(pickle.dumps([1, 2]))
    elif damage == "a list":
        torch.save([1, 2], file)
    else:
        torch.save({"weight": Malicious(marker)}, file)
    with pytest.raises(DataCorruption, match=rf"{file.name} is damaged; restore it from a backup, or delete") as raised:
        load_trained(files, spec)
    assert len(str(raised.value).splitlines()) == 1
    assert not marker.exists()
    file.unlink()
    with pytest.raises(InvalidInput, match="does not exist: the trial has not trained to its end"):
        load_trained(files, spec)


def test_the_files_of_a_public_model_hold_no_statistics_of_the_rows(tmp_path: Path) -> None:
    """A user's own scaling may be the rows' mean: it is read from the source again, not stored."""
    spec = small_trial(epochs=1, data=DataSpec(f"{__file__}:centred"))
    run_trial(spec, str(tmp_path), code=HERE)
    stored = torch.load(TrialFiles(str(tmp_path)).inputs, weights_only=True)
    assert stored["preparation"] is None
    plain = small_trial(epochs=1, data=TUMOURS)
    run_trial(plain, str(tmp_path / "plain"))
    kept = torch.load(TrialFiles(str(tmp_path / "plain")).inputs, weights_only=True)
    assert kept["preparation"] == {"name": "scaling", "offset": [0.0], "scale": [1.0]}


def centred() -> Source:
    from dpsweep.workers.data import Scaling

    source = tumours()
    mean = float(source.train.features.mean())
    return Source("centred", source.train, None, source.group_names, source.class_names, Scaling((mean,)))
