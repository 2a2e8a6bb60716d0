"""One contract for every data source, and golden counts of the real ones."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import SOURCES, Dataset, Source, Split, describe, load_dataset, load_source
from dpsweep.workers.data.base import cut
from dpsweep.workers.spec import DataSpec
from tests.known import known
from tests.workers.data_folders import (
    make_cifar_jpegs,
    make_fashion,
    make_image_folder,
    make_listed_images,
    make_masks,
    make_table,
    make_utkface,
)

BUNDLED = ("digits", "breast_cancer")
STORED = {
    "adult": "adult/adult.data",
    "breast_cancer_wisconsin": "breast-cancer-wisconsin/breast-cancer-wisconsin.data",
    "dutch": "dutch/dutch.csv",
    "mnist": "MNIST/raw/train-images-idx3-ubyte.gz",
}
MADE = ("csv", "parquet", "cifar10", "fashion_mnist", "image_folder", "image_masks", "image_table", "utkface")


def require_stored(name: str, path: str | None = None) -> None:
    path = path or STORED[name]
    root = os.environ.get("DPSWEEP_DATA")
    if root is None:
        pytest.skip(f"{name} needs real data: set DPSWEEP_DATA to a folder that holds {path}")
    if not (Path(root) / path).exists():
        pytest.skip(f"{name} needs real data: DPSWEEP_DATA has no {path}")


@pytest.fixture(scope="module", params=(*BUNDLED, *STORED, *MADE))
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    name: str = request.param
    if name in STORED:
        require_stored(name)
    folder = tmp_path_factory.mktemp(name)
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "csv": lambda: {
            "path": str(make_table(folder / "people.csv")),
            "label": "income",
            "group": "sex",
            "user": "id",
        },
        "parquet": lambda: {"path": str(make_table(folder / "people.parquet")), "label": "income"},
        "cifar10": lambda: {"root": str(make_cifar_jpegs(folder))},
        "fashion_mnist": lambda: {"root": str(make_fashion(folder))},
        "image_folder": lambda: {"path": str(make_image_folder(folder)), "size": 8},
        "image_masks": lambda: {
            "path": str(make_masks(folder)),
            "classes": ["ground", "disc", "edge"],
            "values": [0, 1, 255],
        },
        "image_table": lambda: {"path": str(make_listed_images(folder)), "image": "file", "label": "y", "user": "who"},
        "utkface": lambda: {"root": str(make_utkface(folder)), "size": 8},
    }
    params = makers[name]() if name in makers else {}
    return DataSpec(name, params, public_fraction=0.1)


@pytest.fixture(scope="module")
def source(spec: DataSpec) -> Source:
    return load_source(spec)


@pytest.fixture(scope="module")
def dataset(source: Source, spec: DataSpec) -> Dataset:
    return cut(source, spec)


def splits(dataset: Dataset) -> list[Split]:
    return [dataset.train, dataset.test, known(dataset.public)]


def rows_by_id(dataset: Dataset) -> dict[int, tuple[int, int, float]]:
    """Label, group and sum of the features of every example, training and test, by its id."""
    return {
        int(example): (int(label), int(group), float(total))
        for part in (dataset.train, dataset.test)
        for example, label, group, total in zip(
            part.example_ids, part.labels, part.groups, part.features.double().sum(1), strict=True
        )
    }


class TestEverySource:
    def test_ids_are_unique_over_all_splits(self, dataset: Dataset) -> None:
        ids = torch.cat([split.example_ids for split in splits(dataset)])
        assert len(ids.unique()) == len(ids)
        assert ids.min() >= 0

    def test_labels_and_groups_index_their_names(self, dataset: Dataset) -> None:
        for split in splits(dataset):
            assert len(split) > 0
            assert split.labels.min() >= 0
            assert split.labels.max() < dataset.num_classes
            assert split.groups.min() >= 0
            assert split.groups.max() < dataset.num_groups
        assert len(set(dataset.group_names)) == dataset.num_groups
        assert len(set(dataset.class_names)) == dataset.num_classes

    def test_prepared_features_are_finite_floats_of_moderate_size(self, dataset: Dataset) -> None:
        for split in splits(dataset):
            prepared = dataset.prepare(split.features[:256])
            assert prepared.dtype == torch.float32
            assert prepared.isfinite().all()
            assert prepared.abs().max() < 10.0
            assert tuple(prepared.shape[1:]) == dataset.feature_shape

    def test_features_follow_their_ids_through_every_cut(self, source: Source, dataset: Dataset) -> None:
        stored = [source.train] if source.test is None else [source.train, source.test]
        place = {int(i): (part, at) for part in stored for at, i in enumerate(part.example_ids)}
        for split in splits(dataset):
            for at in (0, len(split) // 2, len(split) - 1):
                part, origin = place[int(split.example_ids[at])]
                assert torch.equal(split.features[at], part.features[origin])
                assert torch.equal(split.labels[at], part.labels[origin])
                assert split.groups[at] == part.groups[origin]

    def test_loads_the_same_twice(self, spec: DataSpec, dataset: Dataset) -> None:
        again = load_dataset(spec)
        for one, other in zip(splits(dataset), splits(again), strict=True):
            assert torch.equal(one.example_ids, other.example_ids)
            assert torch.equal(one.labels, other.labels)
            assert torch.equal(one.features, other.features)

    def test_description_agrees(self, dataset: Dataset) -> None:
        described = describe(dataset)
        assert described.train_size == len(dataset.train) == sum(described.group_sizes)
        assert described.test_size == len(dataset.test)
        assert described.group_names == dataset.group_names


def test_every_registered_source_is_under_the_contract() -> None:
    assert set(SOURCES) == {*BUNDLED, *STORED, *MADE, "text"}, "texts, whose features are tokens, in test_text.py"


def group_counts(dataset: Dataset) -> dict[str, int]:
    counts = Counter(torch.cat([dataset.train.groups, dataset.test.groups]).tolist())
    return {dataset.group_names[group]: count for group, count in counts.items()}


def test_a_data_set_is_described() -> None:
    described = describe(load_dataset(DataSpec("digits", keep={"8": 0.1})))
    assert described.group_sizes[8] == 13
    assert described.train_size == 1318
    assert described.feature_shape == (1, 8, 8)


class TestGoldenCounts:
    def test_digits(self) -> None:
        dataset = load_dataset(DataSpec("digits"))
        assert (len(dataset.train), len(dataset.test)) == (1438, 359)
        assert dataset.feature_shape == (1, 8, 8)

    def test_digits_are_those_that_scikit_learn_loads(self) -> None:
        found, expected = load_source(DataSpec("digits")).train, load_digits()
        np.testing.assert_array_equal(found.features.flatten(1), expected.data)
        np.testing.assert_array_equal(found.labels, expected.target)

    def test_breast_cancer_is_that_of_scikit_learn(self) -> None:
        found, expected = load_source(DataSpec("breast_cancer")).train, load_breast_cancer()
        columns = expected.data[:, :4]  # whose printed ranges are exact
        scaled = (columns - columns.min(axis=0)) / np.ptp(columns, axis=0)
        np.testing.assert_allclose(found.features[:, :4], scaled, atol=1e-6)
        np.testing.assert_array_equal(found.labels, expected.target)

    def test_breast_cancer(self) -> None:
        dataset = load_dataset(DataSpec("breast_cancer"))
        assert group_counts(dataset) == {"malignant": 212, "benign": 357}

    def test_breast_cancer_wisconsin_has_paper_c_sizes(self) -> None:
        require_stored("breast_cancer_wisconsin")
        dataset = load_dataset(DataSpec("breast_cancer_wisconsin", test_fraction=0.18))
        assert (len(dataset.train), len(dataset.test)) == (560, 123)
        assert group_counts(dataset) == {"benign": 444, "malignant": 239}
        assert int(dataset.train.example_ids.max()) > 682

    def test_adult_has_paper_d_sizes(self) -> None:
        require_stored("adult")
        dataset = load_dataset(DataSpec("adult"))
        assert (len(dataset.train), len(dataset.test)) == (30162, 15060)
        assert group_counts(dataset) == {"Male": 30527, "Female": 14695}
        assert dataset.feature_shape == (40,)
        labels = torch.cat([dataset.train.labels, dataset.test.labels])
        assert int(labels.sum()) == 11208

    def test_adult_can_be_split_anew_into_the_same_examples(self) -> None:
        require_stored("adult")
        published, one, other = (
            load_dataset(spec)
            for spec in (
                DataSpec("adult"),
                DataSpec("adult", {"split": "drawn"}, test_fraction=0.2),
                DataSpec("adult", {"split": "drawn"}, test_fraction=0.2, split_seed=1),
            )
        )
        assert (len(one.train), len(one.test)) == (36178, 9044)
        assert not torch.equal(one.test.example_ids, other.test.example_ids)
        assert rows_by_id(one) == rows_by_id(published)

    def test_adult_with_every_attribute_has_one_of_each_category(self) -> None:
        require_stored("adult")
        dataset = load_dataset(DataSpec("adult", {"exclude": [], "group": "race"}))
        assert dataset.feature_shape == (40 + 16 + 5 + 41,)
        assert dataset.group_names[4] == "White"
        one_hot = [values for values in dataset.train.features.T if set(values.unique().tolist()) <= {0.0, 1.0}]
        assert torch.stack(one_hot).sum(0).eq(7).all()

    def test_intersections_of_attributes_are_groups(self) -> None:
        require_stored("adult")
        sex, race, both = (
            load_dataset(DataSpec("adult", {"group": group})) for group in ("sex", "race", ["sex", "race"])
        )
        names = [
            f"{sex.group_names[s]} × {race.group_names[r]}"
            for s, r in zip(sex.test.groups, race.test.groups, strict=True)
        ]
        assert [both.group_names[group] for group in both.test.groups] == names
        assert len(both.group_names) == 10

    @pytest.mark.parametrize(
        ("group", "said"), [(["sex", "sex"], "several different"), ([], "one attribute"), (["sex", "age"], "'age'")]
    )
    def test_attributes_that_cannot_be_intersected_are_refused(self, group: list[str], said: str) -> None:
        with pytest.raises(InvalidInput, match=said):
            load_dataset(DataSpec("adult", {"group": group}))

    def test_dutch_has_paper_d_sizes(self) -> None:
        require_stored("dutch")
        dataset = load_dataset(DataSpec("dutch"))
        assert group_counts(dataset) == {"female": 30273, "male": 30147}
        assert dataset.feature_shape == (35,)
        assert dataset.train.features.sum(1).eq(8).all()

    def test_mnist_with_class_8_cut_to_500(self) -> None:
        require_stored("mnist")
        dataset = load_dataset(DataSpec("mnist", keep={"8": 500}))
        assert len(dataset.train) == 54649
        counts = np.bincount(dataset.train.groups.numpy())
        assert counts[8] == 500
        assert counts[2] == 5958
        assert len(dataset.test) == 10000

    @pytest.mark.long  # 60,000 pictures are read
    def test_cifar10_says_that_jpegs_are_not_the_original(self) -> None:
        require_stored("cifar10", "cifar10-jpeg/train.parquet")
        source = load_source(DataSpec("cifar10"))
        assert source.train.labels.bincount().tolist() == [5000] * 10
        assert len(known(source.test)) == 10000
        assert "JPEG" in source.notes[0]
