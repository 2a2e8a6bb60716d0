"""A sweep's folder from somebody else: what lies there is planted, at every place of the layout.

Places are read off `SweepFiles` and `TrialFiles`, so that a new file is tried too. `tests.hostile.attempts` runs every
command on what is planted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.store.layout import SweepFiles
from tests.orchestration.sample_grids import small

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
    "run --from": "run sweep.yaml --output runs/new --address in-process --from IN --tracking-uri none",
    "verify": "verify IN",
    "report": "report IN --json",
    "record": "record IN --tracking-uri STORE",
    "account": "account IN --address in-process --delta 1e-6 --tracking-uri none",
    "prune": "prune IN --norms",
    "delete": "delete IN --yes",
    "forget": "forget IN",
    "best": "best IN",
    "export": "export IN --to table.csv",
    "compare": "compare IN runs/other",
    "list": "list runs",
    "list --json": "list runs --json",
    "status": "status IN",
    "status --json": "status IN --json",
    "decrypt": "decrypt PLACE --to shown",
    "owner-report": "owner-report TRIAL --example-id 4",
    "predict": "predict TRIAL PLACE --to predicted.csv",
    "audit": "audit IN --canaries 20 --tracking-uri none",
    "epsilon": "epsilon --trial TRIAL --delta 1e-5 --individual rdp",
    "plan": "plan sweep.yaml --no-code",
    "submit": "submit sweep.yaml --output /IN --address http://127.0.0.1:9 --dry-run",
    "init": "init PLACE --label y --to drafted.yaml",
    "dashboard": "dashboard",
    "open": "open",
}
"""Command lines by name. IN: the folder, runs/small; STORE: its MLflow store; PLACE: where something is
planted. dashboard: what it serves. open: Python's `dpsweep.open`, and all that its result can tell."""
ELSEWHERE: Final[Mapping[str, str]] = {
    "calibrate": "reads no file of a sweep",
    "logs": "reads no file of a sweep, but what a cluster answers",
    "stop": "reads status.json, as status does, of a job of a cluster",
    "drive": "is run of a job that was submitted",
    "tell_failed": "is run of a job whose driver was killed, and reads its status.json, as status does",
}
"""Commands that are not tried, and why."""
ATTACKER: Final = 65533
VICTIM: Final = 65534
"""Users: whose folder it is, and who runs commands on it, where another user is tried."""
HUGE: Final = 2**40
_TWIN: Final = "twin.json"
_DEEP: Final = 200
"""Folders in one another: more than dpsweep makes, and few enough for this module to walk."""
_ODD_NAME: Final = os.fsdecode(b"\xff\x1b]0;title\x07\nerror: nothing")
"""A name that is no UTF-8, changes the title of a terminal, and goes on in another line."""
FORGED: Final = 0.0731937
"""An epsilon far below what any trial here costs, and whose digits nothing else shows."""


@dataclass(frozen=True)
class World:
    """Folders of one attempt: a planted sweep, and what nothing may touch: another sweep and other files.

    lot: a number that decides which value is replaced, and by what, where a kind leaves that open.
    """

    root: Path
    lot: int = 0

    @property
    def planted(self) -> Path:
        return self.root / "runs" / "small"

    @property
    def other(self) -> Path:
        return self.root / "runs" / "other"

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    def untouched(self) -> dict[str, tuple[int, ...]]:
        """Everything outside the planted sweep, with what would show a change."""
        return {
            str(path): _state(path)
            for folder in (self.other, self.outside)
            for path in sorted((folder, *folder.rglob("*")))
        }


def _state(path: Path) -> tuple[int, ...]:
    """What every change of a file or folder changes; nobody can set back the time of the last one.

    To delete a second name of a file is no change of it, and sets that time.
    """
    found = path.lstat()
    changed = found.st_mtime_ns if path.name == _TWIN else found.st_ctime_ns
    return (found.st_mode, found.st_uid, found.st_size, found.st_ino, changed)


def _link_to_the_other(path: Path, world: World) -> None:
    _made_way(path).symlink_to(world.other / path.relative_to(world.planted))


def _link_to_a_file(path: Path, world: World) -> None:
    _made_way(path).symlink_to(world.outside / "file.json")


def _link_to_a_folder(path: Path, world: World) -> None:
    _made_way(path).symlink_to(world.outside / "folder")


def _link_to_nothing(path: Path, world: World) -> None:
    _made_way(path).symlink_to(world.outside / "nothing")


def _link_to_here(path: Path, world: World) -> None:
    _made_way(path).symlink_to(".")


def _hard_link(path: Path, world: World) -> None:
    """A second name of a file of the user's own, as an archive can hold one."""
    os.link(world.outside / _TWIN, _made_way(path))


