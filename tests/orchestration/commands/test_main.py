"""The command's surface: exit codes, one line per mistake, nothing started; plans for people and programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.orchestration.processes import Command, dpsweep, environment
from tests.orchestration.sample_grids import small

PUBLIC = {"name": "digits", "public_fraction": 0.2}
PRIVACY = {"target_epsilon": 5, "delta": 1e-5, "accountant": "rdp"}


def write(folder: Path, **changes: object) -> Path:
    file = folder / "sweep.yaml"
    file.write_text(small(**{"privacy": PRIVACY, "seeds": 0, **changes}))
    return file


def test_a_plan_is_a_table(tmp_path: Path, command: Command) -> None:
    lines = command("plan", write(tmp_path)).out.splitlines()
    (row,) = [line for line in lines if "dpsgd_f-exponential-epsilon5-seed0-" in line]
    assert "5.000" in row
    assert "KiB" in row
    assert "ε at δ = 1e-05, adjacency add_remove: an estimate" in lines
    assert "data digits: 1,318 training and 359 test examples in 10 groups" in lines


def test_a_plan_of_a_tuning_shows_the_values_of_its_candidates(tmp_path: Path, command: Command) -> None:
    tune = {"parameters": {"clipping.bound": [0.5, 2]}, "privacy": "unaccounted"}
    file = write(tmp_path, clipping=["none", "flat"], noise="constant", data=PUBLIC, tune=tune)
    rows = [line for line in command("plan", file).out.splitlines() if "seed1000000-" in line]
    assert [row.count("clipping.bound 0.5") for row in rows] == [0, 1, 0]
    assert [row.count("clipping.bound 2") for row in rows] == [0, 0, 1]
    trials = json.loads(command("plan", file, "--json").out)["trials"]
    assert [each["candidate"] for each in trials] == [{}, {"clipping.bound": 0.5}, {"clipping.bound": 2}]


@pytest.mark.long
def test_trials_of_one_name_are_told_apart(tmp_path: Path, command: Command) -> None:
    """In the plan, and in the table at the end of a run; where keys say all that differs, no column repeats it."""
    file = write(tmp_path, clipping=[{"name": "flat", "bound": [0.5, 1.0]}], noise="constant", epochs=[1, 2])
    planned = command("plan", file).out
    run = ("run", file, "--address", "in-process", "--tracking-uri", "none", "--output", tmp_path / "out")
    for table in (planned, command(*run).out):
        rows = [line for line in table.splitlines() if line.startswith((" flat-constant", "flat-constant"))]
        assert "differs in" in table
        assert len(rows) == 4
        for difference in ("flat (bound 0.5), epochs 1", "flat (bound 0.5), epochs 2", "flat (bound 1), epochs 1"):
            assert sum(difference in row for row in rows) == 1, rows
    code, planned, _ = command("plan", write(tmp_path))
    assert (code, "differs in" in planned) == (0, False)


def test_a_plan_is_json(tmp_path: Path, command: Command) -> None:
    file = write(tmp_path, privacy={**PRIVACY, "delta": 0.01})
    printed = command("plan", file, "--json")
    plan = json.loads(printed.out)
    assert [trial["private"] for trial in plan["trials"]] == [False, True, True, True, True]
    assert plan["trials"][0]["epsilon"] is None
    assert plan["trials"][1]["noise_multiplier"] > 0.0
    assert "1/n" in plan["warnings"][0]
    assert "warning: " in printed.err


def test_a_plan_tells_which_trials_are_refused(tmp_path: Path, command: Command) -> None:
    file = write(tmp_path, sampling=[{"method": "poisson", "batch_size": size} for size in (128, 4096)])
    printed = command("plan", file)
    assert printed.code == 2
    assert len([line for line in printed.err.splitlines() if line.startswith("refused: ")]) == 1
    assert "batch_size is 4096" in printed.err
    assert "flat-constant-epsilon5-seed0-" in printed.out


MISTAKES = {
    "no file": (None, "missing.yaml: No such file or directory; give the path of one that can be read"),
    "unknown key": ({"epoch": 3}, "did you mean 'epochs'?"),
    "missing data": ({"data": {"name": "image_folder", "path": "/nowhere"}}, "/nowhere"),
}


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_starts_nothing(tmp_path: Path, changes: dict[str, object] | None, message: str) -> None:
    file = tmp_path / "missing.yaml" if changes is None else write(tmp_path, **changes)
    output = tmp_path / "out"
    done = dpsweep("run", file, "--output", output)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert done.stdout == ""
    assert not output.exists()


@pytest.mark.parametrize("address", ["local", "in-process"])
@pytest.mark.parametrize("below", ["", "/deeper/still"])
def test_an_output_that_is_a_file_is_refused_and_stays(address: str, below: str, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    output = f"{tmp_path}/notes{below}"
    done = dpsweep("run", write(tmp_path), "--output", output, "--address", address)
    (line,) = done.stderr.splitlines()
    said = f"error: --output {output}: {tmp_path}/notes is a file, not a folder; name another folder with --output"
    assert (done.returncode, line) == (2, said)
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_output_whose_encoding_lacks_a_character_gets_its_escape(encoding: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dpsweep", "plan", str(write(tmp_path))]
    done = subprocess.run(command, capture_output=True, env=environment(PYTHONIOENCODING=encoding), check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert "ε at δ = 1e-05".encode(encoding, "backslashreplace") in done.stdout


def test_too_little_memory_is_said_in_one_line(tmp_path: Path) -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (15 * 10**8,) * 2)\n"
    code = f"{limited}from dpsweep.orchestration.commands.main import main; main()"
    command = [sys.executable, "-c", code, "plan", str(write(tmp_path))]
    done = subprocess.run(command, capture_output=True, env=environment(), check=False, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: there is not enough memory; ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("address", ["local", "in-process"])
def test_an_output_that_is_no_utf8_is_refused(address: str, tmp_path: Path) -> None:
    """Neither Ray nor MLflow stores its name."""
    output = f"{tmp_path}/\udcff"
    done = dpsweep("run", write(tmp_path), "--output", output, "--address", address, "--tracking-uri", "none")
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert line.startswith(f"error: --output {tmp_path}/\\udcff: its name is no UTF-8")
    assert [each.name for each in tmp_path.iterdir()] == ["sweep.yaml"], "nothing was started"


def test_a_working_directory_that_is_no_utf8_is_refused_where_ray_would_store_its_name(tmp_path: Path) -> None:
    """By whatever starts Ray, such as a parallel accounting of trials in it."""
    (tmp_path / "\udcff").mkdir()
    file = write(tmp_path / "\udcff")
    command = [sys.executable, "-m", "dpsweep", "run", str(file), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, env=environment(), check=False, text=True)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert line.startswith("error: Ray takes names in UTF-8 alone, and this has other bytes: ")
    assert line.endswith("; rename the file or folder")


def test_an_address_without_a_cluster_is_a_mistake(tmp_path: Path) -> None:
    done = dpsweep("run", write(tmp_path), "--output", tmp_path / "out", "--address", "127.0.0.1:1")
    assert done.returncode == 2
    *warnings, line = done.stderr.splitlines()
    assert all("joined without authentication" in warning for warning in warnings), "of whoever has no token of Ray"
    assert "no Ray cluster answers at '127.0.0.1:1'" in line
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_no_address_is_refused_without_a_warning(tmp_path: Path) -> None:
    done = dpsweep("run", write(tmp_path), "--output", tmp_path / "out", "--address", "in-processs")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "the address 'in-processs' is none of 'local', 'in-process', 'auto' and HOST:PORT" in line
