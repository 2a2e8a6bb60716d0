"""Reading files: tables, folders of pictures, idx, the user's own functions; and what is said when they are amiss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet
import pytest
import torch
from data_folders import (
    idx_bytes,
    make_cifar_batches,
    make_cifar_jpegs,
    make_fashion,
    make_image_folder,
    make_table,
    make_utkface,
)

from accounting.errors import DataCorruption, InvalidInput
from workers.data import load_dataset, load_source
from workers.data.files import locate
from workers.data.idx import read_idx
from workers.spec import DataSpec


class TestTable:
    def test_declared_columns_become_features(self, tmp_path: Path) -> None:
        path = tmp_path / "people.csv"
        csv.write_csv(pa.table({"age": [10, 30, 99], "job": ["b", "a", "?"], "y": ["no", "yes", "no"]}), path)
        source = load_source(
            DataSpec(
                "csv", {"path": str(path), "label": "y", "ranges": {"age": [0, 50]}, "categories": {"job": ["a", "b"]}}
            )
        )
        expected = [[0.2, 0.0, 1.0], [0.6, 1.0, 0.0], [1.0, 0.0, 0.0]]
        assert torch.allclose(source.train.features, torch.tensor(expected))
        assert source.train.labels.tolist() == [0, 1, 0]
        assert source.notes == ()

    def test_rows_with_missing_values_leave_their_id_unused(self, tmp_path: Path) -> None:
        path = make_table(tmp_path / "people.parquet")
        source = load_source(DataSpec("parquet", {"path": str(path), "label": "income", "features": ["age", "job"]}))
        assert len(source.train) == 119
        assert 5 not in source.train.example_ids
        assert any("1 rows with a missing value" in note for note in source.notes)

    def test_learning_from_the_rows_is_said(self, tmp_path: Path) -> None:
        path = make_table(tmp_path / "people.csv")
        params = {"path": str(path), "label": "income", "features": ["age", "job"], "ranges": {"age": [0, 100]}}
        (note, _) = load_source(DataSpec("csv", params)).notes
        assert "not private: ranges or categories of job" in note
        assert "age" not in note.split("were")[0].replace("ranges", "")

    def test_types_of_parquet(self, tmp_path: Path) -> None:
        columns = {
            "size": [1.0, float("nan"), 3.0, 5.0],
            "married": [True, False, None, False],
            "town": pa.array(["x", "y", "x", "y"]).dictionary_encode(),
            "y": pa.array([10, 2, 10, 2], pa.int8()),
        }
        parquet.write_table(pa.table(columns), tmp_path / "typed.parquet")
        source = load_source(DataSpec("parquet", {"path": str(tmp_path / "typed.parquet"), "label": "y"}))
        assert source.train.example_ids.tolist() == [0, 3]
        assert source.class_names == ("2", "10")
        assert source.train.features.tolist() == [[0.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0, 1.0]]

    def test_users_are_numbered(self, tmp_path: Path) -> None:
        path = make_table(tmp_path / "people.csv")
        source = load_source(DataSpec("csv", {"path": str(path), "label": "income", "user": "id", "group": "sex"}))
        assert source.train.user_ids is not None
        assert source.train.user_ids.unique().numel() == 30
        assert source.group_names == ("f", "m")

    def test_test_rows_have_ids_after_the_training_rows(self, tmp_path: Path) -> None:
        train, test = make_table(tmp_path / "a.csv"), make_table(tmp_path / "b.csv", 20)
        source = load_source(DataSpec("csv", {"path": str(train), "label": "income", "test_path": str(test)}))
        assert source.test is not None
        assert source.test.example_ids.min() == 120
        assert source.test.features.shape[1] == source.train.features.shape[1]

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"label": "incme"}, "no column 'incme'; did you mean 'income'"),
            ({"label": "income", "group": "gender"}, "no column 'gender'"),
            ({"label": "income", "ranges": {"agee": [0, 1]}}, "'agee' has a range.*did you mean 'age'"),
            ({"label": "income", "ranges": {"age": [5, 5]}}, "must be increasing"),
            ({"label": "income", "ranges": {"age": 5}}, "range of column 'age' is 5, but must be"),
            ({"label": "income", "ranges": {"age": [None, 5]}}, "two finite numbers"),
            ({"label": "income", "ranges": {"job": [0, 1]}}, "'job' has a range but holds text"),
            ({"label": "income", "categories": {"job": "clerk"}}, "categories of column 'job' are 'clerk'"),
            ({"label": "income", "features": ["income"]}, "also a feature"),
            ({"label": "income", "classes": ["high"]}, "label column 'income' has the value 'low'"),
            ({"label": "income", "colour": 1}, "unknown key 'colour'"),
            ({}, "needs label"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path: Path, params: dict[str, object], message: str) -> None:
        path = make_table(tmp_path / "people.csv")
        with pytest.raises(InvalidInput, match=message):
            load_source(DataSpec("csv", {"path": str(path), **params}))

    @pytest.mark.parametrize("name", ["damaged.csv", "damaged.parquet"])
    @pytest.mark.parametrize("content", [b"", b"a,b\n1\n", b"\x00\xff"])
    def test_a_damaged_file_is_named(self, tmp_path: Path, name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidInput, match=f"cannot read the table {tmp_path / name}"):
            load_source(DataSpec("csv", {"path": str(tmp_path / name), "label": "b"}))

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match=f"there is no {tmp_path}/nothing.csv"):
            load_source(DataSpec("csv", {"path": str(tmp_path / "nothing.csv"), "label": "y"}))


class TestImages:
    def test_pictures_are_resized_and_labelled_by_folder(self, tmp_path: Path) -> None:
        source = load_source(DataSpec("image_folder", {"path": str(make_image_folder(tmp_path)), "size": 6}))
        assert source.train.features.shape == (40, 3, 6, 6)
        assert source.class_names == ("cat", "dog")
        bright = source.train.features.float().mean((1, 2, 3)) > 100
        assert torch.equal(bright.long(), source.train.labels)

    def test_train_and_test_folders(self, tmp_path: Path) -> None:
        make_image_folder(tmp_path / "train")
        make_image_folder(tmp_path / "test", per_class=5)
        source = load_source(DataSpec("image_folder", {"path": str(tmp_path)}))
        assert source.test is not None
        assert (len(source.train), len(source.test)) == (40, 10)
        assert source.test.example_ids.tolist() == list(range(40, 50))

    def test_groups_from_a_file(self, tmp_path: Path) -> None:
        folder = make_image_folder(tmp_path / "pictures", per_class=3)
        names = [f"{name}/{index:02}.png" for name in ("cat", "dog") for index in range(3)]
        csv.write_csv(pa.table({"file": names, "group": ["x", "y", "y", "x", "x", "y"]}), tmp_path / "groups.csv")
        params = {"path": str(folder), "groups": str(tmp_path / "groups.csv")}
        source = load_source(DataSpec("image_folder", params))
        assert source.group_names == ("x", "y")
        assert source.train.groups.tolist() == [0, 1, 1, 0, 0, 1]

    def test_a_picture_without_group_is_named(self, tmp_path: Path) -> None:
        folder = make_image_folder(tmp_path / "pictures", per_class=2)
        csv.write_csv(pa.table({"file": ["cat/00.png"], "group": ["x"]}), tmp_path / "groups.csv")
        with pytest.raises(InvalidInput, match=r"no group for 3 pictures, first 'cat/01\.png'"):
            load_source(DataSpec("image_folder", {"path": str(folder), "groups": str(tmp_path / "groups.csv")}))


class TestUTKFace:
    def test_each_race_is_balanced(self, tmp_path: Path) -> None:
        source = load_source(DataSpec("utkface", {"root": str(make_utkface(tmp_path)), "size": 4}))
        for race, per_class in enumerate((10, 7, 7, 7, 7)):
            members = source.train.labels[source.train.groups == race]
            assert members.bincount().tolist() == [per_class, per_class]
        assert source.notes[0].startswith("1 pictures")

    def test_age_task_and_all_labels(self, tmp_path: Path) -> None:
        params = {"root": str(make_utkface(tmp_path)), "task": "age", "labels": "all", "size": 4}
        source = load_source(DataSpec("utkface", params))
        assert len(source.train) == 90
        assert source.class_names == ("30 or older", "under 30")
        assert int(source.train.labels.sum()) == sum(
            2 * (count // 4) + min(count % 4, 2) for count in (20, 10, *(8, 7) * 4)
        )

    def test_chosen_races_are_the_groups(self, tmp_path: Path) -> None:
        params = {"root": str(make_utkface(tmp_path)), "races": ["Asian", "White"], "size": 4}
        source = load_source(DataSpec("utkface", params))
        assert source.group_names == ("Asian", "White")
        assert source.train.groups.bincount().tolist() == [14, 20]
        brightness = source.train.features[source.train.groups == 0].float().mean()
        assert 18 < brightness < 32

    def test_unknown_task(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="unknown UTKFace task 'race'"):
            load_source(DataSpec("utkface", {"root": str(make_utkface(tmp_path)), "task": "race"}))


class TestIdx:
    def test_round_trip(self, tmp_path: Path) -> None:
        values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
        (tmp_path / "values").write_bytes(idx_bytes(values))
        assert np.array_equal(read_idx(tmp_path / "values"), values)

    @pytest.mark.parametrize("content", [b"", b"\x00\x00\x0d\x01", idx_bytes(np.zeros((3, 4), np.uint8))[:-1]])
    def test_damage_is_noticed(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "values").write_bytes(content)
        with pytest.raises(DataCorruption, match="values"):
            read_idx(tmp_path / "values")


class TestCifar:
    def test_the_original_batches(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
        source = load_source(DataSpec("cifar10", {"root": str(make_cifar_batches(tmp_path))}))
        assert source.test is not None
        assert (len(source.train), len(source.test)) == (20, 4)
        assert source.train.labels.tolist() == [0, 1, 2, 3] * 5
        assert source.train.features[2].flatten(1).unique(dim=1).flatten().tolist() == [2, 100, 200]
        assert not any("JPEG" in note for note in source.notes)

    def test_damaged_batches_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataCorruption, match="cifar-10-batches-py"):
            load_source(DataSpec("cifar10", {"root": str(make_cifar_batches(tmp_path))}))

    def test_jpegs_come_with_a_note(self, tmp_path: Path) -> None:
        source = load_source(DataSpec("cifar10", {"root": str(make_cifar_jpegs(tmp_path))}))
        assert "JPEG" in source.notes[0]
        assert abs(int(source.train.features[30, 0].float().mean()) - 120) <= 3


class TestWhereDataIs:
    def test_a_named_folder_is_the_only_one_looked_at(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match=f"there is no {tmp_path}/MNIST/raw/train-images.*DPSWEEP_DATA"):
            load_source(DataSpec("mnist", {"root": str(tmp_path)}))

    def test_the_environment_names_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DPSWEEP_DATA", str(make_fashion(tmp_path)))
        assert len(load_source(DataSpec("fashion_mnist")).train) == 60

    def test_otherwise_the_cache_is_filled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("DPSWEEP_DATA", raising=False)
        monkeypatch.setattr("workers.data.files.CACHE", tmp_path / "cache")
        found = locate("some", ("data.txt",), None, lambda cache: (cache / "data.txt").write_text("x"))
        assert found == tmp_path / "cache" / "data.txt"

    def test_a_failed_download_says_what_to_do(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(cache: Path) -> None:
            raise OSError("no route to host")

        monkeypatch.delenv("DPSWEEP_DATA", raising=False)
        monkeypatch.setattr("workers.data.files.CACHE", tmp_path)
        with pytest.raises(InvalidInput, match=r"download .* failed \(no route to host\); .*DPSWEEP_DATA"):
            locate("some", ("data.txt",), None, fail)

    def test_data_that_nobody_may_redistribute_is_not_downloaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DPSWEEP_DATA", str(tmp_path))
        with pytest.raises(InvalidInput, match=r"dutch\.csv; put the data there"):
            load_source(DataSpec("dutch"))


OWN_SOURCE = """
import numpy as np
from workers.data import Source, make_split