def _pipe(path: Path, world: World) -> None:
    os.mkfifo(_made_way(path))


def _socket(path: Path, world: World) -> None:
    _made_way(path)
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)  # a name of more than 107 bytes is none


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


def _set_bits(path: Path, world: World) -> None:
    """Rights to run as its owner, to give what is made there to a group, and to delete only one's own."""
    if not path.exists():
        _made_way(path).write_bytes(b"{}")
    path.chmod(0o7000 | stat.S_IMODE(path.stat().st_mode))


def _huge(path: Path, world: World) -> None:
    with _made_way(path).open("wb") as file:
        file.truncate(HUGE)


def _unreadable(path: Path, world: World) -> None:
    if not path.exists():
        _made_way(path).write_bytes(b"{}")
    path.chmod(0)


def _loops(path: Path, world: World) -> None:
    """Two links to the folder that they lie in, at the top of the sweep and at the place."""
    for folder in (world.planted, path if path.is_dir() else path.parent):
        for name in ("one", "two"):
            if folder.is_dir() and not (folder / name).is_symlink():
                (folder / name).symlink_to(".")


def _nested(path: Path, world: World) -> None:
    """JSON of lists in one another, more than a parser that calls itself can follow."""
    _made_way(path).write_text("[" * 200_000)


def _odd_text(path: Path, world: World) -> None:
    """A line of bytes that are no text."""
    _made_way(path).write_bytes(b"\xff\xfe\x00{\x1b]0;title\x07}\n")


def _deep(path: Path, world: World) -> None:
    """Folders in one another where the layout has a file or a folder."""
    _made_way(path).joinpath(*_DEEP * "d").mkdir(parents=True)


def _odd_names(path: Path, world: World) -> None:
    """A file and a folder of a name that no terminal should get, at the top of the sweep and at the place."""
    for folder in (world.planted, path if path.is_dir() else path.parent):
        if folder.is_dir():
            (folder / f"{_ODD_NAME}.json").write_text("{}")
            (folder / _ODD_NAME).mkdir(exist_ok=True)


def _forged_claim(path: Path, world: World) -> None:
    """Every epsilon of a record is `FORGED`, under right checksums."""
    _forge(path, world, _cheapened)


def _forged_names(path: Path, world: World) -> None:
    """Every name of a trial or a file in a record leads to the other sweep, under right checksums."""
    keys = os.listdir(world.other / "trials")

    def renamed(values: Any) -> Any:
        if isinstance(values, dict):
            return {_led_out(name, keys): renamed(value) for name, value in values.items()}
        if isinstance(values, list):
            return [renamed(value) for value in values]
        return _led_out(values, keys)

    _forge(path, world, renamed)


def _led_out(value: Any, keys: Sequence[str]) -> Any:
    if value in keys:
        return f"../../other/trials/{value}"
    is_file = isinstance(value, str) and value.endswith((".json", ".pt", ".arrow", ".html", ".ipc"))
    return f"../../other/{value}" if is_file else value


def _cheapened(values: Any, is_epsilon: bool = False) -> Any:
    match values:
        case dict():
            return {name: _cheapened(value, is_epsilon or "epsilon" in name) for name, value in values.items()}
        case list():
            return [_cheapened(value, is_epsilon) for value in values]
        case float() if is_epsilon:
            return FORGED
    return values


def _odd_value(path: Path, world: World) -> None:
    """One value or name in a record is another one, under right checksums."""
    drawn = random.Random(world.lot)

    def changed(values: Any) -> Any:
        places = [*_insides(values)]
        if places:
            container, key = drawn.choice(places)
            odd = drawn.choice(_ODD_VALUES)
            if isinstance(container, dict) and drawn.random() < 0.2:
                container[str(odd)] = container.pop(key)
            else:
                container[key] = odd
        return values

    _forge(path, world, changed)


def _insides(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a value of JSON, with every key or index in it."""
    inside = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in inside:
        yield values, key
        yield from _insides(value)


_ODD_VALUES: Final[Sequence[Any]] = (
    *(None, True, 0, -1, 2**70, 0.5, 1e300, -1e300, math.nan, math.inf),
    *("", "x", "\ud800", "../../other", "2020-13-45T99:00:00", _ODD_NAME, [], [[]], {}),
)


def _forge(path: Path, world: World, change: Callable[[Any], Any]) -> None:
    """Change a JSON file, its checksum in it, and the digest of it that another record holds."""
    if path.suffix != ".json" or not path.is_file():
        return
    write_json(path, change(json.loads(path.read_bytes())))
    trial = world.planted / Path(*path.relative_to(world.planted).parts[:2])
    holders = (world.planted / "digests.json", trial / "result.json", trial / "private" / "digests.json")
    for holder in holders:
        with contextlib.suppress(OSError, ValueError):
            values = json.loads(holder.read_bytes())
            digests = values.get("digests", values)
            name = path.relative_to(world.planted if holder == holders[0] else trial).as_posix()
            if holder != path and name in digests:
                digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
                write_json(holder, values)


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file, and the checksum in it, if there was one, as `dpsweep.accounting.records.sealed` makes it."""
    if isinstance(values, dict) and values.pop("sha256", None):
        values["sha256"] = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(values, indent=2))


