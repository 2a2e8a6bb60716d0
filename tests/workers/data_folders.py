"""Small files in the formats that data sources read."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet
from PIL import Image


def make_table(path: Path, rows: int = 120) -> Path:
    """Columns id, age, job, sex, income; row 5 lacks its age."""
    generator = np.random.default_rng(0)
    age = generator.integers(18, 80, rows).tolist()
    age[5] = None
    table = pa.table(
        {
            "id": [f"u{i // 4}" for i in range(rows)],
            "age": pa.array(age, pa.int64()),
            "job": generator.choice(["baker", "smith", "tailor"], rows).tolist(),
            "sex": generator.choice(["f", "m"], rows).tolist(),
            "income": generator.choice(["high", "low"], rows).tolist(),
        }
    )
    {".csv": csv.write_csv, ".parquet": parquet.write_table}[path.suffix](table, path)
    return path


WORDS = ("the", "cat", "dog", "sat", "ran", "on", "mat", "red", "sky", "good", "nice", "bad", "ugly")


def make_tokenizer(path: Path) -> Path:
    """Words of `WORDS`, after [PAD], [UNK] and [MASK]."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["[PAD]", "[UNK]", "[MASK]"]
    known = {word: place for place, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path))
    return path


def make_texts(path: Path, rows: int = 200) -> Path:
    """Columns body, mood, lang, who of a .csv, .parquet or .jsonl: moods have words of their own."""
    draw = np.random.default_rng(0)
    moods = draw.choice(["neg", "pos"], rows)
    own = {"neg": ["bad", "ugly"], "pos": ["good", "nice"]}
    bodies = [" ".join(draw.permutation([*draw.choice(WORDS[:9], 4), *own[mood]])) for mood in moods]
    table = pa.table(
        {
            "body": bodies,
            "mood": moods.tolist(),
            "lang": ["de" if row % 3 == 0 else "en" for row in range(rows)],
            "who": [f"u{row // 4}" for row in range(rows)],
        }
    )
    match path.suffix:
        case ".csv":
            csv.write_csv(table, path)
        case ".parquet":
            parquet.write_table(table, path)
        case _:
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


def make_numbers(path: Path, rows: int = 240) -> Path:
    """Columns x0 to x3, sex, two targets y and z that follow from them, and three labels red, green, blue."""
    draw = np.random.default_rng(0)
    x, sex = draw.normal(size=(rows, 4)).clip(-3, 3), draw.choice(["f", "m"], rows)
    y = x @ np.array([1.0, -0.5, 0.3, 0.0]) + draw.normal(0, 0.3, rows)
    flags = (x @ draw.normal(size=(4, 3)) > 0.3).astype(int)
    columns = {f"x{place}": x[:, place] for place in range(4)} | {"sex": sex.tolist(), "y": y, "z": 2 * y + 1}
    csv.write_csv(pa.table(columns | dict(zip(("red", "green", "blue"), flags.T, strict=True))), path)
    return path


def make_image_folder(folder: Path, per_class: int = 20) -> Path:
    """folder/{cat,dog}/NN.png; the pictures of a class share a brightness."""
    for brightness, name in ((40, "cat"), (200, "dog")):
        (folder / name).mkdir(parents=True)
        for index in range(per_class):
            write_picture(folder / name / f"{index:02}.png", brightness + index % 7)
    return folder


def make_listed_images(folder: Path, rows: int = 60) -> Path:
    """folder/table.csv, whose column file names folder/pictures/NN.png; bright pictures have the label bright."""
    (folder / "pictures").mkdir(parents=True)
    lines = ["file,y,sex,who,age,old,tall"]
    for row in range(rows):
        write_picture(folder / "pictures" / f"{row:02}.png", 40 + 160 * (row % 2) + row % 7)
        flags = f"{row % 2},{row // 2 % 2}"
        lines.append(
            f"pictures/{row:02}.png,{('dark', 'bright')[row % 2]},{'fm'[row // 2 % 2]},{row % 20},{20 + row},{flags}"
        )
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder / "table.csv"


