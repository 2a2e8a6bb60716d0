"""Every command on a planted folder: nothing outside it may change, and no command may hang or end in a traceback.

What is refused is refused in lines that begin with ``error:``, and no forged epsilon is repeated. Commands run in
processes that are forked from one which has run each of them before: that costs a twentieth of a new interpreter.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Final

import typer.main

from dpsweep.accounting.errors import DpsweepError
from tests.hostile.of_folders import (
    ATTACKER,
    CHANGES_OF_RECORDS,
    COMMANDS,
    FORGED,
    KINDS,
    SWEEP,
    VICTIM,
    World,
    places,
    private_key,
    role_of,
    write_json,
)
from tests.orchestration.processes import environment, set_up_command
from tests.warm import FORKS

PATIENCE: Final = 240.0
"""Seconds after which a command hangs; on an idle machine the longest takes 5."""
_REPEATED: Final = re.compile(re.escape(f"{FORGED:.7f}"[:5]) + r"[0-9]*(?![0-9])")
"""A forged epsilon, as it is or rounded."""
_COMMANDING: Final = re.compile(r"\x1b\]|^error: nothing", re.MULTILINE)
"""What a planted name or text would do to a terminal, or say in the name of the command."""
OF_ROOT: Final = frozenset({"device", "of another"})
"""Kinds that only root can plant."""
Cell = tuple[str, str, str]
"""A command, a kind and a place."""
Pair = tuple[tuple[int, str], tuple[int, str]]
"""Two entries of a cell, each with its axis."""


@dataclass
class Counts:
    """What became of attempts with one command and kind. wrong: what must not be, with its place."""

    refused: int = 0
    harmless: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Template:
    """A finished sweep and another one, made once; `World`s are copies. seed: of what is planted."""

    folder: Path
    seed: int = 0

    @classmethod
    def made(cls, folder: Path, seed: int, warmed: Iterable[str] = COMMANDS) -> Template:
        """Make the folders, and run the commands ``warmed`` in this process, so that it has loaded what they need.

        Forks of it build no parser of command lines, and look for no garbage among what is loaded.
        """
        typer.main.get_command = cache(typer.main.get_command)
        runs = folder / "runs"
        runs.mkdir(parents=True)
        (folder / "sweep.yaml").write_text(SWEEP)
        (folder / "outside" / "folder").mkdir(parents=True)
        for name in ("file.json", "twin.json"):
            (folder / "outside" / name).write_text('{"canary": 1}')
        (folder / "outside" / "folder" / "canary").write_text("canary")
        made = cls(folder, seed)
        for command in ("run", "account"):
            made._run(World(folder), command)
        shutil.copytree(runs / "small", runs / "other", symlinks=True)
        manifest = runs / "other" / "sweep.json"
        write_json(manifest, {**json.loads(manifest.read_bytes()), "sweep_id": "other"})  # else they are one sweep
        for number, command in enumerate(warmed):
            world = made.copied(folder.parent / f"warm{number}")  # MLflow keeps a database open by its path
            made._run(world, command)
            shutil.rmtree(world.root)
        for figure in runs.glob("*/mlflow-artifacts/*/artifacts/figures/*.html"):
            figure.write_bytes(b"")  # nothing reads these megabytes, and each attempt copies them
        gc.collect()
        gc.freeze()
        return made

    def _run(self, world: World, command: str) -> None:
        """Run a command on a folder in which nothing is planted."""
        os.chdir(world.root)
        code = _command(words_of(command, world, world.planted / "results.json"))
        assert code == 0 or command in ("init", "decrypt", "predict"), f"{command}: {code}"
        os.chdir("/")

    def copied(self, root: Path, lot: int = 0) -> World:
        shutil.copytree(self.folder, root, symlinks=True)
        return World(root, lot)


def every_cell(template: Template, commands: Sequence[str], kinds: Sequence[str]) -> list[Cell]:
    """Every attempt. `init` reads no sweep: for it one place stands for all."""
    planted = template.folder / "runs" / "small"
    return [
        (command, kind, place)
        for command in commands
        for kind in kinds
        for place in (places(planted) if command != "init" else ["results.json"])
        if kind not in CHANGES_OF_RECORDS or (place.endswith(".json") and (planted / place).is_file())
    ]


def chosen_cells(every: Sequence[Cell], seed: int) -> list[Cell]:
    """Of all attempts, one for every command, kind and role; every pair of command, kind and place is among them.

    Places of one role are opened by the same code. Of these a command and a kind meet the one whose turn it is for the
    two; changes of records are tried at every record. seed: of the order, in which cells with a new pair come first.
    """
    commands, kinds = (list(dict.fromkeys(cell[axis] for cell in every)) for axis in (0, 1))
    by_role: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in every:
        by_role[cell[0], cell[1], role_of(cell[2])].append(cell)
    chosen: list[Cell] = []
    for (command, kind, _), found in by_role.items():
        turn = commands.index(command) + kinds.index(kind)
        chosen += found if kind in CHANGES_OF_RECORDS else [found[turn % len(found)]]
    missing = pairs(every) - pairs(chosen)
    for cell in every:
        if new := missing & pairs([cell]):
            missing -= new
            chosen.append(cell)
    random.Random(seed).shuffle(chosen)
    seen: set[Pair] = set()
    first: list[Cell] = []
    rest: list[Cell] = []
    for cell in chosen:
        (rest if pairs([cell]) <= seen else first).append(cell)
        seen |= pairs([cell])
    return [*first, *rest]


def pairs(cells: Iterable[Cell]) -> set[Pair]:
    """The pairs of command and kind, of kind and place, and of command and place."""
    return {pair for cell in cells for pair in itertools.combinations(enumerate(cell), 2)}


@dataclass(frozen=True)
class Tried:
    """What became of all attempts. pairs: how many of all pairs were among them. cpu: their CPU time in seconds."""

    attempts: int
    pairs: int
    all_pairs: int
    cpu: float
    counts: Mapping[tuple[str, str], Counts]


@dataclass(frozen=True)
class Asked:
    """Which attempts to make: those of `chosen_cells` or, if is_full, `every_cell`; of these at most ``most`` from
    number ``first`` on.

    second_user: one user runs the commands on another's folder, in which all may write; else on his own. jobs:
    attempts at a time. seed: of the order of the attempts.
    """

    commands: Sequence[str]
    kinds: Sequence[str]
    is_full: bool = False
    most: int | None = None
    second_user: bool = False
    jobs: int = 2
    seed: int = 0
    first: int = 0

    def cells(self, template: Template) -> tuple[list[Cell], set[Pair]]:
        """The attempts in their order, and the pairs of all that could be made."""
        every = every_cell(template, self.commands, self.kinds)
        chosen = chosen_cells(every, self.seed)
        cells = [*chosen, *(sorted(set(every) - set(chosen)) if self.is_full else ())][self.first :]
        return cells[: self.most], pairs(every)


def tried(asked: Asked) -> Tried:
    """Make the attempts."""
    if os.geteuid() != 0:
        assert not asked.second_user, "only root can be two users"
        asked = replace(asked, kinds=[kind for kind in asked.kinds if kind not in OF_ROOT])
    counts: dict[tuple[str, str], Counts] = defaultdict(Counts)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the server of forks: a fork waits for ever for threads that it has not
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        Path(folder).chmod(0o755)
        process = FORKS.Process(target=_try_all, args=(folder, asked))
        process.start()
        process.join()
        assert process.exitcode == 0, Path(folder, "said").read_text(errors="replace")[-4000:]
        lines = [json.loads(line) for line in Path(folder, "verdicts").read_text().splitlines()]
        all_pairs = int(Path(folder, "pairs").read_text())
    for command, kind, _, verdict, more, _ in lines:
        match verdict:
            case "refused":
                counts[command, kind].refused += 1
            case "harmless":
                counts[command, kind].harmless += 1
            case _:
                counts[command, kind].wrong.append(f"{verdict}: {more}")
    made = len(pairs(tuple(line[:3]) for line in lines))
    return Tried(len(lines), made, all_pairs, sum(line[-1] for line in lines), counts)


def _try_all(folder: str, asked: Asked) -> None:
    root = Path(folder)
    (root / "home").mkdir()
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    changes = environment(HOME=f"{folder}/home", TMPDIR=f"{folder}/tmp")
    set_up_command(["dpsweep"], changes, folder, "/dev/null", f"{folder}/said")
    template = Template.made(root / "template", asked.seed)
    user = VICTIM if os.geteuid() == 0 else None
    if user is not None:
        for path in (root / "home", *(root / "home").rglob("*")):
            os.lchown(path, user, user)
    cells, all_pairs = asked.cells(template)
    (root / "pairs").write_text(str(len(all_pairs)))
    judges = []
    for share in range(asked.jobs):
        if not (judge := os.fork()):
            code = 1
            try:
                _judge(template, cells[share :: asked.jobs], user, asked.second_user, root / "verdicts")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        judges.append(judge)
    codes = [os.waitstatus_to_exitcode(os.waitpid(judge, 0)[1]) for judge in judges]
    sys.exit(max(map(abs, codes)))


def _judge(template: Template, share: Sequence[Cell], user: int | None, second_user: bool, verdicts: Path) -> None:
    with verdicts.open("a") as lines:
        for cell in share:
            before = _cpu()
            found = attempt(template, *cell, user, second_user)
            lines.write(f"{json.dumps((*cell, *found, _cpu() - before))}\n")
            lines.flush()


def _cpu() -> float:
    """CPU time in seconds of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def attempt(
    template: Template, command: str, kind: str, place: str, user: int | None, second_user: bool
) -> tuple[str, str]:
    """Plant one thing at one place, run one command there, and say what it did, and where that must not be, how."""
    root = Path(tempfile.mkdtemp(prefix="world-", dir=template.folder.parent))
    try:
        root.chmod(0o755)
        lot = zlib.crc32(repr((command, kind, place, template.seed)).encode())
        world = template.copied(root / "world", lot)
        path = world.planted / place
        if user is not None:
            give_away(world, user, ATTACKER if second_user else user)
        KINDS[kind](path, world)
        if second_user:
            open_to_everybody(world)
        before, began = world.untouched(), time.monotonic()
        code, said = called(world, words_of(command, world, path), user)
        shown = said + "".join(file.read_text() for file in (world.root / "table.csv",) if file.exists())
        if world.untouched() != before:
            verdict = "destroyed"
        elif code is None:
            verdict = "hung"
        elif "Traceback" in said:
            verdict = "traceback"
        elif _COMMANDING.search(said):
            verdict = "shown raw"
        elif code not in (0, 1, 2, 3):
            verdict = f"exit code {code}"
        elif code and "error: " not in said:
            verdict = "refused without a word"
        elif not code and kind == "forged claim" and not command.startswith("status") and _REPEATED.search(shown):
            verdict = "repeated"
        else:
            return ("refused" if code else "harmless"), ""
        return verdict, f"{command} x {kind} at {place} ({time.monotonic() - began:.1f} s): {said[-600:]}"
    finally:
        _remove(root)


