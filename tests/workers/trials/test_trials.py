"""Short private trials on every kind of data, with every loss and optimiser: nothing is only registered."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.nn import functional

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.traces import read_trace
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.spec import Component, DataSpec, ExecutionSpec, NoiseSpec, NormSpec, SamplingSpec, TrialSpec
from dpsweep.workers.tasks.losses import LOSSES, TASK_OF
from dpsweep.workers.training.optimizers import OPTIMIZERS
from dpsweep.workers.trials.trial import run_trial
from tests.workers.data_folders import make_cifar_jpegs, make_fashion, make_image_folder, make_table, make_utkface
from tests.workers.devices import NAME
from tests.workers.trial_specs import TUMOURS, small_trial
from tests.workers.user_modules import code_of

ONE_OF_EACH_CLASS: dict[str, float | int] = dict.fromkeys(
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"), 1
)
TABLE = {"label": "income", "features": ["age", "job"], "group": "sex", "user": "id"}

DATA: dict[str, Callable[[Path], DataSpec]] = {
    "csv": lambda folder: DataSpec("csv", {"path": str(make_table(folder / "people.csv")), **TABLE}),
    "parquet": lambda folder: DataSpec("parquet", {"path": str(make_table(folder / "people.parquet")), **TABLE}),
    "image folder": lambda folder: DataSpec("image_folder", {"path": str(make_image_folder(folder)), "size": 8}),
    "gender of faces": lambda folder: DataSpec("utkface", {"root": str(make_utkface(folder)), "size": 8}),
    "age of faces": lambda folder: DataSpec("utkface", {"root": str(make_utkface(folder)), "size": 8, "task": "age"}),
    "fashion": lambda folder: DataSpec("fashion_mnist", {"root": str(make_fashion(folder))}),
    "cifar": lambda folder: DataSpec("cifar10", {"root": str(make_cifar_jpegs(folder))}),
    "declared group without rows": lambda folder: DataSpec(
        "csv", {"path": str(make_table(folder / "people.csv")), **TABLE, "groups": ["f", "m", "x"]}
    ),
}


def _ten_pictures(folder: Path) -> DataSpec:
    return replace(DATA["cifar"](folder), keep=ONE_OF_EACH_CLASS)


DIGITS = DataSpec("digits", keep={str(digit): 4 for digit in range(10)})
MODELS_ON: dict[str, tuple[Component, Callable[[Path], DataSpec]]] = {
    "cancer_net": (Component("cancer_net"), lambda folder: TUMOURS),
    "cnn_dpsgdf": (Component("cnn_dpsgdf"), DATA["fashion"]),
    "cnn_papernot": (Component("cnn_papernot"), DATA["fashion"]),
    "logistic": (Component("logistic"), DATA["csv"]),
    "mlp": (Component("mlp"), lambda folder: DIGITS),
    "pca_mlp": (Component("pca_mlp"), DATA["fashion"]),
    "resnet20_gn": (Component("resnet20_gn"), _ten_pictures),
    "transformer": (Component("transformer"), DATA["fashion"]),
    "wide_resnet": (Component("wide_resnet", {"depth": 10, "width": 1}), _ten_pictures),
    "wrn16_4": (Component("wrn16_4"), _ten_pictures),
}
"""Each model of classes on the data that its paper trains it on; language models are tried by test_tasks.py."""


def train(spec: TrialSpec, root: Path) -> None:
    """Train, and check that every example of every snapshot is accounted for and the test set was evaluated."""
    result = run_trial(spec, str(root), code=code_of(spec))
    files = TrialFiles(str(root))
    shards = NormShards(files.norms)
    parts = [shards.read(part) for part in shards.parts]
    assert sum(len(part.example_ids) for part in parts) == result.train_size
    assert read_trace(files.trace).dataset_size == result.train_size
    assert sum(group.examples for group in result.evaluation.groups) == result.test_size
    assert math.isfinite(result.evaluation.loss)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("data", DATA.values(), ids=DATA.keys())
def test_every_kind_of_data(data: Callable[[Path], DataSpec], tmp_path: Path) -> None:
    norms = NormSpec(1.0, rows_per_part=50)
    execution = ExecutionSpec(device=NAME, micro_batch_size=16)
    (tmp_path / "data").mkdir()
    train(small_trial(data=data(tmp_path / "data"), norms=norms, execution=execution, epochs=1), tmp_path / "trial")


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", MODELS_ON)
def test_every_model_on_its_data(name: str, tmp_path: Path) -> None:
    model, data = MODELS_ON[name]
    preprocessing = Component("dp_pca", {"dimensions": 60}) if name == "pca_mlp" else None
    (tmp_path / "data").mkdir()
    spec = small_trial(data=data(tmp_path / "data"), model=model, preprocessing=preprocessing, epochs=1)
    train(replace(spec, sampling=SamplingSpec("poisson", 8), norms=NormSpec(1.0)), tmp_path / "trial")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("loss", [name for name in LOSSES if TASK_OF[name] == "classification"])
def test_every_loss(loss: str, tmp_path: Path) -> None:
    train(small_trial(loss=Component(loss), epochs=1), tmp_path)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer: str, tmp_path: Path) -> None:
    train(small_trial(optimizer=Component(optimizer, {"learning_rate": 0.01}), epochs=1), tmp_path)


class Unpooling(nn.Module):
    """Max pooling and back, of which torch has no deterministic algorithm on any device."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(feature_shape[0], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        pooled, where = functional.max_pool1d_with_indices(x[:, None], [2])
        output: Tensor = self.linear(functional.max_unpool1d(pooled, where, [2])[:, 0])
        return output


