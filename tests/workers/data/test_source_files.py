"""Reading idx files, CIFAR-10, published tables and the user's own functions; and what is said when they are amiss."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import http.server
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.workers.data import load_dataset, load_source
from dpsweep.workers.data.idx import read_idx
from dpsweep.workers.spec import DataSpec
from tests.known import known
from tests.workers.data_folders import (
    idx_bytes,
    jpeg_bytes,
    make_cifar_batches,
    make_cifar_jpegs,
    make_fashion,
)
from tests.workers.user_modules import allowed


class TestIdx:
    def test_round_trip(self, tmp_path: Path) -> None:
        values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
        (tmp_path / "values").write_bytes(idx_bytes(values))
        assert np.array_equal(read_idx(tmp_path / "values"), values)

    @pytest.mark.parametrize(
        "content",
        [b"", b"\x00\x00\x0d\x01", b"\x00\x00\x08\x03\x00\x00", idx_bytes(np.zeros((3, 4), np.uint8))[:-1]],
    )
    def test_damage_is_noticed(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "values").write_bytes(content)
        with pytest.raises(DataCorruption, match=r"values .*; fetch it again"):
            read_idx(tmp_path / "values")

    @pytest.mark.parametrize(
        "damage", [lambda file: file[:-9], lambda file: file[:50] + b"?" + file[51:], lambda _: b"?"]
    )
    def test_damaged_compression_is_noticed(self, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
        whole = gzip.compress(idx_bytes(np.random.default_rng(0).integers(0, 256, (9, 9), np.uint8)))
        (tmp_path / "values.gz").write_bytes(damage(whole))
        with pytest.raises(DataCorruption, match=r"cannot read .*values\.gz"):
            read_idx(tmp_path / "values.gz")

    def test_files_that_do_not_belong_together_are_refused(self, tmp_path: Path) -> None:
        raw = make_fashion(tmp_path) / "FashionMNIST" / "raw"
        (raw / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros((20, 14, 14), np.uint8)))
        with pytest.raises(InvalidInput, match=r"training and test .* differ: \(1, 28, 28\) .* \(1, 14, 14\)"):
            load_source(DataSpec("fashion_mnist", {"root": str(tmp_path)}))
        (raw / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.full(20, 12, np.uint8)))
        (raw / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(np.zeros((20, 28, 28), np.uint8)))
        with pytest.raises(InvalidInput, match="labels of 'fashion_mnist' must index its 10 names"):
            load_source(DataSpec("fashion_mnist", {"root": str(tmp_path)}))


class TestCifar:
    def test_the_original_batches(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
        source = load_source(DataSpec("cifar10", {"root": str(make_cifar_batches(tmp_path))}))
        assert (len(source.train), len(known(source.test))) == (20, 4)
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

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"image_jpeg": b"?"}, "holds a picture that cannot be decoded"),
            ({"image_jpeg": jpeg_bytes(16)[:400]}, "holds a picture that cannot be decoded"),
            ({"image_jpeg": jpeg_bytes(16)}, r"holds a picture whose shape is not \(3, 32, 32\)"),
            ({"image_jpeg": None}, "a picture without image_jpeg or label"),
            ({"label": None}, "a picture without image_jpeg or label"),
        ],
    )
    def test_damaged_jpegs_are_named(self, tmp_path: Path, change: dict[str, object], message: str) -> None:
        path = make_cifar_jpegs(tmp_path) / "cifar10-jpeg" / "train.parquet"
        rows = parquet.read_table(path).to_pylist()
        rows[3].update(change)
        parquet.write_table(pa.Table.from_pylist(rows), path)
        with pytest.raises(DataCorruption, match=message):
            load_source(DataSpec("cifar10", {"root": str(tmp_path)}))
        path.write_bytes(path.read_bytes()[:500])
        with pytest.raises(DataCorruption, match=f"cannot read {path}"):
            load_source(DataSpec("cifar10", {"root": str(tmp_path)}))

    def test_no_jpegs_at_all_are_named(self, tmp_path: Path) -> None:
        path = make_cifar_jpegs(tmp_path) / "cifar10-jpeg" / "test.parquet"
        parquet.write_table(parquet.read_table(path).slice(0, 0), path)
        with pytest.raises(DataCorruption, match=f"{path} holds no pictures"):
            load_source(DataSpec("cifar10", {"root": str(tmp_path)}))


class TestPublishedTables:
    @pytest.mark.parametrize(
        ("name", "file"),
        [
            ("adult", "adult.data"),
            ("breast_cancer_wisconsin", "breast-cancer-wisconsin.data"),
            ("dutch", "dutch.csv"),
        ],
    )
    @pytest.mark.parametrize("content", ["", "<html>404</html>\n", "1,2,3\n4,5,6\n"])
    def test_a_file_that_is_not_the_published_one(self, tmp_path: Path, name: str, file: str, content: str) -> None:
        (tmp_path / file).write_text(content)
        with pytest.raises(DataCorruption, match=f"cannot read {tmp_path / file}"):
            load_source(DataSpec(name, {"root": str(tmp_path)}))

    def test_a_code_that_the_census_does_not_have_is_named(self, tmp_path: Path) -> None:
        header = "sex,age,household_position,household_size,prev_residence_place,citizenship,country_birth,edu_level,"
        row = "male,{},1110,111,1,1,1,0,111,111,1,1\n"
        rows = row.format(4) * 60_419 + row.format(99)
        (tmp_path / "dutch.csv").write_text(
            f"{header}economic_status,cur_eco_activity,marital_status,occupation\n{rows}"
        )
        with pytest.raises(
            InvalidInput, match=r"data source 'dutch': column 'age' has a value that is neither declared"
        ):
            load_source(DataSpec("dutch", {"root": str(tmp_path), "exclude": []}))

    def test_a_category_that_adult_does_not_have_is_named(self, tmp_path: Path) -> None:
        row = "39, {}, 7, Bachelors, 13, Divorced, Sales, Wife, White, Female, 0, 0, 40, Cuba, <=50K\n"
        (tmp_path / "adult.data").write_text(row.format("Private") * 32_560 + row.format("Pirate"))
        (tmp_path / "adult.test").write_text("|\n" + row.format("Private") * 16_281)
        with pytest.raises(
            InvalidInput, match="data source 'adult': column 'workclass' has a value that is neither declared"
        ):
            load_source(DataSpec("adult", {"root": str(tmp_path)}))

    def test_a_file_that_was_cut_short(self, tmp_path: Path) -> None:
        (tmp_path / "breast-cancer-wisconsin.data").write_text("1000025,5,1,1,1,2,1,3,1,1,2\n")
        with pytest.raises(DataCorruption, match="has 1 row, but as published it has 699; fetch it again"):
            load_source(DataSpec("breast_cancer_wisconsin", {"root": str(tmp_path)}))


class TestWhereDataIs:
    def test_a_named_folder_is_the_only_one_looked_at(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match=f"there is no {tmp_path}/MNIST/raw/train-images.*DPSWEEP_DATA"):
            load_source(DataSpec("mnist", {"root": str(tmp_path)}))

    def test_the_environment_names_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DPSWEEP_DATA", str(make_fashion(tmp_path)))
        assert len(load_source(DataSpec("fashion_mnist")).train) == 60

    def test_fashion_mnist_is_downloaded_into_the_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        mirror = make_fashion(tmp_path / "mirror") / "FashionMNIST" / "raw"
        for file in mirror.glob("t10k-*"):
            file.with_suffix(".gz").write_bytes(gzip.compress(file.read_bytes()))
        published = [(file.name, hashlib.md5(file.read_bytes()).hexdigest()) for file in sorted(mirror.glob("*.gz"))]
        monkeypatch.delenv("DPSWEEP_DATA", raising=False)
        monkeypatch.setattr("dpsweep.workers.data.source_files.user_cache", lambda: tmp_path / "cache")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr("torchvision.datasets.FashionMNIST.resources", published)
        with served(mirror) as address:
            monkeypatch.setattr("torchvision.datasets.FashionMNIST.mirrors", [address])
            source = load_source(DataSpec("fashion_mnist"))
        assert (len(source.train), len(known(source.test))) == (60, 20)
        assert torch.equal(load_source(DataSpec("fashion_mnist")).train.features, source.train.features)
        shutil.rmtree(tmp_path / "cache")
        with pytest.raises(InvalidInput, match=r"the download into .*cache failed \(.+\); .*DPSWEEP_DATA"):
            load_source(DataSpec("fashion_mnist"))

    def test_data_that_nobody_may_redistribute_is_not_downloaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DPSWEEP_DATA", str(tmp_path))
        with pytest.raises(InvalidInput, match=r"dutch\.csv; put the data there"):
            load_source(DataSpec("dutch"))


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """A web server of the files in ``folder``, on this machine; yields its address."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