def make_masks(folder: Path, pictures: int = 60, side: int = 16) -> Path:
    """folder/{images,masks}: a bright disc on noise, in two sizes of pictures; around it 255, which is not counted.

    folder/groups.csv says which pictures are day and which night, which are darker.
    """
    draw = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    lines = ["file,group"]
    for place in range(pictures):
        size, night = side * (1 + place % 2), place % 3 == 0
        y, x = np.mgrid[:size, :size] / size
        distance = np.hypot(y - draw.uniform(0.3, 0.7), x - draw.uniform(0.3, 0.7)) - draw.uniform(0.15, 0.3)
        disc, edge = distance < 0, abs(distance) < 0.03
        bright = draw.normal(60, 15, (size, size, 3)) + 120 * disc[:, :, None] * (0.6 if night else 1.0)
        Image.fromarray(bright.clip(0, 255).astype(np.uint8)).save(folder / "images" / f"{place:03}.png")
        mask = np.where(edge, 255, disc).astype(np.uint8)
        Image.fromarray(mask).save(folder / "masks" / f"{place:03}.png")
        lines.append(f"images/{place:03}.png,{'night' if night else 'day'}")
    (folder / "groups.csv").write_text("\n".join(lines) + "\n")
    return folder


def make_utkface(folder: Path) -> Path:
    """root/UTKFace with 90 faces: race 0 has twice as many men as women; one file name lacks the race."""
    faces = folder / "UTKFace"
    faces.mkdir(parents=True)
    index = 0
    for race in range(5):
        for gender, count in ((0, 20 if race == 0 else 8), (1, 10 if race == 0 else 7)):
            for number in range(count):
                age = 20 + 5 * (number % 4)
                write_picture(faces / f"{age}_{gender}_{race}_{index:04}.jpg", 10 * race + number)
                index += 1
    write_picture(faces / "61_1_20170109142408075.jpg", 0)
    return folder


def write_picture(path: Path, brightness: int) -> None:
    Image.new("RGB", (12, 12), (brightness,) * 3).save(path)


def make_fashion(folder: Path) -> Path:
    """root/FashionMNIST/raw with 60 training and 20 test pictures, training files gzipped, test files not."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(1)
    for part, count, suffix in (("train", 60, ".gz"), ("t10k", 20, "")):
        pictures = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for kind, values in (("images-idx3", pictures), ("labels-idx1", labels)):
            content = idx_bytes(values)
            path = raw / f"{part}-{kind}-ubyte{suffix}"
            path.write_bytes(gzip.compress(content) if suffix else content)
    return folder


def make_cifar_jpegs(folder: Path) -> Path:
    """root/cifar10-jpeg with 60 training and 20 test pictures."""
    (folder / "cifar10-jpeg").mkdir(parents=True)
    for part, count in (("train", 60), ("test", 20)):
        jpegs = []
        for index in range(count):
            jpegs.append(jpeg_bytes(32, 4 * index))
        labels = pa.array([index % 10 for index in range(count)], pa.int8())
        table = pa.table({"image_jpeg": jpegs, "label": labels})
        parquet.write_table(table, folder / "cifar10-jpeg" / f"{part}.parquet")
    return folder


def jpeg_bytes(size: int, red: int = 0) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (size, size), (red, 10, 20)).save(content, "JPEG")
    return content.getvalue()


def make_cifar_batches(folder: Path, per_batch: int = 4) -> Path:
    """root/cifar-10-batches-py: picture i of a batch has red i, green 100, blue 200; labels count up."""
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    channels = np.repeat(np.array([0, 100, 200], dtype=np.uint8), 1024)
    red = np.repeat(np.array([1, 0, 0], dtype=np.uint8), 1024)
    data = channels + np.arange(per_batch, dtype=np.uint8)[:, None] * red
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (batches / name).write_bytes(pickle.dumps({"data": data, "labels": list(range(per_batch))}))
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(label) for label in range(10)]}))
    return folder


def idx_bytes(values: npt.NDArray[np.uint8]) -> bytes:
    header = bytes([0, 0, 8, values.ndim])
    return header + b"".join(size.to_bytes(4, "big") for size in values.shape) + values.tobytes()
