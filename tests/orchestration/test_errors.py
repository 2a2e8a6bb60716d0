"""Text of errors that may quote the data stays in private folders: elsewhere type and place are shown."""

from __future__ import annotations

import io
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dpsweep.orchestration.commands.main import main
from dpsweep.orchestration.store.layout import SweepFiles
from tests.orchestration.execution.test_session import shared, temporary
from tests.orchestration.processes import dpsweep
from tests.orchestration.sample_grids import small

__all__ = ["shared"]

CANARY = "kanarienvogel"
"""A value of the data."""
OWN_CODE = """
import math
import os
import numpy as np
import torch
from torch import nn
from dpsweep.accounting.errors import InvalidInput, StorageError
from dpsweep.workers.data import Source, make_split

WORD = "kanarien" "vogel"

class Model(nn.Module):
    def __init__(self, feature_shape, num_classes, how):
        super().__init__()
        self.linear, self.how = nn.Linear(math.prod(feature_shape), num_classes), how

    def forward(self, x):
        mended = os.path.exists(os.environ.get("MENDED", ""))
        if self.training and len(x) > int(os.environ.get("ROWS", "8")) and not mended:
            HOW[self.how]()
        return self.linear(x.flatten(1))

def raises():
    try:
        raise KeyError(f"first {WORD}")
    except KeyError as error:
        raise ValueError(f"bad row {WORD}") from error

def raises_ours():
    raise InvalidInput(f"bad row {WORD}")

def raises_storage():
    raise StorageError(f"bad row {WORD}")

def exits():
    raise SystemExit(f"bad row {WORD}")

def interrupts():
    raise KeyboardInterrupt(f"bad row {WORD}")

def does_nothing():
    pass

HOW = {f.__name__: f for f in (raises, raises_ours, raises_storage, exits, interrupts, does_nothing)}

def rows(how):
    HOW[how]()

def named():
    split = make_split(np.zeros((60, 4), np.float32), np.arange(60) % 2)
    return Source("own", split, None, (WORD, WORD), ("a", "b"))

class Prepared:
    def __call__(self, features):
        raises()

def prepared():
    split = make_split(np.zeros((60, 4), np.float32), np.arange(60) % 2)
    return Source("own", split, None, ("a", "b"), ("a", "b"), Prepared())
"""


def write(folder: Path, **changes: object) -> Path:
    (folder / "raising_code.py").write_text(OWN_CODE)
    file = folder / "sweep.yaml"
    file.write_text(small(**{"clipping": "flat", "noise": "constant", "seeds": 0, **changes}))
    return file


def leaks(root: Path) -> list[Path]:
    """Files outside private folders that hold the value."""
    files = (path for path in root.rglob("*") if path.is_file() and "private" not in path.relative_to(root).parts)
    return [path for path in files if CANARY.encode() in path.read_bytes()]


def assert_private(file: Path) -> None:
    assert CANARY in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def run(folder: Path, *options: str, **changes: object) -> tuple[dict[str, dict[str, Any]], str]:
    """The trials as the results show them, and everything that was printed."""
    file = write(folder, **changes)
    done = dpsweep("run", file, "--output", folder / "out", "--json", *options, MENDED=str(folder / "mended"))
    assert done.stdout, done.stderr
    return {trial["key"]: trial for trial in json.loads(done.stdout)["trials"]}, done.stdout + done.stderr


RAISED = {
    "raises": "ValueError",
    "raises_ours": "InvalidInput",
    "raises_storage": "StorageError",
    "exits": "SystemExit",
    "interrupts": "KeyboardInterrupt",
}
"""Type of what the model raises, by the function that raises it."""
IN_THIS_PROCESS = ("--address", "in-process")


