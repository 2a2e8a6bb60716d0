"""Command lines: an answer that can be right, or one line that says what is wrong; never a traceback."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import math
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import yaml
from hypothesis import strategies as st

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.commands.main import main
from tests.accounting.stored_trial import write_trial
from tests.hostile.floor import delta_of_gaussian
from tests.hostile.odd import NUMBERS, WORDS
from tests.hostile.of_sweeps import SWEEPS
from tests.hostile.target import Target
from tests.orchestration.sample_results import stored_sample

_EPSILON, _CALIBRATE = "epsilon --delta 1e-5 --json", "calibrate --delta 1e-5 --json"
LINES = (
    f"{_EPSILON} --noise-multiplier 1.1 --sampling poisson --sample-rate 0.01 --steps 100",
    f"{_EPSILON} --noise-multiplier 6 --sampling shuffle --epochs 40 --accountant zcdp",
    f"{_EPSILON} --noise-multiplier 4 --sampling fixed --dataset-size 1000 --batch-size 20 --steps 50",
    f"{_EPSILON} --noise-multiplier 2 --dataset-size 1000 --batch-size 20 --max-batch-size 60 --steps 50",
    f"{_EPSILON} --noise-multiplier 1.4 --schedule exponential:decay=0.004 --sample-rate 0.2 --epochs 9",
    f"{_EPSILON} --noise-multiplier 1 --sample-rate 0.01 --steps 20 --accountant pld --group-size 1,4",
    f"{_EPSILON} --noise-multiplier 1 --sample-rate 0.1 --steps 20 --risk --prior 0.1",
    f"{_EPSILON} --noise-multiplier 2 --sample-rate 0.1 --steps 9 --side-noise-multiplier 8 --release pure:1",
    f"{_EPSILON} --trial TRIAL --individual rdp",
    f"{_EPSILON} --trial TRIAL --examples 1,4",
    f"{_EPSILON} --trace TRACE --group-size 1..3 --compare",
    f"{_CALIBRATE} --target-epsilon 2 --sample-rate 0.1 --epochs 3",
    "calibrate --solve epochs --noise-multiplier 2 --budget-rho 0.5 --sampling shuffle --json",
    f"{_CALIBRATE} --solve steps --noise-multiplier 2 --target-epsilon 1 --sample-rate 0.1",
    f"{_CALIBRATE} --solve decay --noise-multiplier 8 --schedule exponential --epochs 9 --target-epsilon 3 "
    "--sample-rate 0.1",
    "calibrate --target-advantage 0.2 --sample-rate 0.1 --epochs 2 --json",
    "calibrate --target-tpr 0.1 --at-fpr 0.01 --sample-rate 0.1 --epochs 2 --json",
    "plan SWEEP --no-code --json",
    "report FOLDER --json",
    "verify FOLDER --json",
    "status FOLDER --json",
    "forget FOLDER",
    "prune FOLDER --norms --older-than 1",
    "owner-report TRIAL --example-id 4 --json",
    "status STORED --json",
    "list STORED --json",
    "compare STORED OTHER --json",
    "export STORED --to TABLE.csv",
    "account STORED --address in-process --delta 1e-6 --individual pld --group-sizes 2,4 --json",
    "delete FOLDER --yes",
)
"""Command lines of which parts are replaced. Commands that train or talk to a cluster are left out."""


@dataclass(frozen=True)
class Line:
    """One of `LINES` with some arguments changed; places are shares of all arguments."""

    line: int
    changes: list[tuple[float, str, str]]


def inputs() -> st.SearchStrategy[Line]:
    places = st.floats(0.0, 1.0, exclude_max=True)
    what = st.sampled_from(("replace", "replace", "replace", "delete", "insert", "repeat"))
    flags = st.sampled_from(sorted({word for line in LINES for word in line.split() if word.startswith("--")}))
    numbers = st.one_of(st.sampled_from(NUMBERS), st.integers(-10, 2000), st.floats(0.0, 1.0), st.floats()).map(str)
    words = st.one_of(numbers, numbers, numbers, st.sampled_from(WORDS), flags, st.text(max_size=6))
    changes = st.lists(st.tuples(places, what, words), max_size=3)
    return st.builds(Line, st.integers(0, len(LINES) - 1), changes)


def feed(given: Line, folder: Path) -> None:
    arguments = _arguments(given, folder)
    code, out, err = called(arguments)
    assert code in (0, 1, 2), f"exit code {code}"
    assert "Traceback" not in err
    if code:
        assert err.strip(), "a refusal says why"
        raise InvalidInput(err)
    if arguments[0] == "epsilon" and "--json" in arguments:
        _check_epsilon(arguments, out)


def called(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command in this process; its signal handlers are taken back."""
    out, err = io.StringIO(), io.StringIO()
    argv = mock.patch.object(sys, "argv", ["dpsweep", *arguments])
    with argv, mock.patch.dict(os.environ), _handlers(), _said(out, err):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    return code, out.getvalue(), err.getvalue()