KINDS: Final[Mapping[str, Callable[[Path, World], None]]] = {
    "link to a sweep": _link_to_the_other,
    "link to a file": _link_to_a_file,
    "link to a folder": _link_to_a_folder,
    "dangling link": _link_to_nothing,
    "link to .": _link_to_here,
    "hard link": _hard_link,
    "pipe": _pipe,
    "socket": _socket,
    "device": _device,
    "other kind": _other_kind,
    "of another": _of_another,
    "open to all": _open_to_all,
    "set bits": _set_bits,
    "huge": _huge,
    "unreadable": _unreadable,
    "loops": _loops,
    "nested": _nested,
    "odd text": _odd_text,
    "deep folders": _deep,
    "odd names": _odd_names,
    "forged claim": _forged_claim,
    "forged names": _forged_names,
    "odd value": _odd_value,
}


CHANGES_OF_RECORDS: Final = frozenset({"forged claim", "forged names", "odd value"})
"""Kinds that change a record that is there, and do nothing elsewhere."""


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
    key = private_key(folder)
    trial = sweep.trial(key)
    named = [*_paths(sweep), *_paths(trial), *sweep.in_place, sweep.attempts(key), f"{sweep.attempts(key)}/000001.json"]
    of_tuning = sweep.of_tuning
    named += [of_tuning.manifest, of_tuning.trials, of_tuning.lock, of_tuning.trial(key).checkpoint]
    named += [f"{trial.private}/.checkpoint.pt.0.partial"]
    named += [sweep.audits(key), f"{sweep.audits(key)}/gradient-iterates-20.json"]
    named += [
        trial.root,
        trial.accounted_again("delta=1e-06,rdp"),
        f"{trial.accounted_again('delta=1e-06,rdp')}/account.json",
    ]
    written = [path for path in (Path(trial.root), Path(sweep.attempts_of_all)) for path in path.rglob("*")]
    found = {os.path.relpath(path, folder) for path in (*named, *map(str, written))}
    return sorted(place for place in found if not place.startswith("..") and place != ".")


ROLES: Final[Mapping[str, str]] = {
    "lock": r"(tuning/)?\.lock",
    "manifest": r"(tuning/)?sweep\.json",
    "file changed in place": r"dpsweep\.log|mlflow\.db.*",
    "record of a sweep": r"[^/]+\.(json|html)|storage-probe",
    "private file of a sweep": r"private/[^/]+\.(json|html|txt)",
    "folder of a sweep": r"trials|tuning(/trials)?|private(/(selection|audits|audited-copy|given))?|tune|pages|"
    "mlflow-artifacts",
    "attempt": r"attempts(/.*)?",
    "result": r".*/result\.json",
    "trace": r".*/trace\.arrow",
    "tensors": r".*/(model|inputs)\.pt",
    "key": r".*checkpoint\.pt(\..*)?",
    "rows": r".*\.(arrow|ipc|jsonl)|.*/(manifest|complete|part-\d+)\.json",
    "record of a trial": r"trials/[^/]+/[^/]+\.json",
    "private record of a trial": r"(trials|private/audits)/.*\.(json|txt)",
    "folder of a trial": r"(trials|private/audits)/.*",
}
"""Patterns of places that the same code opens for the same purpose; the first that matches is a place's role."""


def role_of(place: str) -> str:
    """The role of a place. Raises: LookupError if no pattern of `ROLES` matches."""
    for role, pattern in ROLES.items():
        if re.fullmatch(pattern, place):
            return role
    raise LookupError(f"{place} has no role")


def _paths(files: SweepFiles | TrialFiles) -> Iterator[str]:
    """What the properties of a layout name; those that take arguments are given by `places`."""
    for name, value in vars(type(files)).items():
        if isinstance(value, property) and isinstance(found := getattr(files, name), str | Path):
            yield str(found)


def private_key(folder: Path) -> str:
    """The key of the private trial of a sweep."""
    return next(name for name in sorted(os.listdir(folder / "trials")) if name.startswith("flat"))