def raising(*functions: str) -> list[dict[str, str]]:
    return [{"name": "raising_code:Model", "how": how} for how in functions]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("functions", "options"),
    [(("raises", "raises_storage", "exits"), IN_THIS_PROCESS), (("raises_ours", "exits", "interrupts"), ())],
    ids=["in process", "under Ray"],
)
def test_errors_in_training_show_type_and_place_until_they_are_mended(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, functions: tuple[str, ...], options: tuple[str, ...]
) -> None:
    """Beside a trial that finishes; and nothing is left outside the output."""
    (home := tmp_path / "home").mkdir()
    for name, value in {"HOME": str(home), **temporary(shared, tmp_path)}.items():
        monkeypatch.setenv(name, value)
    files, models = SweepFiles(str(tmp_path / "out")), raising(*functions, "does_nothing")
    trials, printed = run(tmp_path, *options, model=models)
    states = [trial["status"] for trial in trials.values()]
    assert sorted(states) == ["failed"] * len(functions) + ["finished"]
    assert (tmp_path / "out" / "report.html").is_file()
    assert not list(shared.iterdir())
    assert not (home / "ray_results").exists()
    assert CANARY not in printed
    assert leaks(tmp_path / "out") == []
    for how in functions:
        name = RAISED[how]
        (key,) = [key for key in trials if trials[key]["labels"]["model"].endswith(f"(how {how})")]
        shown = trials[key]["error"]
        assert f"{name} in {how} (raising_code.py:" in shown
        assert shown.endswith("see private/error.txt in the trial's folder")
        assert shown in printed
        assert_private(Path(files.trial(key).error))
    (tmp_path / "mended").touch()
    trials, _ = run(tmp_path, *IN_THIS_PROCESS, model=models)
    assert {trial["status"] for trial in trials.values()} == {"finished"}
    assert not any(Path(files.trial(key).error).exists() for key in trials)
    assert leaks(tmp_path / "out") == []


def test_raw_research_shows_the_text_and_is_tagged(tmp_path: Path) -> None:
    trials, _ = run(tmp_path, *IN_THIS_PROCESS, model=raising("raises")[0], release="raw")
    (key,) = [key for key in trials if key.startswith("flat-")]
    assert f"bad row {CANARY}" in trials[key]["error"]
    assert b"sensitive" in (tmp_path / "out" / "mlflow.db").read_bytes()
    assert_private(Path(SweepFiles(str(tmp_path / "out")).trial(key).error))


def column(folder: Path, line: str, header: str = "x,y", **params: object) -> dict[str, object]:
    rows = "".join(f"{line.format(i=i)}\n" for i in range(1200))
    file = folder / f"rows{len(list(folder.glob('*.csv')))}.csv"
    file.write_text(f"{header}\n{rows}")
    return {"name": "csv", "path": str(file), "label": "y", **params}


def _png() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, "png")
    return stream.getvalue()


PNG = _png()


def pictures(folder: Path, name: str, content: bytes | None = None, *others: str) -> dict[str, object]:
    """A folder of pictures with one class called ``name``, with a file of this content or none, and other classes."""
    root = folder / f"pictures{len(list(folder.glob('pictures*')))}"
    for each in (name, *others):
        (root / each).mkdir(parents=True)
        if content is not None:
            (root / each / "one.png").write_bytes(content)
    return {"name": "image_folder", "path": str(root), "size": 4}


def groups_of_pictures(folder: Path, name: str) -> str:
    (folder / "groups.csv").write_text(f"{name},x\n{name},y\n")
    return str(folder / "groups.csv")


