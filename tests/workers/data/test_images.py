"""Reading folders of pictures and UTKFace; and what is said when they are amiss."""

from __future__ import annotations

import random
import shutil
import struct
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as csv
import pytest
import torch
from PIL import EpsImagePlugin, Image, PngImagePlugin

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.workers.data import load_source
from dpsweep.workers.data.source_files import opened_picture
from dpsweep.workers.data.utkface import utkface
from dpsweep.workers.spec import DataSpec
from tests.workers.data_folders import make_image_folder, make_utkface
from tests.workers.private_details import assert_private


def test_a_picture_of_another_format_is_given_to_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostScript under the name of a picture, which Pillow itself gives to Ghostscript."""
    folder, given = make_image_folder(tmp_path, per_class=1), list[object]()
    Image.new("RGB", (4, 4)).save(folder / "cat" / "00.png", "EPS")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *values, **_: given.append(values))
    with pytest.raises(DataCorruption, match=r"cannot read a picture: it is cut off or damaged, or no BMP, GIF"):
        load_source(DataSpec("image_folder", {"path": str(folder)}))
    assert not given


def test_a_picture_that_would_fill_the_memory_is_named(tmp_path: Path) -> None:
    folder = make_image_folder(tmp_path, per_class=1)
    path = folder / "cat" / "00.png"
    content = path.read_bytes()
    header = b"IHDR" + struct.pack(">II", 65_536, 65_536) + content[24:29]
    path.write_bytes(content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:])
    with pytest.raises(DataCorruption, match=r"cannot read a picture: it has more than 178956970 pixels"):
        load_source(DataSpec("image_folder", {"path": str(folder)}))


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("PNG", "x" * 2_000_000, "texts in it unfold to more than pictures need"),
        ("PPM", "", "it is cut off or damaged, or no BMP, GIF"),
    ],
)
def test_what_pillow_tells_by_a_value_error_is_one_line(tmp_path: Path, kind: str, text: str, said: str) -> None:
    folder, info = make_image_folder(tmp_path, per_class=1), PngImagePlugin.PngInfo()
    info.add_text("Comment", text, zip=True)
    path = folder / "cat" / "00.png"
    Image.new("RGB", (4, 4)).save(path, kind, pnginfo=info)
    if kind == "PPM":
        path.write_bytes(b"P6\n4 x\n255\n")
    with pytest.raises(DataCorruption, match=f"cannot read a picture: {said}"):
        load_source(DataSpec("image_folder", {"path": str(folder)}))


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "jpeg"])
def test_libtiff_says_nothing_of_its_own(compression: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make_image_folder(tmp_path, per_class=1)
    path = folder / "cat" / "00.png"
    picture = Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(3 * 64 * 64))
    picture.save(path, "TIFF", compression=compression)
    content = path.read_bytes()
    (end,) = struct.unpack("<I", content[4:8])
    assert end > 400, "the pixels come first"
    path.write_bytes(content[:12] + bytes(byte ^ 0x5A for byte in content[12:400]) + content[400:])
    with pytest.raises(DataCorruption, match="cannot read a picture: it is cut off or damaged"):
        load_source(DataSpec("image_folder", {"path": str(folder)}))
    assert capfd.readouterr() == ("", "")


def test_a_large_picture_is_read_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    Image.new("1", (10_000, 9_000)).save(tmp_path / "large.png")
    with opened_picture(tmp_path / "large.png") as picture:
        assert picture.size == (10_000, 9_000)
    assert not recwarn.list


class TestImages:
    def test_groups_may_be_intersections_of_attributes(self, tmp_path: Path) -> None:
        folder, file = make_image_folder(tmp_path / "pictures"), tmp_path / "people.csv"
        lines = [
            f"{name}/{index:02}.png,{'fm'[index % 2]},{'old' if index < 5 else 'young'}"
            for name in ("cat", "dog")
            for index in range(20)
        ]
        file.write_text("\n".join(["file,sex,age", *lines]))
        params = {"path": str(folder), "size": 4, "groups": str(file), "group": ["sex", "age"]}
        found = load_source(DataSpec("image_folder", params))
        assert found.group_names == ("group 1", "group 2", "group 3", "group 4"), "not declared"
        assert found.train.groups.bincount().tolist() == [6, 14, 4, 16]
        named = {"age": ["young", "old"], "sex": ["f", "m"]}
        declared = load_source(DataSpec("image_folder", {**params, "group_names": named}))
        assert declared.group_names == ("f × young", "f × old", "m × young", "m × old")
        assert declared.train.groups.bincount().tolist() == [14, 6, 16, 4]
        for wrong, said in (
            ({"group_names": ["f", "m"]}, "must give the values of each of sex, age"),
            ({"group_names": {"sex": ["f", "m"]}}, "names sex, but `group` is sex, age"),
            ({"group": ["sex", "race"]}, "lacks a column of file and sex and race"),
            ({"groups": None}, "Without attributes, the groups are the classes"),
        ):
            with pytest.raises(InvalidInput, match=said):
                load_source(DataSpec("image_folder", {**params, **wrong}))

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
        assert source.group_names == ("group 1", "group 2"), "only the file tells their names"
        assert source.train.groups.tolist() == [0, 1, 1, 0, 0, 1]
        assert source.reasons == ("classes_from_rows", "groups_from_rows")
        declared = {**params, "classes": ["dog", "cat"], "group_names": ["z", "y", "x"]}
        source = load_source(DataSpec("image_folder", declared))
        assert source.group_names == ("z", "y", "x")
        assert source.train.groups.tolist() == [2, 1, 1, 2, 2, 1]
        assert source.train.labels.tolist() == [1, 1, 1, 0, 0, 0]
        assert (source.notes, source.reasons) == ((), ())

    def test_a_picture_without_group_is_named(self, tmp_path: Path) -> None:
        folder = make_image_folder(tmp_path / "pictures", per_class=2)
        csv.write_csv(pa.table({"file": ["cat/00.png"], "group": ["x"]}), tmp_path / "groups.csv")
        with pytest.raises(InvalidInput, match=r"no group for some pictures"):
            load_source(DataSpec("image_folder", {"path": str(folder), "groups": str(tmp_path / "groups.csv")}))

    @pytest.mark.parametrize(
        ("lines", "error", "message"),
        [
            (["cat/00.png,x", "cat/00.png,y"], InvalidInput, "several lines for one file"),
            (["cat/00.png,x", "dog/00.png,"], InvalidInput, r"no group for some pictures"),
            (["cat/00.png"], DataCorruption, r"cannot read .*groups\.csv"),
        ],
    )
    def test_a_bad_file_of_groups_is_named(
        self, tmp_path: Path, lines: list[str], error: type[Exception], message: str
    ) -> None:
        folder = make_image_folder(tmp_path / "pictures", per_class=1)
        (tmp_path / "groups.csv").write_text("\n".join(["file,group", *lines]))
        with pytest.raises(error, match=message):
            load_source(DataSpec("image_folder", {"path": str(folder), "groups": str(tmp_path / "groups.csv")}))

    def test_bad_folders_are_named(self, tmp_path: Path) -> None:
        folder = make_image_folder(tmp_path / "pictures", per_class=2)
        params = {"path": str(folder), "size": 4}
        with pytest.raises(InvalidInput, match=r"some class folders of .* are not among those declared"):
            load_source(DataSpec("image_folder", {**params, "classes": ["cat", "cow"]}))
        with pytest.raises(InvalidInput, match="size is 0"):
            load_source(DataSpec("image_folder", {**params, "size": 0}))
        with pytest.raises(InvalidInput, match="Not a directory"):
            load_source(DataSpec("image_folder", {"path": str(folder / "cat" / "00.png")}))
        (folder / "dog" / "01.png").write_bytes(b"not a picture")
        with pytest.raises(DataCorruption, match="cannot read a picture: it is cut off or damaged, or no BMP, GIF"):
            load_source(DataSpec("image_folder", params))
        shutil.rmtree(folder / "cat")
        (folder / "dog" / "01.png").unlink()
        with pytest.raises(InvalidInput, match=r"all labels of 'pictures' are the same"):
            load_source(DataSpec("image_folder", params))

    @pytest.mark.parametrize("name", [".ipynb_checkpoints", "__MACOSX"])
    def test_what_other_programs_left_is_no_folder_of_pictures(self, tmp_path: Path, name: str) -> None:
        for part in ("train", "test"):
            make_image_folder(tmp_path / part)
        (tmp_path / name).mkdir()
        source = load_source(DataSpec("image_folder", {"path": str(tmp_path), "size": 8}))
        assert source.test is not None

    @pytest.mark.parametrize("names", [("training", "test"), ("Train", "test"), ("Train", "Test"), ("train", "val")])
    def test_folders_that_may_be_parts_or_classes_are_refused(self, tmp_path: Path, names: tuple[str, str]) -> None:
        for name in names:
            make_image_folder(tmp_path / name, per_class=2)
        with pytest.raises(InvalidInput, match="holds a folder called like a training or test set"):
            load_source(DataSpec("image_folder", {"path": str(tmp_path)}))

    @pytest.mark.parametrize("name", ["train", "test"])
    def test_a_class_named_like_a_part_is_refused(self, tmp_path: Path, name: str) -> None:
        (make_image_folder(tmp_path, per_class=2) / name).mkdir()
        with pytest.raises(InvalidInput, match="it may be a class or a part; give a class another name"):
            load_source(DataSpec("image_folder", {"path": str(tmp_path)}))

    @pytest.mark.parametrize(
        ("mode", "name"), [("I;16", "00.png"), ("I;16", "00.tif"), ("F", "00.tif"), ("I", "00.tif"), ("LAB", "00.tif")]
    )
    def test_pixels_of_more_than_8_bit_are_refused(self, tmp_path: Path, mode: str, name: str) -> None:
        folder = make_image_folder(tmp_path, per_class=1)
        (folder / "cat" / "00.png").unlink()
        Image.new(mode, (12, 12)).save(folder / "cat" / name)
        with pytest.raises(
            InvalidInput, match=f"a picture has pixels of mode {mode}, but must have one of 8"
        ) as refused:
            load_source(DataSpec("image_folder", {"path": str(folder)}))
        assert_private(refused.value, f"cat/{name}")

    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
    def test_pictures_of_8_bit_keep_their_colours(self, tmp_path: Path, mode: str) -> None:
        folder = make_image_folder(tmp_path, per_class=1)
        Image.new("RGB", (12, 12), "white").convert(mode).save(folder / "cat" / "00.png")
        source = load_source(DataSpec("image_folder", {"path": str(folder), "size": 4}))
        assert source.train.features[0].unique().tolist() == [255]

    def test_a_picture_that_is_there_twice_by_a_link_is_refused(self, tmp_path: Path) -> None:
        folder = make_image_folder(tmp_path / "pictures", per_class=2)
        (folder / "dog" / "more").symlink_to(folder / "cat")
        with pytest.raises(InvalidInput, match=r"two pictures are one, by a link"):
            load_source(DataSpec("image_folder", {"path": str(folder)}))

    def test_a_linked_folder_that_is_there_once_is_read(self, tmp_path: Path) -> None:
        elsewhere = make_image_folder(tmp_path / "elsewhere", per_class=2)
        (tmp_path / "pictures").mkdir()
        for name in ("cat", "dog"):
            (tmp_path / "pictures" / name).symlink_to(elsewhere / name)
        assert len(load_source(DataSpec("image_folder", {"path": str(tmp_path / "pictures")})).train) == 4

    def test_group_names_without_groups_are_refused(self, tmp_path: Path) -> None:
        params = {"path": str(make_image_folder(tmp_path, per_class=2)), "group_names": ["x", "y"]}
        with pytest.raises(InvalidInput, match="`group_names` needs `groups`"):
            load_source(DataSpec("image_folder", params))


class TestUTKFace:
    def test_each_race_is_balanced(self, tmp_path: Path) -> None:
        source = load_source(DataSpec("utkface", {"root": str(make_utkface(tmp_path)), "size": 4}))
        for race, per_class in enumerate((10, 7, 7, 7, 7)):
            members = source.train.labels[source.train.groups == race]
            assert members.bincount().tolist() == [per_class, per_class]
        assert source.notes == ("pictures without age, gender and race in their names are left out",)

    def test_names_end_in_any_spelling_of_jpg(self, tmp_path: Path) -> None:
        folder = make_utkface(tmp_path) / "UTKFace"
        whole = load_source(DataSpec("utkface", {"root": str(tmp_path), "labels": "all", "size": 4}))
        for index, face in enumerate(sorted(folder.glob("*.jpg"))):
            face.rename(face.with_suffix((".jpg", ".JPG", ".jpeg", ".Jpeg")[index % 4]))
        again = load_source(DataSpec("utkface", {"root": str(tmp_path), "labels": "all", "size": 4}))
        assert torch.equal(again.train.features, whole.train.features)
        assert torch.equal(again.train.example_ids, whole.train.example_ids)

    def test_races_without_faces_are_named(self, tmp_path: Path) -> None:
        params = {"root": str(make_utkface(tmp_path)), "size": 4}
        with pytest.raises(InvalidInput, match="races is empty, but must name at least one of White, Black"):
            load_source(DataSpec("utkface", {**params, "races": []}))
        with pytest.raises(InvalidInput, match="unknown UTKFace labels 'balance'"):
            utkface(str(tmp_path), labels="balance", size=4)  # type: ignore[arg-type]
        for face in (tmp_path / "UTKFace").glob("*_4_*.jpg"):
            face.unlink()
        with pytest.raises(InvalidInput, match=r"holds no pictures named age_gender_race_\*\.jpg of races Other"):
            load_source(DataSpec("utkface", {**params, "races": ["Other"]}))

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

    def test_groups_may_be_another_attribute_and_intersections(self, tmp_path: Path) -> None:
        params = {"root": str(make_utkface(tmp_path)), "task": "age", "labels": "all", "size": 4}
        by_gender = load_source(DataSpec("utkface", {**params, "group": "gender"}))
        assert by_gender.group_names == ("male", "female")
        assert by_gender.train.groups.bincount().tolist() == [20 + 4 * 8, 10 + 4 * 7]
        both = {**params, "group": ["race", "gender"], "races": ["Asian", "White"]}
        source = load_source(DataSpec("utkface", both))
        assert source.group_names == ("Asian × male", "Asian × female", "White × male", "White × female")
        assert source.train.groups.bincount().tolist() == [8, 7, 20, 10]
        balanced = load_source(DataSpec("utkface", {**both, "task": "gender", "labels": "balanced"}))
        assert balanced.train.groups.bincount().tolist() == [7, 7, 10, 10], "balanced by race, as in the paper"
        with pytest.raises(InvalidInput, match="has no groups by 'sex'"):
            load_source(DataSpec("utkface", {**params, "group": ["race", "sex"]}))

    def test_unknown_task(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="unknown UTKFace task 'race'"):
            load_source(DataSpec("utkface", {"root": str(make_utkface(tmp_path)), "task": "race"}))

    def test_a_picture_that_is_there_twice_is_refused(self, tmp_path: Path) -> None:
        folder = make_utkface(tmp_path) / "UTKFace"
        (folder / "part2").mkdir()
        shutil.copy(folder / "20_0_0_0000.jpg", folder / "part2")
        with pytest.raises(InvalidInput, match=r"holds a picture more than once"):
            load_source(DataSpec("utkface", {"root": str(tmp_path)}))

    def test_faces_of_one_class_cannot_be_balanced(self, tmp_path: Path) -> None:
        params = {"root": str(make_utkface(tmp_path)), "size": 4}
        for face in (tmp_path / "UTKFace").glob("*_1_*_*.jpg"):
            face.unlink()
        with pytest.raises(InvalidInput, match="no race has faces male and female; set labels: all"):
            load_source(DataSpec("utkface", params))
        assert load_source(DataSpec("utkface", {**params, "labels": "all"})).train.labels.unique().tolist() == [0]
        with pytest.raises(InvalidInput, match="labels is 'balancd': did you mean 'balanced'"):
            load_source(DataSpec("utkface", {**params, "labels": "balancd"}))
