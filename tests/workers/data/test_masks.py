"""Pictures with masks: what is read of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.workers.data import Source, load_source
from dpsweep.workers.spec import DataSpec
from dpsweep.workers.tasks import IGNORED
from tests.workers.data_folders import make_masks

CLASSES = ("ground", "disc")


def load(folder: Path, **params: Any) -> Source:
    return load_source(DataSpec("image_masks", {"path": str(folder), "classes": list(CLASSES), "size": 16, **params}))


def write_mask(folder: Path, pixels: np.ndarray[Any, Any], name: str = "000.png") -> None:
    Image.fromarray(pixels.astype(np.uint8)).save(folder / "masks" / name)


def test_pixels_are_those_of_the_files(tmp_path: Path) -> None:
    folder = make_masks(tmp_path / "pictures", pictures=6)
    source = load(folder)
    assert source.task == "segmentation"
    assert source.class_names == CLASSES
    assert source.group_names == ("all",)
    assert source.notes == ()
    assert source.train.features.shape == (6, 3, 16, 16)
    assert source.train.labels.dtype == torch.int16
    for place in (0, 2, 4):  # stored in that size
        mask = np.asarray(Image.open(folder / "masks" / f"{place:03}.png")).astype(int)
        expected = np.where(mask == 255, IGNORED, mask)
        np.testing.assert_array_equal(source.train.labels[place].numpy(), expected)
        picture = np.asarray(Image.open(folder / "images" / f"{place:03}.png"))
        np.testing.assert_array_equal(source.train.features[place].permute(1, 2, 0).numpy(), picture)
    assert {int(each) for each in source.train.labels.unique()} == {IGNORED, 0, 1}


def test_a_larger_mask_keeps_its_numbers(tmp_path: Path) -> None:
    """Of the nearest pixel: a mean of two classes would be a third."""
    folder = make_masks(tmp_path / "pictures", pictures=1)
    stored = np.kron(np.arange(16).reshape(4, 4), np.ones((10, 10)))
    write_mask(folder, stored)
    found = load(folder, classes=[str(each) for each in range(16)], size=4).train.labels[0]
    assert found.tolist() == np.arange(16).reshape(4, 4).tolist()


def test_numbers_and_palettes_of_masks(tmp_path: Path) -> None:
    folder = make_masks(tmp_path / "pictures", pictures=2)
    write_mask(folder, np.full((16, 16), 255))
    palette = Image.new("P", (16, 16), 7)
    palette.putpalette([0, 0, 0, 255, 0, 0] * 4)
    palette.save(folder / "masks" / "001.png")
    found = load(folder, values=[7, 255], ignored=None).train.labels
    assert found.flatten(1).unique(dim=1).flatten().tolist() == [1, 0]


def test_parts_and_groups(tmp_path: Path) -> None:
    for part, pictures in (("train", 6), ("test", 3)):
        make_masks(tmp_path / part, pictures=pictures)
    lines = [
        f"{part}/images/{place:03}.png,{place % 2}" for part, n in (("train", 6), ("test", 3)) for place in range(n)
    ]
    (tmp_path / "who.csv").write_text("\n".join(["file,site", *lines]) + "\n")
    source = load(tmp_path, groups=str(tmp_path / "who.csv"), group="site", group_names=["0", "1"])
    assert source.test is not None
    assert (len(source.train), len(source.test)) == (6, 3)
    assert source.train.groups.tolist() == [0, 1] * 3
    read = load(tmp_path, groups=str(tmp_path / "who.csv"), group="site")
    assert read.group_names == ("group 1", "group 2")
    assert read.reasons == ("groups_from_rows",)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"classes": ["ground"]}, "classes of 'pictures' must be at least 2"),
        ({"values": [0]}, "`values` has 1 number, but must have a different one for each of `classes`"),
        ({"values": [0, 0]}, "a different one for each of `classes`"),
        ({"ignored": None}, "a mask has a number besides 0, 1, those of `classes`; declare it by `values`, or as `ign"),
        ({"group_names": ["a"]}, "`group_names` needs `groups`, the CSV file"),
        ({"size": 0}, "size is 0"),
        ({"path": "/nowhere"}, "there is no /nowhere"),
    ],
)
def test_mistakes_are_named(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_masks(tmp_path / "pictures", pictures=3)
    if params.get("classes") == ["ground"]:
        for place in range(3):
            write_mask(folder, np.zeros((16, 16)), f"{place:03}.png")
    with pytest.raises(InvalidInput, match=message):
        load(folder, **params)


def test_pictures_and_masks_belong_together(tmp_path: Path) -> None:
    folder = make_masks(tmp_path / "pictures", pictures=3)
    Image.new("L", (16, 16)).save(folder / "masks" / "001.tif")
    with pytest.raises(InvalidInput, match=r"a picture has several masks in .*masks"):
        load(folder)
    for name in ("001.tif", "001.png"):
        (folder / "masks" / name).unlink()
    with pytest.raises(InvalidInput, match=r"a picture has no mask in .*masks"):
        load(folder)
    Image.new("RGB", (16, 16)).save(folder / "masks" / "001.png")
    with pytest.raises(InvalidInput, match="a mask has pixels of mode RGB, but must have one number"):
        load(folder)
    (folder / "masks" / "001.png").write_bytes(b"no picture")
    with pytest.raises(DataCorruption, match=rf"cannot read {folder}/masks/\*\.png"):
        load(folder)
    with pytest.raises(InvalidInput, match=r"there are no pictures in .*masks/images"):
        load(folder / "masks")
    (folder / "masks" / "001.png").unlink()
    (folder / "masks" / "001.png").symlink_to(folder / "masks" / "002.png")
    with pytest.raises(InvalidInput, match="two pictures are one, by a link"):
        load(folder)
