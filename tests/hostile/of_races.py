"""A link that is put in between check and use: parts of a sweep's folder change places with links while commands work.

Another process does so in a tight loop, also with the temporary files that a command writes. The links lead to the same
places of another sweep, which must not change.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dpsweep.accounting.records.local_files import TEMPORARY
from tests.hostile.attempts import Template, called, give_away, open_to_everybody, words_of
from tests.hostile.of_folders import ATTACKER, VICTIM, World, private_key
from tests.orchestration.processes import environment, set_up_command
from tests.warm import FORKS

RACED: Final = ("run", "report", "account", "prune", "forget", "delete")
_EXCHANGE: Final = 2
"""RENAME_EXCHANGE of renameat2(2): two names change places at once."""
_HERE: Final = -100
"""AT_FDCWD: a path is relative to the working directory."""
_RENAME: Final = ctypes.CDLL(None).renameat2


@dataclass
class Raced:
    """What became of a command that was run again and again. swaps: exchanges meanwhile, of all its runs."""

    command: str
    codes: Counter[int | None] = field(default_factory=Counter)
    swaps: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Users:
    """Who runs the commands, and whose the folder is and who exchanges its parts; None for this process's user."""

    runs: int | None = None
    races: int | None = None


ONE: Final = Users()
TWO: Final = Users(VICTIM, ATTACKER)


def races(folder: Path, seconds: float, users: Users) -> Iterator[Raced]:
    """Run each command for as long, on a folder whose parts change places with links."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as of `tried`: a fork waits for ever for threads that it has not
    process = FORKS.Process(target=_race_all, args=(str(folder), seconds, users))
    process.start()
    process.join()
    assert process.exitcode == 0, (folder / "said").read_text(errors="replace")[-4000:]
    for line in (folder / "raced").read_text().splitlines():
        command, codes, swaps, wrong = json.loads(line)
        yield Raced(command, Counter(codes), swaps, wrong)


def _race_all(root: str, seconds: float, users: Users) -> None:
    folder = Path(root)
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    if users.runs is not None:
        for path in (folder, folder / "tmp"):
            path.chmod(0o1777)
    changes = environment(HOME=f"{root}/home", TMPDIR=f"{root}/tmp")
    set_up_command(["dpsweep"], changes, root, "/dev/null", f"{root}/said")
    template = Template.made(folder / "template", 0, RACED)
    if users.runs is not None:
        for path in (folder / "home", *(folder / "home").rglob("*")):
            os.lchown(path, users.runs, users.runs)
    with (folder / "raced").open("w") as lines:
        for command in RACED:
            found, until = Raced(command), time.monotonic() + seconds
            while time.monotonic() < until:
                with tempfile.TemporaryDirectory(dir=folder) as above:
                    Path(above).chmod(0o755)
                    _run_once(template.copied(Path(above) / "world"), found, users)
            lines.write(f"{json.dumps((command, [*found.codes.elements()], found.swaps, found.wrong))}\n")


def _run_once(world: World, found: Raced, users: Users) -> None:
    if found.command == "run":  # something is to be trained
        shutil.rmtree(world.planted / "trials" / private_key(world.other))
    aside, swaps = world.root / "aside", world.root / "swaps"
    aside.mkdir()
    swaps.touch()
    if users.runs is not None and users.races is not None:
        give_away(world, users.runs, users.races)
        open_to_everybody(world)
        for path in (aside, swaps):
            os.chown(path, users.races, users.races)
    before = world.untouched()
    words = words_of(found.command, world, world.planted)
    with _swapping(world, aside, swaps, users.races):
        code, said = called(world, words, users.runs)
    found.codes[code] += 1
    found.swaps += int(swaps.read_text() or 0)
    if world.untouched() != before:
        found.wrong.append(f"destroyed: {said[-600:]}")
    elif code is None or "Traceback" in said:
        found.wrong.append(f"{'hung' if code is None else 'traceback'}: {said[-1500:]}")


@contextlib.contextmanager
def _swapping(world: World, aside: Path, swaps: Path, user: int | None) -> Iterator[None]:
    """Let another process, of a user, exchange parts of the planted sweep with links in a ``with`` block."""
    child = os.fork()
    if not child:
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            _swap(world, aside, swaps)
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)


def _swap(world: World, aside: Path, swaps: Path) -> None:
    key = private_key(world.other)
    trial = f"trials/{key}"
    places = (
        *("trials", "private", "attempts", ".lock", "results.json", "dpsweep.log", "status.json", "report.html"),
        *(trial, f"{trial}/private", f"{trial}/result.json", f"{trial}/trace.arrow", f"attempts/{key}"),
    )
    pairs = []
    for number, place in enumerate(places):
        (aside / str(number)).symlink_to(world.other / place)
        pairs.append((os.fsencode(world.planted / place), os.fsencode(aside / str(number))))
    is_ended: list[bool] = []
    signal.signal(signal.SIGTERM, lambda number, frame: is_ended.append(True))
    done = 0
    while not is_ended:
        for one, other in pairs:
            for _ in range(2):  # there and back, or a place above it hides it
                done += _exchanged(one, other)
                time.sleep(random.expovariate(5000.0))
        for folder in ("", "private", trial, f"{trial}/private", f"attempts/{key}"):
            done += _exchange_temporaries(world.planted / folder, world.other / folder, aside)
    swaps.write_text(str(done))


def _exchanged(one: bytes, other: bytes) -> bool:
    return bool(_RENAME(_HERE, one, _HERE, other, _EXCHANGE) == 0)


def _exchange_temporaries(folder: Path, elsewhere: Path, aside: Path) -> int:
    """Put links in the place of temporary files, which lead to the files that these are to replace; they stay."""
    done = 0
    with contextlib.suppress(OSError):  # there is no such folder now
        for name in os.listdir(folder):
            if name.endswith(TEMPORARY):
                link = aside / name
                with contextlib.suppress(FileExistsError):
                    link.symlink_to(elsewhere / name[1:].rsplit(".", 2)[0])
                done += _exchanged(os.fsencode(folder / name), os.fsencode(link))
    return done
