"""Values of the data that are planted where they may leak: what a sweep writes outside private folders has none.

They are a word that user code raises and prints, one feature of one row, and every norm, loss and epsilon of single
examples. Each release mode is run with code that prints, code that raises, and code that kills the driver.
"""

from __future__ import annotations

import base64
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dpsweep.accounting.records.encryption import KEY_VARIABLE
from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.environment import IN_PROCESS
from tests.orchestration.processes import dpsweep
from tests.orchestration.sample_grids import small

WORD = "kanarienvogel"
FEATURE = 41234.567
"""A feature of one row, in no other; the code holds it in two pieces, because a sweep stores its code's text."""
OWN_CODE = """
import math, os, signal, sys
import numpy as np
from torch import nn
from dpsweep.workers.data import Source, make_split

WORD, FEATURE = "kanarien" "vogel", 41000.0 + 234.567

def rows():
    draw = np.random.default_rng(0)
    features = draw.normal(size=(160, 3)).astype(np.float32)
    features[7, 0] = FEATURE
    return Source("own", make_split(features, np.arange(160) % 2, np.zeros(160, int)), None, ("all",), ("no", "yes"))

class Model(nn.Module):
    def __init__(self, feature_shape, num_classes, how):
        super().__init__()
        self.linear, self.how, self.calls = nn.Linear(math.prod(feature_shape), num_classes), how, 0

    def forward(self, x):
        self.calls += 1
        if self.training and self.calls > 12 and not os.path.exists(os.environ["MENDED"]):
            HOW[self.how]()
        return self.linear(x.flatten(1))

def prints():
    print("row", WORD, FEATURE, flush=True)
    print("row", WORD, FEATURE, file=sys.stderr, flush=True)

def raises():
    raise ValueError(f"bad row {WORD} {FEATURE}")

def kills():
    os.kill(os.getpid(), signal.SIGKILL)

HOW = {each.__name__: each for each in (prints, raises, kills)}
"""


def canary_sweep(folder: Path, how: list[str], release: str) -> Path:
    """The file of a sweep whose models do ``how``, its code beside it, and folder/tmp."""
    (folder / "canary_code.py").write_text(OWN_CODE)
    (folder / "tmp").mkdir(exist_ok=True)
    sweep = folder / "sweep.yaml"
    text = small(
        data="canary_code:rows",
        model=[{"name": "canary_code:Model", "how": each} for each in how],
        sampling={"method": "poisson", "batch_size": 40},
        clipping="flat",
        noise="constant",
        seeds=0,
        epochs=3,
        attacks={"loss_threshold": True},
        release=release,
    )
    sweep.write_text(text)
    return sweep


def run(folder: Path, how: list[str], release: str, output: Path | None = None, **variables: str) -> tuple[int, str]:
    """The exit code of a sweep whose models do ``how``, and what it printed; temporary files go to folder/tmp.

    output: where the sweep goes; folder/out if None.
    """
    done = dpsweep(
        *("run", canary_sweep(folder, how, release), "--output", output or folder / "out", "--address", IN_PROCESS),
        TMPDIR=str(folder / "tmp"),
        MENDED=str(folder / "mended"),
        **variables,
    )
    return done.returncode, done.stdout + done.stderr


def secrets(root: Path) -> Iterator[tuple[str, bytes]]:
    """What may be in no public file: name and bytes, as text and as numbers of 32 and 64 bits."""
    yield "word", WORD.encode()
    yield "feature", f"{FEATURE:.2f}"[:-1].encode()
    yield "feature, 32 bits", struct.pack("<f", FEATURE)
    yield "feature, 64 bits", struct.pack("<d", float(np.float32(FEATURE)))
    for trial in root.glob("trials/*"):
        files = TrialFiles(str(trial))
        if not (trial / "private" / "norms" / "complete.json").exists():  # it failed, perhaps after a first snapshot
            continue
        shards = NormShards(files.norms)
        columns = [column for part in map(shards.read, shards.parts) for column in (part.norms, part.losses)]
        values = np.concatenate([column.ravel() for column in columns]).astype(np.float64)
        if (trial / "private" / "epsilons").exists():
            values = np.concatenate([values, read_epsilons(files.epsilons).upper])
        for value in np.unique(values[np.isfinite(values)]).tolist():
            for text in {repr(value), repr(np.float32(value).item()), str(np.float32(value))}:
                if len(text.replace(".", "").strip("0")) >= 7:
                    yield f"value {text}", text.encode()
            yield f"value {value}, 64 bits", struct.pack("<d", value)


