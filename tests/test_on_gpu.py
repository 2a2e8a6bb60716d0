"""What runs on a GPU when there is one: the same phases, tiny, on the CPU; and what is kept when phases go wrong."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import pack
from benchmarks.gpu.goals import goals
from benchmarks.gpu.phases import PHASES
from benchmarks.gpu.record import MOST_TRACEBACKS, Record, read
from benchmarks.gpu.report import Report

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "on_gpu.sh"
AHEAD = "import os, signal, subprocess, sys, time\ndef run(record, device, size):\n    record.figure('before', 1)\n"
WRONG = {
    "hangs": "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(1000)",
    "waits": "    record.figure('process', os.getpid())\n    time.sleep(1000)",
    "raises": "    raise ValueError('no such kernel')",
    "dies": "    os.kill(os.getpid(), signal.SIGSEGV)",
    "exits": "    sys.exit(7)",
    "fine": "    record.skipped('a peer', 'not installed')",
    "orphans": "    child = subprocess.Popen(['sleep', '1000'])\n    record.figure('child', child.pid)\n    os.abort()",
}
"""What phases do, by name, after they have measured something."""


def environment(out: Path) -> dict[str, str]:
    return {**os.environ, "PYTHON": sys.executable, "OUT": str(out), "OMP_NUM_THREADS": "1"}


def script(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment(out), cwd=out, capture_output=True, text=True, check=False)


def content(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "gpu.json").read_text())
    return found


def dry_run(out: Path, *names: str) -> dict[str, Any]:
    """What gpu.json holds after a dry run of these phases, each of which has ended well."""
    done = script(out, "--device", "cpu", *(word for name in names for word in ("--phase", name)))
    found = content(out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["state"] == "done"
    assert [path.name for path in out.iterdir()] == ["gpu.json"]
    assert found["machine"]["versions"]["torch"]
    for name in names:
        phase = found["phases"][name]
        assert phase["state"] == "done", (name, phase)
        assert phase["failures"] == []
        assert len(phase["figures"]) > 1 or phase["skipped"], name
    return found


def test_a_dry_run_forwards_every_model_and_compares_steps_and_trials(tmp_path: Path) -> None:
    found = dry_run(tmp_path, "imports", "noise", "steps", "trials")
    measured = {goal["goal"]: goal["value"] for goal in found["goals"]}
    assert len(measured) == len(goals({})) == 21
    # Tiny steps may add no page to the process: of memory, only the ratio's place is certain on a CPU.
    of_steps = {name for name in measured if "share the device" not in name and "peak memory" not in name}
    assert all(measured[name] is not None for name in of_steps), measured


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_phase_of_a_dry_run_ends_well(tmp_path: Path) -> None:
    dry_run(tmp_path, *(phase.name for phase in PHASES))


@pytest.mark.long
def test_a_device_that_is_not_here_is_refused(tmp_path: Path) -> None:
    done = script(tmp_path, "--device", "cuda:97")
    assert done.returncode == 2
    assert "device is 'cuda:97', but torch finds" in done.stdout
    assert content(tmp_path)["state"] == "no such device"


def test_the_script_begins_without_the_packages_that_it_brings(tmp_path: Path) -> None:
    """It unpacks them. Modules of these names that cannot be imported stand in for their absence."""
    for module in pack.NEEDED:
        (tmp_path / f"{module}.py").write_text("raise ModuleNotFoundError(__name__)")
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    code = "import benchmarks.gpu.__main__"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


IN_THE_IMAGE = {
    *("torch", "torchvision", "triton", "numpy", "scipy", "sklearn", "pandas", "pyarrow", "numba", "PIL", "yaml"),
    *("typer", "rich", "cloudpickle", "pytest", "hypothesis", "mpmath", "transformers", "peft", "tokenizers", "timm"),
    "huggingface_hub",
}


def test_all_that_training_imports_is_in_the_image_or_packed() -> None:
    found = set()
    for file in [*ROOT.glob("workers/**/*.py"), *ROOT.glob("accounting/**/*.py"), *ROOT.glob("benchmarks/gpu/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Import):
                found |= {each.name.partition(".")[0] for each in node.names}
    own = {"dpsweep", "benchmarks", *sys.stdlib_module_names}
    packed = {each.replace("-", "_") for names in pack.NEEDED.values() for each in names}
    assert found - own - IN_THE_IMAGE <= {*pack.NEEDED, *pack.EXTRAS, *packed}


DRIVER = """
import sys
from pathlib import Path
from benchmarks.gpu.phases import SIZES, Phase
from benchmarks.gpu.report import Report
from benchmarks.gpu.runner import run_phases

