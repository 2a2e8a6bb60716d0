"""A sweep's folder from somebody else: what lies there is planted, at every place of the layout, for every command.

Nothing outside the folder may change, no command may hang or end in a traceback, and what is refused is refused in
lines that begin with ``error:``. Places are read off `SweepFiles` and `TrialFiles`, so that a new file is tried too.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Final

from accounting.errors import DpsweepError
from accounting.records.layout import TrialFiles
from orchestration.records.layout import SweepFiles
from tests.orchestration.processes import environment, set_up_command
from tests.orchestration.sample_grids import small
from tests.warm import FORKS

SWEEP: Final = small(
    model="logistic",
    clipping=["none", "flat"],
    noise="constant",
    seeds=0,
    epochs=1,
    attacks={"loss_threshold": True},
)
COMMANDS: Final[Mapping[str, str]] = {
    "run": "run sweep.yaml --output IN --address in-process",
    "verify": "verify IN",
    "report": "report IN --json",
    "account": "account IN --address in-process --delta 1e-6 --tracking-uri none",
    "prune": "prune IN --norms",
    "delete": "delete IN --yes",
    "forget": "forget IN",
    "best": "best IN",
    "export": "export IN --to table.csv",
    "compare": "compare IN runs/other",
    "list": "list IN",
    "status": "status IN",
    "decrypt": "decrypt PLACE --to shown",
    "owner-report": "owner-report TRIAL --example-id 4",
    "epsilon": "epsilon --trial TRIAL --delta 1e-5 --individual rdp",
    "plan": "plan sweep.yaml --no-code",
    "init": "init PLACE --label y --to drafted.yaml",
    "open": "",
}
"""Commands by name. IN: the folder, which is runs/small; PLACE: where something is planted. open: `dpsweep.open`."""
PATIENCE: Final = 90.0
"""Seconds after which a command hangs; on an idle machine the longest takes 5."""
ATTACKER: Final = 65533
VICTIM: Final = 65534
"""Users: whose folder it is, and who runs commands on it, where another user is tried."""
HUGE: Final = 2**40


@dataclass(frozen=True)
class World:
    """Folders of one attempt: a planted sweep, and what nothing may touch: another sweep and other files."""

    root: Path

    @property
    def planted(self) -> Path:
        return self.root / "runs" / "small"

    @property
    def other(self) -> Path:
        return self.root / "runs" / "other"

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    def untouched(self) -> dict[str, tuple[int, ...] | str]:
        """Everything outside the planted sweep, with what would show a change."""
        return {
            str(path): _state(path)
            for folder in (self.other, self.outside)
            for path in sorted((folder, *folder.rglob("*")))
        }


def _state(path: Path) -> tuple[int, ...] | str:
    found = path.lstat()
    content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(found.st_mode) else ""
    return f"{found.st_mode:o} {found.st_uid} {found.st_size} {content}"


def _link_to_the_other(path: Path, world: World) -> None:
    _made_way(path).symlink_to(world.other / path.relative_to(world.planted))


def _link_outside(path: Path, world: World) -> None:
    is_folder = path.is_dir()
    _made_way(path).symlink_to(world.outside / ("folder" if is_folder else "file.json"))


def _link_to_nothing(path: Path, world: World) -> None:
    _made_way(path).symlink_to(world.outside / "nothing")


def _link_to_here(path: Path, world: World) -> None:
    _made_way(path).symlink_to(".")


def _pipe(path: Path, world: World) -> None:
    os.mkfifo(_made_way(path))


def _socket(path: Path, world: World) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{short}/s")  # a name of more than 107 bytes is none
        os.rename(f"{short}/s", _made_way(path))


def _device(path: Path, world: World) -> None:
    os.mknod(_made_way(path), 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # as /dev/zero, which never ends


def _other_kind(path: Path, world: World) -> None:
    """A file in the place of a folder, and a folder in that of a file."""
    is_folder = path.is_dir()
    _made_way(path)
    path.write_bytes(b"{}") if is_folder else path.mkdir()


def _of_another(path: Path, world: World) -> None:
    if not path.exists():
        _made_way(path).write_bytes(b"{}")
    os.chown(path, ATTACKER - 1, ATTACKER - 1)


def _open_to_all(path: Path, world: World) -> None:
    if not path.exists():
        _made_way(path).write_bytes(b"{}")
    path.chmod(0o777 if path.is_dir() else 0o666)


def _huge(path: Path, world: World) -> None:
    with _made_way(path).open("wb") as file:
        file.truncate(HUGE)


def _loops(path: Path, world: World) -> None:
    """Two links to the folder that they lie in, at the top of the sweep and at the place."""
    for folder in (world.planted, path if path.is_dir() else path.parent):
        for name in ("one", "two"):
            if folder.is_dir() and not (folder / name).is_symlink():
                (folder / name).symlink_to(".")


KINDS: Final[Mapping[str, Callable[[Path, World], None]]] = {
    "link to a sweep": _link_to_the_other,
    "link outside": _link_outside,
    "dangling link": _link_to_nothing,
    "link to .": _link_to_here,
    "pipe": _pipe,
    "socket": _socket,
    "device": _device,
    "other kind": _other_kind,
    "of another": _of_another,
    "open to all": _open_to_all,
    "huge": _huge,
    "loops": _loops,
}


def _made_way(path: Path) -> Path:
    """The path, at which nothing is any more; folders above it are there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def places(folder: Path) -> list[str]:
    """Every place of the layout, relative to the sweep's folder: named by the layout, or written by the sweep."""
    sweep = SweepFiles(str(folder))
    key = _private_key(folder)
    trial = sweep.trial(key)
    named = [*_paths(sweep), *_paths(trial), *sweep.in_place, sweep.attempts(key), f"{sweep.attempts(key)}/000001.json"]
    of_tuning = SweepFiles(sweep.tuning)
    named += [of_tuning.manifest, of_tuning.trials, of_tuning.lock, of_tuning.trial(key).checkpoint]
    named += [
        trial.root,
        trial.accounted_again("delta=1e-06,rdp"),
        f"{trial.accounted_again('delta=1e-06,rdp')}/account.json",
    ]
    written = [path for path in (Path(trial.root), Path(sweep.attempts_of_all)) for path in path.rglob("*")]
    found = {os.path.relpath(path, folder) for path in (*named, *map(str, written))}
    return sorted(place for place in found if not place.startswith("..") and place != ".")


