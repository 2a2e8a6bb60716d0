"""Whole attacks, one after the other: what is planted, the command that somebody runs then, and what came of it.

Each begins with copies of two finished sweeps and other files (`World`). Commands run in processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.hostile.of_databases import plant_journal
from tests.hostile.of_folders import COMMANDS, FORGED, KINDS, SWEEP, World, private_key, write_json
from tests.orchestration.processes import PATIENCE, environment, start, wait_until
from tests.orchestration.sample_grids import small

_KEY: Final = "5" * 64
_SOON: Final = 30.0
"""Seconds in which a run that is told to end has ended; others take up to 5 on a machine that does nothing else."""
_CANARY: Final = "CANARY-4711"
_SHOWN: Final = re.compile(re.escape(f"{FORGED:.7f}"[:5]))
_PYTHON: Final = """
import sys, dpsweep
try:
    print(dpsweep.open("runs/small").results().to_csv())
except dpsweep.DpsweepError as error:
    sys.exit(f"error: {error}")
"""
_KILLED: Final = """
import os, signal
replace = os.replace
def cut_off(source, target, **places):
    if str(target).endswith("checkpoint.pt"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target, **places)
os.replace = cut_off
from dpsweep.orchestration.commands.main import main
main()
"""


@dataclass(frozen=True)
class Said:
    """What a command did. code: as `subprocess` gives it; None where it had to be killed. took: seconds."""

    code: int | None
    text: str
    took: float


@dataclass(frozen=True)
class Outcome:
    """attack: what was planted. verdict: refused, harmless, or what must not be."""

    attack: str
    command: str
    verdict: str
    line: str


Check = Callable[[World, Said], str]
"""What must not have happened, in a word; "" for nothing."""


@dataclass(frozen=True)
class Attack:
    """plant: changes a world. commands: names in `COMMANDS`, or whole command lines. check: beyond the general ones.

    told_to_end: SIGTERM is sent once the command has begun.
    """

    name: str
    plant: Callable[[World], None]
    commands: Sequence[str]
    check: Check = lambda world, said: ""
    told_to_end: bool = False
    needs_root: bool = False


def made(folder: Path) -> World:
    """Two finished sweeps, and files that nobody may touch."""
    world = World(folder)
    (world.outside / "folder").mkdir(parents=True)
    (folder.parent / "home").mkdir()
    (world.outside / "file.json").write_text('{"canary": 1}')
    (folder / "sweep.yaml").write_text(SWEEP)
    (folder / "long.yaml").write_text(
        small(clipping="flat", noise="constant", seeds=0, epochs=2000, privacy={"noise_multiplier": 1.0, "delta": 1e-5})
    )
    for command in ("run", "account"):
        said = called(world, COMMANDS[command].split())
        assert said.code == 0, said.text
    shutil.copytree(world.planted, world.other, symlinks=True)
    manifest = world.other / "sweep.json"
    write_json(manifest, {**json.loads(manifest.read_bytes()), "sweep_id": "other"})
    return world


def called(world: World, words: Sequence[str], told_to_end: bool = False) -> Said:
    """Run a command in the world's folder, in a process of its own."""
    trial = str(world.planted / "trials" / private_key(world.other)) if "TRIAL" in words else ""
    named = {"IN": "runs/small", "TRIAL": trial, "STORE": f"sqlite:///{world.planted}/mlflow.db"}
    changes = {"HOME": str(world.root.parent / "home")} | ({"DPSWEEP_KEY": _KEY} if "decrypt" in words else {})
    text, began = world.root / "said", time.monotonic()
    text.unlink(missing_ok=True)
    with contextlib.chdir(world.root):
        process = start(*(named.get(word, word) for word in words), log=text, **changes)
    if told_to_end:
        wait_until(lambda: process.poll() is not None or any(world.root.rglob("checkpoint.pt")), "a checkpoint")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(PATIENCE)
    except AssertionError:  # it was killed
        code = None
    return Said(code, text.read_text(errors="replace") if text.exists() else "", time.monotonic() - began)