def words_of(command: str, world: World, path: Path) -> list[str]:
    words = COMMANDS[command].split()
    named = {"IN": "runs/small", "/IN": str(world.planted), "PLACE": str(path)}
    named["STORE"] = f"sqlite:///{world.planted}/mlflow.db"
    if "TRIAL" in words:
        named["TRIAL"] = str(world.planted / "trials" / private_key(world.other))
    return [named.get(word, word) for word in words]


def give_away(world: World, user: int, planter: int) -> None:
    """The planted sweep becomes the planter's; the rest becomes the user's who runs commands on it."""
    for path in (world.root, *world.root.rglob("*")):
        os.lchown(path, *(2 * [planter if path.is_relative_to(world.planted) else user]))


def open_to_everybody(world: World) -> None:
    """Its owner lets everybody write in the planted sweep, and owns what was planted there."""
    for path in (world.planted, *world.planted.rglob("*")):
        if path.lstat().st_uid == 0:
            os.lchown(path, ATTACKER, ATTACKER)
        if not path.is_symlink() and path.lstat().st_mode & 0o777:
            path.chmod(0o777 if path.is_dir() else 0o666)


def called(world: World, words: Sequence[str], user: int | None) -> tuple[int | None, str]:
    """Exit code and output of the command in a process of its own; None where it did not end."""
    said = world.root / "said"
    said.touch()
    said.chmod(0o666)
    child = os.fork()
    if not child:
        _become(world, words, user, said)
    handle = os.pidfd_open(child)
    has_ended = bool(select.select([handle], [], [], PATIENCE)[0])
    os.close(handle)
    if not has_ended:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return (code if has_ended else None), said.read_text(errors="replace")