@functools.cache
def warm() -> None:
    """Load what commands load late, so that no input is charged for it."""
    importlib.import_module("dpsweep.orchestration.library")
    for name in (
        "dpsweep.orchestration.pipeline",
        "dpsweep.orchestration.sweeps.plan",
        "dpsweep.orchestration.commands.printed_tables",
    ):
        importlib.import_module(name)


@contextlib.contextmanager
def _said(out: io.StringIO, err: io.StringIO) -> Iterator[None]:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


@contextlib.contextmanager
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _arguments(given: Line, folder: Path) -> list[str]:
    arguments = [_in_place(word, folder) for word in shlex.split(LINES[given.line])]
    for place, what, word in given.changes:
        if len(arguments) < 2:
            break
        at = 1 + int(place * (len(arguments) - 1))
        match what:
            case "replace":
                arguments[at] = word
            case "delete":
                del arguments[at]
            case "insert":
                arguments.insert(at, word)
            case _:
                arguments.insert(at, arguments[at])
    return [argument for argument in arguments if argument not in ("--watch", "--plot", "--curve", "--html", "--help")]


@functools.cache
def _trial() -> str:
    folder = tempfile.mkdtemp(prefix="hostile-trial-")
    write_trial(folder, 12, rows_per_part=8, steps=(0, 60))
    return folder


@functools.cache
def _stored(name: str) -> str:
    """A finished sweep without norms, so that nothing is accounted again and no cluster is started."""
    folder = tempfile.mkdtemp(prefix="hostile-sweep-")
    return stored_sample(Path(folder) / name).root


def _in_place(word: str, folder: Path) -> str:
    sweep = folder / "plan.yaml"
    if not sweep.exists():
        sweep.write_text(yaml.safe_dump(SWEEPS[0]))
    names = {
        "TRIAL": _trial(),
        "TRACE": TrialFiles(_trial()).trace,
        "FOLDER": str(folder),
        "SWEEP": str(sweep),
        "STORED": _stored("first"),
        "OTHER": _stored("second"),
        "TABLE.csv": str(folder / "table.csv"),
    }
    return names.get(word, word)


def _check_epsilon(arguments: list[str], out: str) -> None:
    """An epsilon of a run whose flags say it all is not below that of one of its steps."""
    answers = json.loads(out)
    for answer in answers if isinstance(answers, list) else [answers]:
        epsilon = math.inf if answer.get("epsilon", 0.0) is None else answer.get("epsilon")
        if epsilon is None:
            continue
        assert epsilon >= 0.0
        if answer.get("steps", 0) < 1 or "noise_multiplier" not in answer or answer["schedule"] != "constant":
            continue
        rate = {"shuffle": 1.0, "poisson": _number(arguments, "--sample-rate")}.get(answer["sampling"], 0.0)
        assert delta_of_gaussian(epsilon, answer["noise_multiplier"], rate) <= answer["delta"] * (1.0 + 1e-9)


def _number(arguments: list[str], flag: str) -> float:
    """The value of a flag that is given once, else 0."""
    places = [place for place, word in enumerate(arguments) if word == flag]
    return float(arguments[places[0] + 1]) if len(places) == 1 else 0.0


COMMAND_LINES = Target("command lines", inputs(), feed, warm)