def called_in_python(world: World, program: str, *words: str) -> Said:
    """Run a Python program in the world's folder."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=world.root,
        env=environment(HOME=str(world.root.parent / "home")),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return Said(done.returncode, done.stdout, time.monotonic() - began)


def outcomes(folder: Path) -> Iterator[Outcome]:
    """Every attack with each of its commands."""
    template = made(folder / "template")
    for attack in ATTACKS:
        for number, command in enumerate(attack.commands if os.geteuid() == 0 or not attack.needs_root else ()):
            world = World(folder / f"world{number}")
            shutil.copytree(template.root, world.root, symlinks=True)
            attack.plant(world)
            before = world.untouched()
            if command == "open":
                said = called_in_python(world, _PYTHON)
            else:
                said = called(world, COMMANDS.get(command, command).split(), attack.told_to_end)
            told = [line for line in said.text.splitlines() if line.strip()]
            line = next((line for line in told if line.startswith("error:")), told[-1] if told else "")
            found = _wrong(said) or ("destroyed" if world.untouched() != before else "") or attack.check(world, said)
            verdict = found or ("refused" if said.code else "harmless")
            yield Outcome(attack.name, command, verdict, f"{said.took:.1f} s: {line.replace(str(world.root), '')}")
            shutil.rmtree(world.root)


def _wrong(said: Said) -> str:
    if said.code is None:
        return "hung"
    if "Traceback" in said.text:
        return "traceback"
    return "" if said.code in (0, 1, 2, 3, 130) else f"exit code {said.code}"


def _linked(name: str) -> Callable[[World], None]:
    return lambda world: KINDS["link to a sweep"](world.planted / name, world)


def _linked_from(name: str) -> Callable[[World], None]:
    """A link for what `run` would write, in a folder in which there is nothing else yet."""

    def plant(world: World) -> None:
        shutil.rmtree(world.planted)
        world.planted.mkdir()
        target = world.outside / ("folder" if name in ("tune", "trials") else "file.json")
        (world.planted / name).symlink_to(target)

    return plant


def _at(kind: str, name: str) -> Callable[[World], None]:
    return lambda world: KINDS[kind](world.planted / name, world)


def _journal_that_names_a_file(world: World) -> None:
    plant_journal(world.planted / "mlflow.db", world.outside / "file.json")


def _endless_view(world: World) -> None:
    """Who asks for experiments is answered without end."""
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS name FROM n"
    with contextlib.closing(sqlite3.connect(world.planted / "mlflow.db")) as database:
        database.execute("ALTER TABLE experiments RENAME TO others")
        database.execute(f"CREATE VIEW experiments AS {endless}")


def _at_the_result(kind: str) -> Callable[[World], None]:
    return lambda world: KINDS[kind](world.planted / "trials" / private_key(world.planted) / "result.json", world)


def _of_3_gb(name: str) -> Callable[[World], None]:
    def plant(world: World) -> None:
        with (world.planted / name).open("wb") as file:
            file.truncate(3 * 10**9)

    return plant


def _file_of_another(world: World) -> None:
    _encrypted_file(world)
    (world.root / "shown").write_text("of another")
    os.chown(world.root / "shown", 65533, 65533)
    os.link(world.root / "shown", world.root / "kept open")


def _given_away(world: World) -> None:
    for path in (world.planted, *world.planted.rglob("*")):
        os.lchown(path, 65533, 65533)


def _folder_of_all(world: World) -> None:
    _encrypted_file(world)
    (world.root / "open").mkdir()
    (world.root / "open").chmod(0o777)


def _encrypted_file(world: World) -> None:
    mine = str(world.root / "mine")
    write = f"from dpsweep.accounting.records.sealed import write_private; write_private({mine!r}, b'mine')"
    subprocess.run([sys.executable, "-c", write], env=environment(DPSWEEP_KEY=_KEY), check=True)


def _became_ours(world: World, said: Said) -> str:
    kept = (world.root / "kept open").read_bytes()
    if kept != b"of another":
        return "given away"
    shown = world.root / "shown"
    is_ours = shown.stat().st_uid == os.geteuid() and shown.stat().st_mode & 0o777 == 0o600
    return "" if said.code == 0 and is_ours and shown.read_bytes() == b"mine" else "not shown"


def _repeats(world: World, said: Said) -> str:
    """What refuses a claim quotes it."""
    table = world.root / "table.csv"
    shown = (said.text if not said.code else "") + (table.read_text() if table.exists() else "")
    return "repeated" if _SHOWN.search(shown) else ""


def _pipe_for_the_table(world: World) -> None:
    shutil.rmtree(world.planted)
    os.mkfifo(world.root / "people.csv")
    data = {"name": "csv", "path": "people.csv", "label": "y"}
    (world.root / "sweep.yaml").write_text(small(data=data, clipping="flat", noise="constant", seeds=0))


def _no_header(world: World) -> None:
    rows = "".join(f"{number},{number % 2}\n" for number in range(50))
    (world.root / "people.csv").write_text(f"{_CANARY},0\n{rows}")
    data = {"name": "csv", "path": "people.csv", "label": "y"}
    (world.root / "sweep.yaml").write_text(small(data=data, clipping="flat", noise="constant", seeds=0))
    shutil.rmtree(world.planted)


def _quotes(world: World, said: Said) -> str:
    public = (path for path in world.planted.rglob("*") if path.is_file() and "private" not in path.parts)
    shown = (said.text, *(path.read_text(errors="replace") for path in public))
    return "quoted" if any(_CANARY in text for text in shown) else ""


def _cut_off(world: World) -> None:
    """A run is killed by SIGKILL when its first checkpoint is written and has not yet its name."""
    shutil.rmtree(world.planted)
    said = called_in_python(world, _KILLED, "run", "long.yaml", "--output", "runs/small", "--address", "in-process")
    assert said.code == -signal.SIGKILL, said.text
    assert list(world.planted.rglob(".checkpoint.pt.*.partial"))


def _keeps_a_key(world: World, said: Said) -> str:
    return "kept the key" if list(world.planted.rglob("*checkpoint*")) else ""


def _is_late(world: World, said: Said) -> str:
    return "" if said.took < _SOON else "late"


_DELETING: Final = ("delete", "prune", "forget")
_SHOWING: Final = ("verify", "report", "best", "export", "compare", "account", "owner-report", "run --from", "open")
_READING: Final = ("status", "list", "export", "compare", "verify", "report", "best", "record", "open")
_OPENING: Final = ("record", "run", "status", "account", "best IN --register best")
"""Commands that may open MLflow's database."""
_RUN_LONG: Final = "run long.yaml --output runs/new --address in-process --tracking-uri none"
ATTACKS: Final[tuple[Attack, ...]] = (
    *(Attack(f"{name} linked to another sweep", _linked(name), _DELETING) for name in ("tuning", "trials")),
    *(
        Attack(f"{name} linked elsewhere in a new folder", _linked_from(name), ("run",))
        for name in ("dpsweep.log", "mlflow.db", "tune", "trials")
    ),
    Attack(".lock linked to a file", _at("link to a file", ".lock"), (*_DELETING, "account", "run")),
    Attack(
        "the output is a file of another user",
        _file_of_another,
        ("decrypt mine --to shown",),
        _became_ours,
        needs_root=True,
    ),
    Attack("the folder of another user", _given_away, (*_DELETING, "run", "account"), needs_root=True),
    Attack("a folder that is open to all", _at("open to all", "trials"), (*_DELETING, "run")),
    Attack("the output's folder is open to all", _folder_of_all, ("decrypt mine --to open/shown",)),
    Attack("result.json forged and resealed", _at_the_result("forged claim"), _SHOWING, _repeats),
    *(Attack(f"a pipe for {name}", _at("pipe", name), _READING) for name in ("results.json", "status.json")),
    Attack("a pipe for .lock", _at("pipe", ".lock"), (*_DELETING, "account", "run", "report")),
    Attack("a pipe for the table", _pipe_for_the_table, ("plan", "run", "init people.csv --label y --to drafted.yaml")),
    Attack("SIGTERM while it trains", lambda world: None, (_RUN_LONG,), _is_late, told_to_end=True),
    *(Attack(f"{name} of 3 GB", _of_3_gb(name), _READING) for name in ("results.json", "status.json", "sweep.json")),
    Attack("two links to . at the top", _at("loops", "sweep.json"), (*_DELETING, "verify", "report")),
    Attack("a journal of mlflow.db that names a file", _journal_that_names_a_file, _OPENING),
    Attack("mlflow.db with an endless view", _endless_view, _OPENING),
    Attack("killed in its first checkpoint", _cut_off, ("forget",), _keeps_a_key),
    Attack("a table without header", _no_header, ("plan", "run"), _quotes),
)