if __name__ == "__main__":
    out, *names = sys.argv[1:]
    phases = [Phase(name, name, {"waits": 1000.0, "hangs": 0.5}.get(name, 10.0), "goes wrong") for name in names]
    report = Report(Path(out) / "gpu.json", "cpu", phases, Path(out))
    shared = "kills" if (Path(out) / "kills.py").exists() else "dpsweep.workers.machine.devices"
    sys.exit(run_phases(phases, report, "cpu", SIZES["small"], 2000.0, Path(out), shared=shared))
"""


def driven(folder: Path, *names: str) -> subprocess.Popen[str]:
    """Start phases that go wrong, each in its own way."""
    for name, body in WRONG.items():
        (folder / f"{name}.py").write_text(AHEAD + body + "\n")
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    command = [sys.executable, str(driver), str(folder), *names]
    return subprocess.Popen(command, env=path, stdout=subprocess.PIPE, text=True)


@pytest.mark.long
def test_what_goes_wrong_in_a_phase_is_kept_and_the_next_begins(tmp_path: Path) -> None:
    names = ("hangs", "raises", "dies", "exits", "orphans", "fine")
    with driven(tmp_path, *names) as process:
        told = process.communicate()[0]
    found = content(tmp_path)
    assert process.returncode == 1
    assert found["state"] == "done"
    phases = found["phases"]
    assert {name: phases[name]["state"] for name in names} == {
        "hangs": "out of time",
        "raises": "done",
        "dies": "crashed by SIGSEGV",
        "exits": "failed with status 7",
        "orphans": "crashed by SIGABRT",
        "fine": "done",
    }
    child = Path("/proc") / str(phases["orphans"]["figures"]["child"]) / "cmdline"
    assert not child.exists() or child.read_bytes() == b"", "it ended with its phase"
    assert all(phases[name]["figures"]["before"] == 1 for name in names)
    (failure,) = phases["raises"]["failures"]
    assert failure["error"] == "ValueError: no such kernel"
    assert "Traceback" in failure["traceback"]
    assert 'hangs.py", line 5 in run' in phases["hangs"]["output"], "it says where it was"
    assert 'dies.py", line 4 in run' in phases["dies"]["output"]
    assert phases["fine"]["skipped"] == {"a peer": "not installed"}
    assert "raises: done after" in told
    assert "ValueError: no such kernel" in told


@pytest.mark.long
def test_phases_import_by_themselves_where_what_they_share_kills_its_process(tmp_path: Path) -> None:
    (tmp_path / "kills.py").write_text("import os\nos._exit(9)\n")
    with driven(tmp_path, "fine", "raises") as process:
        process.communicate()
    phases = content(tmp_path)["phases"]
    assert phases["fine"]["state"] == phases["raises"]["state"] == "done"
    assert "each phase imports by itself" in phases["fine"]["shared_imports"]
    assert phases["fine"]["figures"]["before"] == 1


@pytest.mark.long
@pytest.mark.parametrize(("number", "state"), [(signal.SIGKILL, "running"), (signal.SIGINT, "interrupted")])
def test_what_was_measured_outlives_the_end_of_the_run(number: signal.Signals, state: str, tmp_path: Path) -> None:
    with driven(tmp_path, "fine", "waits", "raises") as process:
        deadline = time.monotonic() + 300.0
        while not (found := waiting_process(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate()
    phases = content(tmp_path)["phases"]
    assert content(tmp_path)["state"] == state
    assert phases["fine"]["state"] == "done"
    assert phases["waits"]["figures"]["process"] == found
    assert phases["raises"]["state"] == "waiting"
    while Path(f"/proc/{found}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{found}").exists(), "its phase ended with it"


def waiting_process(folder: Path) -> int | None:
    """The process of the phase that waits, once gpu.json tells it."""
    if not (folder / "gpu.json").exists():
        return None
    process: int | None = content(folder)["phases"]["waits"].get("figures", {}).get("process")
    return process


def test_wheels_are_unpacked_and_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "own-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("own_of_wheel/__init__.py", "")
    assert pack.unpacked(tmp_path / "nothing", tmp_path / "site") == []
    (site,) = pack.unpacked(tmp_path, tmp_path / "site")
    assert (Path(site) / "own_of_wheel" / "__init__.py").exists()
    assert pack.missing() == []
    monkeypatch.setattr(pack, "REQUIRED", (*pack.REQUIRED, "own_of_wheel"))
    assert pack.missing() == ["own_of_wheel"]


def test_a_wheel_that_is_cut_or_of_another_python_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(tmp_path / "other-1.0-cp399-cp399-any.whl", "w") as wheel:
        wheel.writestr("of_another_python/__init__.py", "from of_another_python import _compiled")
    whole = (tmp_path / "other-1.0-cp399-cp399-any.whl").read_bytes()
    (tmp_path / "cut-1.0-py3-none-any.whl").write_bytes(whole[:-40])
    (site,) = pack.unpacked(tmp_path, tmp_path / "site")
    assert "cut-1.0-py3-none-any.whl cannot be unpacked (File is not a zip file); collect it" in capsys.readouterr().out
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(pack, "REQUIRED", ("of_another_python",))
    monkeypatch.setattr(pack, "NEEDED", {"of_another_python": ("other",)})
    (told,) = pack.missing()
    assert told.startswith("of_another_python (ImportError: cannot import name '_compiled'")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [str(SCRIPT), "--device", "cpu"],
        env=environment(tmp_path / "file"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == f"{tmp_path}/file/gpu.json cannot be written: Not a directory; name another folder by OUT\n"


def test_a_run_goes_on_where_its_file_cannot_be_written_and_prints_it_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, (phase, *_) = tmp_path / "out", PHASES
    report = Report(out / "gpu.json", "cpu", [phase], ROOT)
    (out / "gpu.json").unlink()
    out.rmdir()
    out.touch()
    report.note(phase, figures={"measured": 1})
    assert report.unsaved == "Not a directory"
    report.end("done")
    told, _, text = capsys.readouterr().out.partition(" It would hold:\n")
    assert told == f"{out}/gpu.json cannot be written: Not a directory."
    assert json.loads(text)["phases"][phase.name]["figures"] == {"measured": 1}
    out.unlink()
    report.end("done")
    assert capsys.readouterr().out == ""
    assert content(out)["phases"][phase.name]["figures"] == {"measured": 1}


def test_many_failures_do_not_make_the_file_too_large_to_be_taken_along(tmp_path: Path) -> None:
    record = Record(tmp_path / "lines")
    for place in range(3000):
        record.failed(f"test {place}", "RuntimeError: no kernel", "x" * 8000)
    found = read(tmp_path / "lines")["failures"]
    assert [bool(each["traceback"]) for each in found] == [place < MOST_TRACEBACKS for place in range(3000)]
    assert len(json.dumps(found)) < 2**20


def test_the_end_of_a_line_that_is_still_written_is_left_out(tmp_path: Path) -> None:
    record = Record(tmp_path / "lines")
    record.figure("first", 1.5)
    with record.attempt("second"):
        raise RuntimeError("out of memory")
    with (tmp_path / "lines").open("a") as file:
        file.write('{"figure": "thi')
    found = read(tmp_path / "lines")
    assert found["figures"] == {"first": 1.5}
    assert [failure["error"] for failure in found["failures"]] == ["RuntimeError: out of memory"]


def test_goals_are_ratios_of_what_was_measured() -> None:
    step = {
        "plain_ms": 100.0, "dpsweep": 1.25, "vmap": 2.0, "opacus_ghost": 1.5, "norm_pass": 0.5, "secret_noise_ms": 5.0,
        "peak_mb": {"plain": 100.0, "dpsweep": 130.0},
        "samples": dict.fromkeys(("plain", "dpsweep", "vmap", "opacus_ghost", "norm_pass"), 2),
    }  # fmt: skip
    together = {"throughput": {"alone": 100.0, "together": 500.0}}
    found = {str(goal["goal"]): goal for goal in goals({"steps": {"wrn16_4_bf16": step}, "together": together})}
    values = {name.removeprefix("wrn16_4_bf16: "): (goal["value"], goal["met"]) for name, goal in found.items()}
    assert values["throughput over that of a plain step"] == (0.8, True)
    assert values["throughput over that of the best peer"] == (1.2, True)
    assert values["peak memory over that of a plain step"] == (1.3, False)
    assert values["share of keyed noise in a step"] == (0.0385, False)
    assert values["throughput of trials that share the device over that of one"] == (5.0, True)
    assert values["gpt2_lora_bf16: throughput over that of a plain step"] == (None, None)