def _become(world: World, words: Sequence[str], user: int | None, said: Path) -> None:
    """Run the command in this process, and end it."""
    code = 1
    try:
        output = os.open(said, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(world.root)
        random.seed()
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        code = _command(list(words))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _command(words: list[str]) -> int:
    """Run a command line, or what stands for one that serves a page or is no command; return its exit code."""
    from dpsweep.orchestration.commands.main import main

    try:
        match words:
            case ["open"]:
                _open()
            case ["dashboard"]:
                _serve()
            case _:
                sys.argv = ["dpsweep", *words]
                main()
    except SystemExit as ended:
        return int(ended.code or 0)
    except DpsweepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _open() -> None:
    """Print what Python's library tells of the planted sweep."""
    import dpsweep

    sweep = dpsweep.open("runs/small")
    print(repr(sweep), sweep.results(all_columns=True).to_csv())
    _ask(lambda: dpsweep.compare(sweep, "runs/other").table(), sweep.best, sweep.plot, sweep._repr_html_)
    for trial in sweep.trials.values():
        print(repr(trial))
        _ask(partial(getattr, trial, "trace"), partial(getattr, trial, "history"), trial.epsilons, trial.model)


def _ask(*questions: Callable[[], object]) -> None:
    for ask in questions:
        try:
            print(str(ask())[:2000])
        except DpsweepError as error:
            print(f"refused: {error}")


def _serve() -> None:
    """Print what the dashboard answers about the sweeps; a problem quotes what it refuses."""
    from starlette.testclient import TestClient

    from dpsweep.orchestration.commands.dashboard import application
    from dpsweep.orchestration.report.board import Board

    board = Board((os.path.abspath("runs"),))
    board.refresh()
    page = TestClient(application(board, "token"))
    page.get("/", params={"token": "token"})
    assert "</html>" in page.get("/").text
    state = page.get("/state").json()
    print(json.dumps({**state, "problems": [], "sweeps": [{**each, "problem": ""} for each in state["sweeps"]]}))
    for each in state["sweeps"]:
        page.get("/report", params={"folder": each["folder"]})


def _remove(folder: Path) -> None:
    """Remove a folder, also one that was made unreadable."""
    for path, _, _ in os.walk(folder):
        os.chmod(path, 0o700)
    shutil.rmtree(folder)