OWN_SOURCE = """
import numpy as np
from dpsweep.workers.data import Source, make_split

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
        dataset = load_dataset(DataSpec(f"{file}:two_moons", {"examples": 60}, keep={"b": 5}), allowed(file))
        assert dataset.train.groups.bincount()[1] == 5
        assert dataset.feature_shape == (2,)

    def test_by_module(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(file.parent))
        assert len(load_dataset(DataSpec("my_data:two_moons"), allowed("my_data")).train) == 32

    @pytest.mark.parametrize(
        ("name", "params", "message"),
        [
            ("FILE:wrong", {}, "returned int"),
            ("FILE:absent", {}, "no function 'absent'"),
            ("FILE:NUMBER", {}, "no function 'NUMBER'"),
            ("FILE:two_moons", {"exmples": 3}, r"unknown key 'exmples'.*did you mean 'examples'"),
            ("no_such_module:load", {}, r"no module 'no_such_module' can be imported here; install it"),
            ("FILE.absent.py:load", {}, r"there is no file .*absent\.py"),
            ("digits", {"root": "/data"}, "unknown key 'root' of data source 'digits'; it takes none"),
            ("digit", {}, "unknown data source 'digit'; did you mean 'digits'"),
        ],
    )
    def test_mistakes_are_named(self, file: Path, name: str, params: dict[str, Any], message: str) -> None:
        named = name.replace("FILE", str(file))
        with pytest.raises(InvalidInput, match=message):
            load_dataset(DataSpec(named, params), allowed(named.partition(":")[0]))