def plan_cases(folder: Path) -> dict[str, tuple[dict[str, object], str]]:
    """What cannot be planned, and what is told of it."""
    return {
        "raised": ({"data": {"name": "raising_code:rows", "how": "raises"}}, "ValueError in raises (raising_code.py:"),
        "ours": (
            {"data": {"name": "raising_code:rows", "how": "raises_ours"}},
            "InvalidInput in raises_ours (raising_code.py:",
        ),
        "exit": ({"data": {"name": "raising_code:rows", "how": "exits"}}, "SystemExit in exits (raising_code.py:"),
        "refused by us": ({"data": "raising_code:named"}, "InvalidInput in named (raising_code.py:"),
        "preparation": ({"data": "raising_code:prepared"}, "InvalidInput in prepared (raising_code.py:"),
        "model": (
            {"model": {"name": "raising_code:Model", "how": "raises"}},
            "ValueError in raises (raising_code.py:",
        ),
        "many texts": ({"data": column(folder, CANARY + "{i},1")}, "a column has more than 1000 distinct texts"),
        "no header": ({"data": column(folder, "{i},0", CANARY + ",7")}, "there is no column 'y' in"),
        "a name twice": ({"data": column(folder, "{i},0,1", f"{CANARY},{CANARY},y")}, "more than one column of"),
        "a range of no feature": (
            {"data": column(folder, "{i},0", CANARY + ",y", ranges={"x": [0, 1]}, classes=[0, 1])},
            "'x' has a range or categories, but is no feature",
        ),
        "no complete row": ({"data": column(folder, ",0", CANARY + ",y")}, "no row is complete; a column lacks"),
        "texts under such a name": ({"data": column(folder, "t{i},0", CANARY + ",y")}, "a column has more than 1000"),
        "large numbers": (
            {"data": column(folder, "1e308,0\n-1e308,1", CANARY + ",y")},
            "a column has values too large",
        ),
        "picture": ({"data": pictures(folder, CANARY, b"none")}, "cannot read a picture"),
        "empty class": ({"data": pictures(folder, CANARY)}, "data source 'image_folder'"),
        "class like a part": (
            {"data": pictures(folder, CANARY, b"none", "training")},
            "called like a training or test",
        ),
        "groups of pictures": (
            {"data": {**pictures(folder, CANARY, PNG, "b"), "groups": groups_of_pictures(folder, CANARY)}},
            "lacks a column of file and group",
        ),
        "one class": ({"data": column(folder, "{i}," + CANARY)}, "are the same, but classification needs at least 2"),
        "another class": (
            {"data": column(folder, "{i}," + CANARY, classes=["a", "b"])},
            "label column 'y' has a value that is neither declared",
        ),
        "no number": (
            {"data": column(folder, CANARY + ",1", ranges={"x": [0, 1]}, classes=[0, 1])},
            "column 'x' has a range but holds more than numbers",
        ),
        "no table": ({"data": column(folder, CANARY + ",1,2")}, "cannot read"),
    }


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "case",
    [
        *(
            "raised",
            "ours",
            "exit",
            "refused by us",
            "preparation",
            "model",
            "many texts",
            "one class",
            "another class",
        ),
        *("no number", "no table", "no header", "a name twice", "a range of no feature", "no complete row"),
        *("texts under such a name", "large numbers", "picture", "empty class", "class like a part"),
        "groups of pictures",
    ],
)
def test_an_error_of_the_plan_shows_type_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    changes, shown = plan_cases(tmp_path)[case]
    for name, value in {"ROWS": "2", "PYTHONPATH": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["dpsweep", "plan", str(write(tmp_path, **changes))])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capfd.readouterr()
    assert ended.value.code == 2
    assert shown in printed.err
    assert CANARY not in printed.out + printed.err
    assert "the full texts of these errors may quote the data" in printed.err
    assert not (tmp_path / "runs").exists(), "a plan writes nothing"


@pytest.mark.long
def test_a_refused_run_shows_type_and_place_and_a_later_plan_forgets_it(tmp_path: Path) -> None:
    file = write(tmp_path, data={"name": "raising_code:rows", "how": "raises"})
    done = dpsweep("run", file, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert "ValueError in raises (raising_code.py:" in done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert_private(tmp_path / "out" / "private" / "error.txt")
    assert leaks(tmp_path / "out") == []
    done = dpsweep("run", write(tmp_path, epochs=1), "--output", tmp_path / "out", *IN_THIS_PROCESS)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out" / "private" / "error.txt").exists()
