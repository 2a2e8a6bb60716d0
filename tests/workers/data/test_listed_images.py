"""Pictures that a table lists: what is read of them, and what is refused."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
import yaml
from PIL import Image

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.orchestration.sweeps.draft import draft_sweep
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.data import Source, load_source
from dpsweep.workers.data.row_readers import reader_of_rows
from dpsweep.workers.spec import DataSpec
from tests.known import known
from tests.workers.data_folders import make_listed_images, write_picture
from tests.workers.held_pictures import hold
from tests.workers.private_details import assert_private

DECLARED = {"classes": ["dark", "bright"], "group": "sex", "groups": ["f", "m"]}


def load(table: Path, **params: Any) -> Source:
    return load_source(
        DataSpec("image_table", {"path": str(table), "image": "file", "label": "y", "size": 6, **params})
    )


def lines_of(table: Path) -> list[str]:
    return table.read_text().splitlines()


def write_lines(table: Path, lines: list[str]) -> None:
    table.write_text("\n".join(lines) + "\n")


def name_picture(table: Path, name: str) -> None:
    """Name another picture in one of the rows."""
    lines = lines_of(table)
    lines[5] = name + lines[5][lines[5].index(",") :]
    write_lines(table, lines)


def test_pictures_have_the_labels_groups_and_users_of_their_rows(tmp_path: Path) -> None:
    table = make_listed_images(tmp_path)
    source = load(table, **DECLARED, user="who")
    assert source.train.features.shape == (60, 3, 6, 6)
    assert (source.class_names, source.group_names, source.task) == (("dark", "bright"), ("f", "m"), "classification")
    assert (source.reasons, source.notes) == ((), ())
    rows = [line.split(",") for line in lines_of(table)[1:]]
    assert torch.equal((source.train.features.float().mean((1, 2, 3)) > 100).long(), source.train.labels)
    assert source.train.labels.tolist() == [("dark", "bright").index(row[1]) for row in rows]
    assert source.train.groups.tolist() == ["fm".index(row[2]) for row in rows]
    assert source.train.example_ids.tolist() == [*range(60)]
    assert source.train.user_ids is not None
    assert len(source.train.user_ids.unique()) == 20
    undeclared = load(table)
    assert undeclared.reasons == ("classes_from_rows",)
    assert load(table, group="sex").group_names == ("group 1", "group 2")


def test_rows_without_a_value_are_left_out_and_keep_the_ids_of_others(tmp_path: Path) -> None:
    table = make_listed_images(tmp_path)
    lines = lines_of(table)
    lines[1], lines[3] = "," + lines[1].partition(",")[2], lines[3].replace(",f,", ",,").replace(",m,", ",,")
    write_lines(table, lines)
    source = load(table, **DECLARED)
    assert source.train.example_ids.tolist() == [1, *range(3, 60)]
    assert source.notes[0] == "2 of 60 rows (3.3%) are left out: they lack a value ('sex' 1, 'file' 1)"


def test_amounts_and_flags_of_pictures(tmp_path: Path) -> None:
    table = make_listed_images(tmp_path)
    source = load(table, label="age", task="regression", ranges={"age": [0, 100]})
    assert source.train.labels[:3].flatten().tolist() == pytest.approx([0.2, 0.21, 0.22])
    assert load(table, label=["old", "tall"], task="multi_label").train.labels[:2].tolist() == [[0, 0], [1, 0]]


def test_a_table_of_test_pictures_and_a_folder_for_both(tmp_path: Path) -> None:
    table = make_listed_images(tmp_path / "all")
    lines, other = lines_of(table), tmp_path / "test.csv"
    write_lines(other, [lines[0], *lines[41:]])
    write_lines(table, lines[:41])
    source = load(table, **DECLARED, test_path=str(other), folder=str(tmp_path / "all"))
    assert source.test is not None
    assert (len(source.train), source.test.example_ids.tolist()) == (40, [*range(40, 60)])
    with pytest.raises(InvalidInput, match=r"test\.csv names are not in"):
        load(table, **DECLARED, test_path=str(other))
    write_lines(other, [lines[0], lines[1]])
    with pytest.raises(InvalidInput, match=r"two rows of .* have one picture"):
        load(table, **DECLARED, test_path=str(other), folder=str(tmp_path / "all"))


@pytest.mark.parametrize("name", ["../{0}", "{1}/{0}", "inner/../../{0}", "by_link.png", "linked/{0}"])
def test_a_picture_outside_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "table"
    table = make_listed_images(folder)
    write_picture(tmp_path / "secret.png", 9)
    (folder / "inner").mkdir()
    (folder / "by_link.png").symlink_to(tmp_path / "secret.png")
    (folder / "linked").symlink_to(tmp_path)
    name_picture(table, name.format("secret.png", tmp_path))
    with pytest.raises(InvalidInput, match=r"lie outside of .*, by their names or by links; set `folder`") as refused:
        load(table)
    assert_private(refused.value, "secret.png")


def test_absolute_names_inside_of_the_folder_are_read(tmp_path: Path) -> None:
    table = make_listed_images(tmp_path)
    lines = lines_of(table)
    write_lines(table, [lines[0], *(f"{tmp_path}/{line}" for line in lines[1:])])
    assert len(load(table).train) == 60


@pytest.mark.parametrize(
    "name", ["pictures/none.png", "https://host/a.png", "n" * 300, "a\0b.png", "pictures/00.png/x"]
)
def test_a_picture_that_is_missing_is_refused(tmp_path: Path, name: str) -> None:
    table = make_listed_images(tmp_path)
    name_picture(table, name)
    with pytest.raises(InvalidInput, match=r"names are not in .*; correct the names, or set `folder`") as refused:
        load(table)
    assert_private(refused.value, "1 picture of 60, first ")


def test_a_picture_in_two_rows_or_by_a_link_is_refused(tmp_path: Path) -> None:
    table = make_listed_images(tmp_path)
    (tmp_path / "again.png").symlink_to(tmp_path / "pictures" / "00.png")
    for name in ("pictures/00.png", "pictures/../pictures/00.png", "again.png"):
        name_picture(table, name)
        with pytest.raises(InvalidInput, match=r"two rows of .* have one picture; keep one, as") as refused:
            load(table)
        assert_private(refused.value, "00.png")


def test_files_that_are_no_pictures_are_refused(tmp_path: Path) -> None:
    table = make_listed_images(tmp_path)
    file = tmp_path / "pictures" / "04.png"
    file.write_bytes(b"no picture")
    said = "cannot read a picture: it is cut off or damaged, or no BMP, GIF, JPEG, PNG, PPM, TIFF or WEBP; correct"
    with pytest.raises(DataCorruption, match=said) as damaged:
        load(table)
    assert "04.png" not in str(damaged.value)
    for kind in ("PNG", "JPEG"):
        whole = io.BytesIO()
        Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(3 * 64 * 64)).save(whole, kind)
        file.write_bytes(whole.getvalue()[:-2000])
        with pytest.raises(DataCorruption, match=said):
            load(table)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InvalidInput, match="a picture is a pipe, a socket or a device"):
        load(table)
    file.unlink()
    file.mkdir()
    with pytest.raises(DataCorruption, match="cannot read a picture: Is a directory"):
        load(table)


def test_columns_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    table = make_listed_images(tmp_path)
    for params, said in (
        ({"image": "path"}, "there is no column 'path'"),
        ({"label": "file"}, "'file' is the image, and also a label, group or user"),
        ({"group": "file"}, "'file' is the image, and also"),
        ({"classes": ["dark"]}, "label column 'y'"),
        ({"folder": str(tmp_path / "none")}, "there is no .*none"),
        ({"test_path": str(table)}, "is the training table .* itself"),
        ({"size": 0}, "size is 0"),
    ):
        with pytest.raises(InvalidInput, match=said):
            load(table, **params)


@pytest.mark.parametrize("is_nested", [False, True], ids=["bytes", "datasets"])
def test_pictures_that_a_table_holds_are_those_of_its_files(tmp_path: Path, is_nested: bool) -> None:
    """Rows without a picture are left out, and those of another such table are read alike."""
    listed = make_listed_images(tmp_path)
    lines = lines_of(listed)
    lines[1] = "," + lines[1].partition(",")[2]
    write_lines(listed, lines)
    table = hold(listed, is_nested)
    files, held = load(listed, **DECLARED), load(table, **DECLARED)
    assert torch.equal(files.train.features, held.train.features)
    assert (held.train.example_ids.tolist(), held.notes) == (files.train.example_ids.tolist(), files.notes)
    reader = known(held.columns)
    rows = [reader_of_rows(reader).encoded(str(path)) for path in (listed, table)]
    assert np.array_equal(rows[0].features, rows[1].features)
    assert np.array_equal(rows[1].features, held.train.features.numpy())
    assert (rows[0].notes, list(rows[0].complete)) == (rows[1].notes, list(rows[1].complete))
    with pytest.raises(InvalidInput, match="holds its pictures itself, and names no files; leave `folder` out"):
        load(table, folder=str(tmp_path))
    damaged = parquet.read_table(table)
    parquet.write_table(damaged.set_column(0, "file", pa.array([b"no picture"] * 60)), table)
    with pytest.raises(DataCorruption, match=r"cannot read a picture: .*; correct or replace the file"):
        load(table)


def test_a_draft_names_the_source_of_its_pictures(tmp_path: Path) -> None:
    table = make_listed_images(tmp_path)
    said = 'which names files of pictures; to learn from these instead, draft with --image "file"'
    assert f'# left out: "file", {said}' in draft_sweep(table, ["y"], "sex")
    sweep = parse_sweep(
        yaml.safe_dump(
            {
                "name": "listed",
                "data": {
                    "name": "image_table",
                    "path": str(table),
                    "image": "file",
                    "label": "y",
                    "size": 8,
                    **DECLARED,
                },
                "model": "logistic",
                "sampling": {"method": "poisson", "batch_size": 16},
                "epochs": 1,
                "clipping": ["none", "flat"],
                "privacy": {"target_epsilon": 8, "delta": 1e-5},
            }
        )
    )
    plan = plan_sweep(sweep)
    assert (plan.refusals, plan.warnings) == ((), ())
    assert plan.trials[0].dataset.feature_shape == (3, 8, 8)