def leaks(folder: Path, hidden: str = "private") -> list[tuple[str, str]]:
    """Files outside folders called ``hidden`` with what they hold of the secrets; temporary files are none of them."""
    wanted = dict(secrets(folder / "out"))
    assert len(wanted) > 400
    roots = (folder / "out", folder / "tmp")
    paths = [path for root in roots for path in root.rglob("*") if path.is_file() and hidden not in path.parts]
    contents = {path: path.read_bytes() for path in paths}
    return [(path.name, name) for path, held in contents.items() for name, secret in wanted.items() if secret in held]


@pytest.mark.long
@pytest.mark.parametrize("release", ["none", "private"])
def test_no_canary_leaves_the_private_folders(tmp_path: Path, release: str) -> None:
    """After prints, raised errors and a killed driver, and again after the sweep was continued to its end."""
    code, printed = run(tmp_path, ["prints", "raises", "kills"], release)
    assert code == -9
    assert WORD in printed, "what user code prints is not withheld on the terminal of an in-process run"
    assert leaks(tmp_path) == []
    errors = list((tmp_path / "out").glob("trials/*/private/error.txt"))
    assert len(errors) == 1
    assert WORD in errors[0].read_text()
    (tmp_path / "mended").touch()
    code, printed = run(tmp_path, ["prints", "raises", "kills"], release)
    assert code == 0, printed
    assert WORD not in printed
    assert leaks(tmp_path) == []
    out, other, made = tmp_path / "out", tmp_path / "tmp" / "other", tmp_path / "tmp"
    assert run(tmp_path, ["prints"], release, other)[0] == 0
    for arguments in (
        ("list", out),
        ("status", out),
        ("export", out, "--to", made / "table.csv"),
        ("compare", out, other, "--html", made / "comparison.html"),
        ("delete", other, "--yes"),
    ):
        done = dpsweep(*arguments)
        assert done.returncode == 0, done.stderr
        (made / f"{arguments[0]}.txt").write_text(done.stdout + done.stderr)
    assert leaks(tmp_path) == [], "nor does what other commands print and write"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and "private" not in path.parts}
    done = dpsweep("account", out, "--address", IN_PROCESS, "--delta", "1e-6")
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in before} == before, "account writes private files only"


@pytest.mark.long
def test_with_a_key_no_canary_is_in_any_file_and_the_key_in_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prints, raised errors and a killed driver, and after the sweep was continued; the private folders too."""
    key = "0badc0de" * 8
    monkeypatch.setenv(KEY_VARIABLE, key)
    for expected in (-9, 0):
        code, printed = run(tmp_path, ["prints", "raises", "kills"], "none", DPSWEEP_KEY=key)
        assert code == expected, printed
        assert key not in printed
        assert leaks(tmp_path, hidden="") == []
        assert len(list((tmp_path / "out").glob("trials/*/private/checkpoint.pt"))) == (2 if expected else 0)
        held = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        spellings = (key.encode(), bytes.fromhex(key), base64.b64encode(bytes.fromhex(key)))
        assert len(held) > 30
        assert not [each for each in held for spelling in spellings if spelling in each]
        (tmp_path / "mended").touch()


@pytest.mark.long
def test_raw_research_shows_canaries_to_their_owner_alone(tmp_path: Path) -> None:
    code, printed = run(tmp_path, ["prints", "raises"], "raw")
    assert code == 1, printed
    held = {name for name, secret in leaks(tmp_path) if secret == "word"}
    assert {"report.html", "results.json"} <= held
    out = tmp_path / "out"
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert not [path for path in (tmp_path / "tmp").rglob("*") if path.is_file() and WORD.encode() in path.read_bytes()]
