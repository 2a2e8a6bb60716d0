"""Every command that can take long is told to end where it works or waits, and the seconds that it takes are measured.

That it begins again afterwards where it was is shown by `tests/orchestration/test_interruptions.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.hostile.of_attacks import called, made
from tests.hostile.of_folders import World, write_json
from tests.orchestration.processes import Running, able_to_write, descendants, start
from tests.orchestration.sample_grids import small
from tests.orchestration.servers import mlflow_server, mute, paused

LIMIT: Final = 5.0
"""Seconds in which a command has ended, on a machine that does little else."""
_PATIENCE: Final = 240.0
_LONG: Final = {"privacy": {"noise_multiplier": 1.0, "delta": 1e-5}, "epochs": 2000}
_SWEEPS: Final[Mapping[str, Mapping[str, Any]]] = {
    "long": _LONG,
    "ranks": {**_LONG, "resources": {"ranks": 2}},
    "tuned": {
        **_LONG,
        "data": {"name": "digits", "public_fraction": 0.1},
        "tune": {"parameters": {"clipping.bound": [1, 4]}, "privacy": "unaccounted"},
    },
    "chosen": {
        **_LONG,
        "noise_source": "os_entropy",
        "data": {"name": "digits", "public_fraction": 0.1},
        "tune": {"parameters": {"clipping.bound": [1, 4]}, "privacy": "private_selection", "trials": 4},
    },
    "short": {"epochs": 1},
    "raw": {"epochs": 1, "privacy": {"noise_multiplier": 1.0, "delta": 1e-5}, "release": "raw"},
    "told": {"epochs": 1, "notify": ["http://MUTE/", "sleep 1000"]},
    "costly": {
        "epochs": [*range(1, 40)],
        "sampling": {"method": "poisson", "batch_size": [*range(16, 64)]},
        "privacy": {"target_epsilon": 3, "delta": 1e-5},
    },
    "accounted": {
        "epochs": 150,
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-5},
        "clipping": ["individual"],
        "accounting": {"individual": "pld", "group_sizes": [*range(2, 40)]},
    },
}
"""By name, what differs from one private trial of a small sweep. MUTE: a server that answers nothing."""


@dataclass
class Scene:
    """A command that runs. mute: HOST:PORT of a server that answers nothing; mlflow: the address of one that does."""

    world: World
    mute: str
    mlflow: str
    process: Running | None = None
    since: float = 0.0
    open: list[socket.socket] = field(default_factory=list)

    @property
    def said(self) -> str:
        said = self.world.root / "said"
        return said.read_text(errors="replace") if said.exists() else ""

    @property
    def rays(self) -> list[str]:
        """Folders of embedded Rays."""
        return [name for name in os.listdir(self.world.root.parent) if name.startswith("dps-")]


Ready = Callable[[Scene], bool]


def _after(seconds: float) -> Ready:
    return lambda scene: time.monotonic() - scene.since > seconds


def _there(pattern: str) -> Ready:
    return lambda scene: any((scene.world.root / "runs").glob(pattern))


def _waits_for(name: str) -> Ready:
    """It has a connection to a server that answers nothing, or stopped doing so."""
    return lambda scene: _is_connected(scene, name)


def _is_connected(scene: Scene, name: str) -> bool:
    port = int((scene.mute if name == "mute" else scene.mlflow).rpartition(":")[2].strip("/"))
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    there = [line.split() for table in tables for line in table]
    return any(words[2].endswith(f":{port:04X}") and words[3] == "01" for words in there)


def _begun(scene: Scene) -> bool:
    return bool(scene.rays)


def _reads_slowly(scene: Scene) -> bool:
    """The dashboard serves its page, and a report to somebody who does not read on."""
    if "token=" not in scene.said:
        return False
    port, _, token = scene.said.partition("127.0.0.1:")[2].split()[0].partition("/?token=")
    reader = socket.create_connection(("127.0.0.1", int(port)))
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lines = (f"GET /report?folder={scene.world.planted} HTTP/1.1", "Host: x", f"Cookie: dpsweep-dashboard={token}")
    reader.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
    reader.recv(1)
    scene.open.append(reader)
    return True


def _writes(kind: str) -> Ready:
    return _there(f"new/**/{kind}")


@dataclass(frozen=True)
class Ending:
    """A command, where it is told to end, and in which environment. silent: MLflow falls silent when it is ready."""

    where: str
    command: str
    ready: Ready
    changes: tuple[tuple[str, str], ...] = ()
    silent: bool = False


_NEW: Final = "--output runs/new"
_ALONE: Final = "--address in-process --tracking-uri none"
_HERE: Final = f"{_NEW} {_ALONE}"
_S3: Final = (
    ("AWS_ENDPOINT_URL", "http://MUTE"),
    *((name, "x") for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")),
)
_LOOPBACK: Final = (("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"),)
"""Ray replaces 127.0.0.1 by the machine's address without it."""
_TRAINS: Final = _writes("checkpoint.pt")
ENDINGS: Final[tuple[Ending, ...]] = (
    Ending("trains in its process", f"run long.yaml {_HERE}", _TRAINS),
    Ending("accounts in its process", f"run accounted.yaml {_HERE}", _writes("training.json")),
    Ending("accounts again", "account runs/small --address in-process --delta 1e-6 --group-sizes 2..64", _after(1.0)),
    Ending("Ray starts", f"run long.yaml {_NEW}", _begun),
    Ending("trains on Ray", f"run long.yaml {_NEW}", _TRAINS),
    Ending("trains on two ranks", f"run ranks.yaml {_NEW}", _TRAINS),
    Ending("tunes on Ray", f"run tuned.yaml {_NEW}", _TRAINS),
    Ending("chooses privately on Ray", f"run chosen.yaml {_NEW}", _TRAINS),
    Ending("accounts on Ray", f"run accounted.yaml {_NEW}", _writes("training.json")),
    Ending("a dead MLflow", f"run short.yaml {_NEW} --tracking-uri http://MUTE", _waits_for("mute")),
    Ending("a dead MLflow", "record runs/small --tracking-uri http://MUTE", _waits_for("mute")),
    Ending("a dead MLflow", "account runs/raw --delta 1e-7 --tracking-uri http://MUTE", _waits_for("mute")),
    Ending("MLflow falls silent", f"run long.yaml {_NEW} --tracking-uri MLFLOW", _TRAINS, silent=True),
    Ending(
        "MLflow falls silent", f"run long.yaml {_NEW} --address in-process --tracking-uri MLFLOW", _TRAINS, silent=True
    ),
    Ending("a dead cluster", f"run short.yaml {_NEW} --address MUTE", _waits_for("mute"), _LOOPBACK),
    Ending("a dead cluster", "account runs/small --delta 1e-7 --address MUTE", _waits_for("mute"), _LOOPBACK),
    *(
        Ending("a dead dashboard of Ray", f"{command} --address http://MUTE", _waits_for("mute"))
        for command in ("submit short.yaml --output /dev/shm/out", "list", "logs x --follow", "stop x", "status x")
    ),
    Ending("a dead object store", "run short.yaml --output s3://b/x --address in-process", _waits_for("mute"), _S3),
    Ending("a dead object store", "status s3://b/x", _waits_for("mute"), _S3),
    Ending("tells a dead server", f"run told.yaml {_HERE}", _waits_for("mute")),
    Ending("plans", "plan costly.yaml", _after(3.0)),
    Ending("plans", f"run costly.yaml {_NEW}", _after(3.0)),
    Ending(
        "computes",
        "epsilon --noise-multiplier 1 --sample-rate 0.01 --steps 100000 --accountant pld --group-size 1..64 "
        "--delta 1e-5",
        _after(1.0),
    ),
    Ending(
        "computes",
        "calibrate --solve decay --noise-multiplier 8 --schedule exponential --epochs 2000 --target-epsilon 3 "
        "--sample-rate 0.001 --delta 1e-5 --accountant pld",
        _after(1.0),
    ),
    Ending("drafts", "init table.csv --label y --to draft.yaml", _after(1.0)),
    Ending("watches", "status runs/raw --watch", lambda scene: "trials done" in scene.said),
    Ending("audits", "audit runs/small --canaries 20 --tracking-uri none", _there("small/private/audited-copy")),
    Ending("serves", "dashboard runs", _reads_slowly),
)


