"""The user's code is edited and everything is tried again, wherever sweeps run: one table, printed with ``-s``.

Each row is a command, each column a place: a kernel that trains in its process, one with a Ray of its own, new
processes, a folder that was moved with its code as to another machine, and jobs of a cluster.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.status_snapshot import read_snapshot
from tests.orchestration.execution.test_submission import Head
from tests.orchestration.execution.test_submission import head as head
from tests.orchestration.processes import dpsweep, environment
from tests.orchestration.test_edited_code import LAYERS, NET, SWEEP, edit

Run = Callable[[Path, str, dict[str, object], tuple[str, ...]], str]
"""Runs the sweep of a folder: folder, name of the output, changes of the sweep, flags -> errors, "" if it ran."""
READ = """
import sys, dpsweep
for call in (lambda t: len(t.model().state_dict()["1.bias"]), lambda t: t.predict([[0.0] * 30]).shape):
    try:
        print(call(next(iter(dpsweep.open(sys.argv[1], allow_code=[sys.argv[2]]).trials.values()))))
    except dpsweep.InvalidInput as error:
        print("refused:", error)
"""
LOAD = """
import sys, mlflow
print(len(mlflow.pyfunc.load_model(sys.argv[1])._model_impl.trained.model[1].bias))
"""
IN_KERNEL = """
import json, sys, dpsweep
for line in sys.stdin:
    sweep, output, address, flags = json.loads(line)
    options = {flags[0][2:].replace("from", "sources"): flags[1:]} if flags else {}
    try:
        dpsweep.run(sweep, output=output, address=address, **options)
        print(flush=True)
    except dpsweep.DpsweepError as error:
        print(*str(error).split(), flush=True)
"""
"""A kernel that is asked line by line."""


def written(folder: Path, changes: dict[str, object]) -> str:
    (folder / "sweep.json").write_text(json.dumps({**SWEEP, **changes}))
    return str(folder / "sweep.json")


class Kernel:
    """One Python process in which all runs take place, as in a notebook."""

    def __init__(self, address: str) -> None:
        self._address, pipe = address, subprocess.PIPE
        command = [sys.executable, "-c", IN_KERNEL]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment())

    def __call__(self, folder: Path, output: str, changes: dict[str, object], flags: tuple[str, ...]) -> str:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([written(folder, changes), str(folder / output), self._address, flags]) + "\n")
        stdin.flush()
        return stdout.readline().strip()


def new_process(folder: Path, output: str, changes: dict[str, object], flags: tuple[str, ...]) -> str:
    address = ("--address", "in-process", "--output", folder / output)
    done = dpsweep("run", written(folder, changes), *address, *flags)
    return "" if done.returncode == 0 else done.stderr


def submitted(head: Head) -> Run:
    def run(folder: Path, output: str, changes: dict[str, object], flags: tuple[str, ...]) -> str:
        if "--from" in flags:
            return "no such option of submit"
        place = str(folder / output)
        sent = head.run("submit", written(folder, changes), "--output", place, *flags)
        if sent.returncode:
            return sent.stderr
        files, job = SweepFiles(place), sent.stdout.splitlines()[-1].split()[2]
        followed = head.run("logs", job, "--follow")
        seen = read_snapshot(files.status)
        return "" if seen is not None and seen.state == "finished" else followed.stdout

    return run


def outcome(errors: str) -> str:
    """A cell of the table."""
    named = re.search(r"(edited_layers\.py) (has changed since|is not)", errors)
    return "ran" if not errors else f"refused, {named[1]} has changed" if named else errors[-200:]


def table_of(run: Run, folder: Path) -> dict[str, str]:
    """Train, edit, and try everything: what came of it, by what was tried."""
    cells: dict[str, str] = {}

    def read(what: str) -> None:
        code = (sys.executable, "-c", READ, str(folder / "out"), str(folder / "edited_net.py"))
        said = subprocess.run(code, env=environment(), capture_output=True, text=True, check=False)
        model, predicted = said.stdout.splitlines()
        cells[f"model() {what}"] = outcome(model) if "refused" in model else f"H = {model}"
        cells[f"predict {what}"] = outcome(predicted) if "refused" in predicted else predicted

    def command(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        done = dpsweep(*arguments)
        warned = re.search(r"warning: .*edited_layers\.py has changed", done.stderr)
        said = f"ends with {done.returncode}, {'warns of edited_layers.py' if warned else 'no warning'}"
        cells[name] = said
        return done

    cells["run"] = outcome(run(folder, "out", {}, ()))
    edit(folder)
    cells["run again in the folder"] = outcome(run(folder, "out", {}, ()))
    cells["grow"] = outcome(run(folder, "out", {"seeds": [0, 1]}, ()))
    cells["retry failed"] = outcome(run(folder, "out", {}, ("--retry", "failed")))
    cells["another folder --from it"] = outcome(run(folder, "taken", {}, ("--from", str(folder / "out"))))
    read("after the edit")
    command("verify", "verify", folder / "out")
    store = f"sqlite:///{folder / 'mlflow.db'}"
    dpsweep("record", folder / "out", "--tracking-uri", store)
    command("best --register", "best", folder / "out", "--register", "edited", "--tracking-uri", store)
    loading = (sys.executable, "-c", LOAD, "models:/edited@champion")
    loaded = subprocess.run(loading, env=environment(MLFLOW_TRACKING_URI=store), capture_output=True, text=True)
    cells["the registered model"] = f"H = {loaded.stdout.strip()}" if not loaded.returncode else loaded.stderr[-200:]
    cells["retry all"] = outcome(run(folder, "out", {}, ("--retry", "all")))
    read("after --retry all")
    command("verify after --retry all", "verify", folder / "out")
    return cells


REFUSED, WARNED = "refused, edited_layers.py has changed", "ends with 0, warns of edited_layers.py"
EXPECTED = {
    "run": "ran",
    "run again in the folder": REFUSED,
    "grow": REFUSED,
    "retry failed": REFUSED,
    "another folder --from it": REFUSED,
    "model() after the edit": REFUSED,
    "predict after the edit": REFUSED,
    "verify": WARNED,
    "best --register": WARNED,
    "the registered model": "H = 4",
    "retry all": "ran",
    "model() after --retry all": "H = 9",
    "predict after --retry all": "(1, 2)",
    "verify after --retry all": "ends with 0, no warning",
}


@pytest.mark.long
@pytest.mark.parametrize("place", ["in a kernel", "Ray in a kernel", "new processes", "another machine", "jobs"])
def test_everything_after_an_edit(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "edited_net.py").write_text(NET)
    (folder / "edited_layers.py").write_text(LAYERS)
    kernel: Kernel | None = None
    run: Run = new_process
    if place == "another machine":
        assert new_process(folder, "out", {}, ()) == ""
        folder = folder.rename(tmp_path / "there")
    elif place == "jobs":
        run = submitted(request.getfixturevalue("head"))
    elif "kernel" in place:
        run = kernel = Kernel("local" if "Ray" in place else "in-process")
    try:
        found = table_of(run, folder)
    finally:
        if kernel is not None:
            kernel.process.kill()
            kernel.process.wait()
    for row, cell in found.items():
        print(f"{place:16} | {row:26} | {cell}")
    expected = {**EXPECTED, **({"another folder --from it": "no such option of submit"} if place == "jobs" else {})}
    assert found == expected