def two_moons(examples=40):
    angle = np.linspace(0, np.pi, examples)
    labels = np.arange(examples) % 2
    rows = np.stack([np.cos(angle) + labels, np.sin(angle)], axis=1).astype(np.float32)
    return Source("two_moons", make_split(rows, labels), None, ("a", "b"), ("a", "b"))

def wrong():
    return 3

NUMBER = 4
"""


class TestOwnSource:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "my_data.py"
        path.write_text(OWN_SOURCE)
        return path

    def test_by_file(self, file: Path) -> None:
        dataset = load_dataset(DataSpec(f"{file}:two_moons", {"examples": 60}, keep={"b": 5}))
        assert dataset.train.groups.bincount()[1] == 5
        assert dataset.feature_shape == (2,)

    def test_by_module(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(file.parent))
        assert len(load_dataset(DataSpec("my_data:two_moons")).train) == 32

    @pytest.mark.parametrize(
        ("function", "message"),
        [("wrong", "returned int"), ("absent", "no function 'absent'"), ("NUMBER", "no function 'NUMBER'")],
    )
    def test_mistakes_are_named(self, file: Path, function: str, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            load_dataset(DataSpec(f"{file}:{function}"))

    def test_unknown_key_is_named(self, file: Path) -> None:
        with pytest.raises(InvalidInput, match=r"unknown key 'exmples'.*did you mean 'examples'"):
            load_dataset(DataSpec(f"{file}:two_moons", {"exmples": 3}))

    def test_unknown_places_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match=r"no module 'no_such_module'.*PYTHONPATH"):
            load_dataset(DataSpec("no_such_module:load"))
        with pytest.raises(InvalidInput, match=r"there is no file .*absent\.py"):
            load_dataset(DataSpec(f"{tmp_path}/absent.py:load"))

    def test_unknown_source_has_a_nearest_name(self) -> None:
        with pytest.raises(InvalidInput, match="unknown data source 'digit'; did you mean 'digits'"):
            load_dataset(DataSpec("digit"))