@dataclass(frozen=True)
class Ended:
    """Outcome of an ending. took: seconds after SIGTERM. left: what outlived the command."""

    ending: Ending
    took: float
    code: int | None
    left: str
    line: str

    @property
    def is_right(self) -> bool:
        return self.code in (0, 130) and self.took < LIMIT and "Traceback" not in self.line


def endings(folder: Path, only: str = "") -> Iterator[Ended]:
    """Tell each command to end, one after the other; ``folder`` has a short path, for Ray's sockets."""
    template = made(folder / "template")
    for name, changes in _SWEEPS.items():
        text = small(**{"clipping": ["flat"], "noise": "constant", "seeds": 0, **changes})
        (template.root / f"{name}.yaml").write_text(text)
    said = called(template, f"run raw.yaml --output runs/raw {_ALONE}".split())
    assert said.code == 0, said.text
    status = template.root / "runs" / "raw" / "status.json"
    write_json(status, {**json.loads(status.read_bytes()), "state": "running"})  # so that there is more to watch
    with (template.root / "table.csv").open("w") as table:
        table.write("x,y,z\n" + "0.123456,1,abc\n0.5,0,d\n" * 2_000_000)
    report = next(iter((template.planted).glob("report.html")))
    report.write_bytes(report.read_bytes() + b" " * 50_000_000)
    with contextlib.ExitStack() as running:
        silent = running.enter_context(mute())
        names = {ending: f"{ending.where}: {ending.command}" for ending in ENDINGS}
        asked = [ending for ending, name in names.items() if any(text in name for text in only.split(","))]
        needs_mlflow = any(ending.silent for ending in asked)
        artifacts = str(folder / "artifacts")
        store = f"sqlite:///{folder}/server.db"
        mlflow = running.enter_context(mlflow_server(store, artifacts)) if needs_mlflow else ""
        for number, ending in enumerate(asked):
            root = folder / f"w{number}"
            shutil.copytree(template.root, root, symlinks=True)
            yield _told_to_end(ending, Scene(World(root), silent, mlflow))
            shutil.rmtree(root, ignore_errors=True)