def _paths(files: SweepFiles | TrialFiles) -> Iterator[str]:
    """What the properties of a layout name; those that take arguments are given by `places`."""
    for name, value in vars(type(files)).items():
        if isinstance(value, property) and isinstance(found := getattr(files, name), str | Path):
            yield str(found)


def _private_key(folder: Path) -> str:
    return next(name for name in sorted(os.listdir(folder / "trials")) if name.startswith("flat"))


@dataclass
class Counts:
    """What became of attempts with one command and kind. wrong: what must not be, by place."""

    refused: int = 0
    harmless: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Template:
    """A finished sweep and another one, made once; `World`s are copies."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> Template:
        runs = folder / "runs"
        runs.mkdir(parents=True)
        (folder / "sweep.yaml").write_text(SWEEP)
        (folder / "outside" / "folder").mkdir(parents=True)
        (folder / "outside" / "file.json").write_text('{"canary": 1}')
        (folder / "outside" / "folder" / "canary").write_text("canary")
        for command in ("run", "account"):
            line = COMMANDS[command].replace("IN", "runs/small")
            code, said = called(folder, line.split(), None, 900.0)
            assert code == 0, said
        shutil.copytree(runs / "small", runs / "other", symlinks=True)
        return cls(folder)

    def places(self) -> list[str]:
        return places(self.folder / "runs" / "small")

    def copied(self, root: Path) -> World:
        shutil.copytree(self.folder, root, symlinks=True)
        return World(root)


def attempt(template: Template, command: str, kind: str, place: str, user: int | None, counts: Counts) -> None:
    """Plant one thing at one place, run one command there, and count what it does.

    user: who runs the command, on a folder of `ATTACKER` in which all may write; None: this user, on its own folder.
    """
    with tempfile.TemporaryDirectory(prefix="hostile-") as temporary:
        Path(temporary).chmod(0o755)
        world = template.copied(Path(temporary) / "world")
        path = world.planted / place
        KINDS[kind](path, world)
        if user is not None:
            _give_away(world, user)
        before = world.untouched()
        words = [_in_place(word, world, path) for word in COMMANDS[command].split()]
        began = time.monotonic()
        code, said = called(world.root, words, user)
        wrong = "hung" if code is None else "traceback" if "Traceback" in said else ""
        if world.untouched() != before:
            wrong = "destroyed"
        elif not wrong and code not in (0, 1, 2):
            wrong = f"exit code {code}"
        elif not wrong and code and "error: " not in said:
            wrong = "refused without a word"
        if wrong:
            seconds = time.monotonic() - began
            counts.wrong.append(f"{wrong}: {command} x {kind} at {place} ({seconds:.1f} s): {said[-600:]}")
        elif code:
            counts.refused += 1
        else:
            counts.harmless += 1


def _in_place(word: str, world: World, path: Path) -> str:
    trial = world.planted / "trials" / _private_key(world.root / "runs" / "other")
    return {"IN": "runs/small", "PLACE": str(path), "TRIAL": str(trial)}.get(word, word)


def _give_away(world: World, user: int) -> None:
    """The planted sweep becomes another user's, who lets everybody write there; the rest becomes the victim's."""
    for path in (world.root, *world.root.rglob("*")):
        is_planted = path.is_relative_to(world.planted)
        os.lchown(path, *(2 * [ATTACKER if is_planted else user]))
        if is_planted and not path.is_symlink():
            path.chmod(0o777 if path.is_dir() else 0o666)


def called(folder: Path, arguments: list[str], user: int | None, patience: float = PATIENCE) -> tuple[int | None, str]:
    """Exit code and stderr of the command in a process of its own in a folder; None where it did not end.

    No arguments: what Python's `dpsweep.open` shows.
    """
    with tempfile.TemporaryDirectory() as said:
        Path(said).chmod(0o777)
        errors = Path(said) / "err"
        errors.touch()  # so that it is there, and empty, if the process ends before it writes
        errors.chmod(0o666)
        process = FORKS.Process(target=_called, args=(str(folder), arguments, user, str(errors)))
        process.start()
        connection.wait([process.sentinel], patience)
        if process.exitcode is None:
            process.kill()
            process.join()
            return None, "no end"
        process.join()
        return process.exitcode, errors.read_text(errors="replace")


def _called(folder: str, arguments: list[str], user: int | None, err: str) -> None:
    from dpsweep import open as opened
    from dpsweep.command import main

    home = f"{folder}/home"
    os.makedirs(home, exist_ok=True)
    set_up_command(["dpsweep", *arguments], environment(HOME=home), folder, "/dev/null", err)
    if user is not None:
        os.chown(home, user, user)
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    if arguments:
        main()
        return
    try:
        sweep = opened("runs/small")
        sweep.results()
    except DpsweepError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


Cell = tuple[str, str, str]
"""A command, a kind and a place."""


def cells(template: Template, commands: Sequence[str], kinds: Sequence[str]) -> list[Cell]:
    """Every attempt, in an order in which any beginning is spread over commands, kinds and places.

    `init` reads no sweep: for it one place stands for all.
    """
    every = [
        (command, kind, place)
        for command in commands
        for kind in kinds
        for place in (template.places() if command != "init" else ["results.json"])
    ]
    random.Random(0).shuffle(every)
    return every


def tried(template: Template, wanted: Sequence[Cell], user: int | None, jobs: int) -> dict[tuple[str, str], Counts]:
    """Try the cells, several at a time; counts by command and kind."""
    found: dict[tuple[str, str], Counts] = defaultdict(Counts)

    def one(cell: Cell) -> None:
        attempt(template, *cell, user, found[cell[:2]])

    with ThreadPoolExecutor(jobs) as workers:
        list(workers.map(one, wanted))
    return found