class Expansion(nn.Module):
    """Needs 128 TiB for every example."""

    def __init__(self, feature_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(feature_shape[0], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x + x.new_zeros(len(x), 1 << 45)[:, : x.shape[1]])
        return output


def test_an_operation_without_a_deterministic_algorithm_names_the_switch(tmp_path: Path) -> None:
    spec = small_trial(model=Component(f"{__file__}:Unpooling"), epochs=1)
    with pytest.raises(InvalidInput, match=r"unpool.* set execution.deterministic: false"):
        run_trial(spec, str(tmp_path / "deterministic"), code=code_of(spec))
    train(replace(spec, execution=replace(spec.execution, deterministic=False)), tmp_path / "other")


def test_too_little_memory_names_the_size_of_micro_batches(tmp_path: Path) -> None:
    spec = small_trial(model=Component(f"{__file__}:Expansion"), epochs=1)
    with pytest.raises(InvalidInput, match=r"execution.micro_batch_size: null .* set it lower"):
        run_trial(spec, str(tmp_path), code=code_of(spec))


def halved() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss of the user's own: half the cross-entropy, which is what half the learning rate makes of it."""
    return lambda logits, y: functional.cross_entropy(logits, y, reduction="none") / 2


def test_a_loss_of_the_users_own_trains_and_is_evaluated(tmp_path: Path) -> None:
    spec = small_trial(
        loss=Component(f"{__file__}:halved"), clipping=Component("none"), noise=NoiseSpec(0.0), noise_source="seeded"
    )
    twice = Component("sgd", {"learning_rate": 2 * spec.optimizer.params["learning_rate"], "momentum": 0.9})
    plain = replace(spec, loss=Component("cross_entropy"))
    ours = run_trial(replace(spec, optimizer=twice), str(tmp_path / "ours"), code=code_of(spec))
    theirs = run_trial(plain, str(tmp_path / "theirs"))
    assert ours.evaluation.accuracy == theirs.evaluation.accuracy
    assert ours.evaluation.loss == pytest.approx(theirs.evaluation.loss / 2, rel=1e-4)
    with pytest.raises(InvalidInput, match="not among the code that may be run"):
        run_trial(spec, str(tmp_path / "refused"))