def _told_to_end(ending: Ending, scene: Scene) -> Ended:
    def named(text: str) -> str:
        return text.replace("MUTE", scene.mute).replace("MLFLOW", scene.mlflow)

    root = scene.world.root
    (root / "said").unlink(missing_ok=True)
    told = root / "told.yaml"
    told.write_text(named(told.read_text()))
    changes = {"HOME": str(root.parent / "home"), "RAY_TMPDIR": str(root.parent), "RAY_AUTH_MODE": "token"}
    changes |= {"RAY_worker_niceness": "0"}  # else workers starve beside other work of the machine
    changes |= {"RAY_AUTH_TOKEN": "a" * 64} | {name: named(value) for name, value in ending.changes}
    with contextlib.chdir(root):
        scene.process = process = start(*named(ending.command).split(), log=root / "said", **changes)
    scene.since = time.monotonic()
    while not ending.ready(scene) and process.poll() is None:
        if time.monotonic() - scene.since > _PATIENCE:
            process.send_signal(signal.SIGKILL)
            return Ended(ending, 0.0, None, "", f"was not ready in time: {scene.said[-100:]}")
        time.sleep(0.02)
    below = descendants(process.pid)
    with paused(scene.mlflow) if ending.silent else contextlib.nullcontext():
        if ending.silent:
            time.sleep(5.0)  # so that it is asked
        had_ended, began = process.poll(), time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        code: int | None
        try:
            code = process.wait(_PATIENCE)
        except AssertionError:
            code = None
        took = time.monotonic() - began
        left = [f"{len(found)} processes" for found in [able_to_write(below)] if found] + scene.rays
    for each in scene.open:
        each.close()
    lines = [line for line in scene.said.splitlines() if line.strip()]
    line = " | ".join(lines[-2:]) if had_ended is None else f"had ended ({had_ended}): {lines[-1:]}"
    _settle(scene, below)
    return Ended(ending, took, code if had_ended is None else None, ", ".join(left), line)


def _settle(scene: Scene, below: list[int]) -> None:
    """Wait until nothing of the command is left, so that the next one is measured alone."""
    deadline = time.monotonic() + 30.0
    while able_to_write(below) and time.monotonic() < deadline:
        time.sleep(0.2)
    for name in scene.rays:
        shutil.rmtree(scene.world.root.parent / name, ignore_errors=True)
