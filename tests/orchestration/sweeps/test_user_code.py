"""A sweep runs the code beside it and what the user allows, and nothing else; only its workers can import it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from dpsweep.orchestration.sweeps.user_code import shipped_folders, unpacked
from dpsweep.workers.own_code.imports import UserCode, UserModule, import_function
from tests.orchestration.processes import Command, dpsweep
from tests.orchestration.sample_grids import small
from tests.workers.data_folders import make_texts, make_tokenizer

MODELS = """
import sys
from pathlib import Path
from subprocess import getoutput
from torch import nn
import helper

def narrow(feature_shape, num_classes, note=None):
    if note is not None:
        with open(note, "a") as out:
            print(*sys.path, sep="|", file=out)
    return nn.Sequential(nn.Flatten(), nn.Linear(helper.INPUTS, num_classes))
"""
HELPER = "INPUTS = 64\n"
PLANTED = """
import os
open({marker!r}, "a").write(f"{{os.getpid()}}\\n")
"""
PRIVACY = {"noise_multiplier": 2.0, "delta": 1e-5, "accountant": "rdp"}


def write(folder: Path, **changes: object) -> Path:
    """A sweep of one trial in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "sweep.yaml"
    few = {"clipping": "flat", "noise": "constant", "seeds": 0, "epochs": 1, "privacy": PRIVACY}
    file.write_text(small(**{**few, **changes}))
    return file


def write_models(folder: Path, name: str = "my_models") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(MODELS)
    (folder / "helper.py").write_text(HELPER)


def refusal(command: Command, *arguments: object) -> str:
    """The one line with which the command refuses its input."""
    done = command(*arguments)
    assert done.code == 2, done
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Begin in a folder that holds no code; as one process runs all tests, their modules need different names."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


@pytest.mark.parametrize("action", ["plan", "run"])
@pytest.mark.parametrize("name", ["subprocess:getoutput", "os:system"])
@pytest.mark.parametrize("axis", ["data", "model"])
def test_a_sweep_file_cannot_run_a_shell_command(
    tmp_path: Path, command: Command, action: str, name: str, axis: str
) -> None:
    marker = tmp_path / "marker"
    key = "cmd" if name.startswith("subprocess") else "command"
    file = write(tmp_path, **{axis: {"name": name, key: f"touch {marker}"}})
    line = refusal(command, action, file, *(["--output", tmp_path / "out"] if action == "run" else []))
    assert not marker.exists()
    location = name.partition(":")[0]
    assert f"{name!r}: {location!r} is no module in the sweep file's folder" in line
    assert f"add --allow-code {location}" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("location", [f"{'a' * 300}.py", "a" * 300, "a\0b.py", f"{'a' * 254}"])
def test_a_name_that_no_file_can_have_is_one_line(tmp_path: Path, command: Command, location: str) -> None:
    assert location.partition("\0")[0] in refusal(command, "plan", write(tmp_path, model=f"{location}:make"))


def test_nothing_outside_the_folder_is_imported(tmp_path: Path, command: Command) -> None:
    """By links, relative paths, environments in the folder, names of the standard library, and names within names."""
    folder, marker = tmp_path / "sweeps", tmp_path / "marker"
    code = PLANTED.format(marker=str(marker)) + "def f(**params):\n    pass\n"
    environment = Path("env", "lib", "python3.12", "site-packages")
    for place in (tmp_path, folder / "package", folder / "linked_init", folder / environment):
        place.mkdir(parents=True, exist_ok=True)
        (place / "outside.py").write_text(code)
    (folder / "link.py").symlink_to(tmp_path / "outside.py")
    (folder / "package" / "link.py").symlink_to(tmp_path / "outside.py")
    (folder / "linked_folder").symlink_to(tmp_path)
    (folder / "linked_init" / "__init__.py").symlink_to(tmp_path / "outside.py")
    for taken in ("json", "torch"):
        (folder / f"{taken}.py").write_text(code)
    (folder / "mine.py").write_text(code)
    cases = {
        "../outside.py:f": "is not the sweep's own",
        f"{tmp_path}/outside.py:f": "is not the sweep's own",
        "link.py:f": "is not the sweep's own",
        "link:f": "is not the sweep's own",
        "package.link:f": "is not the sweep's own",
        "linked_folder.outside:f": "is not the sweep's own",
        "linked_init.outside:f": "is not the sweep's own",
        f"{environment}/outside.py:f": "outside of any environment",
        "json:f": "has the name of another module (of the standard library)",
        "torch:f": "has the name of another module",
        "mine:f.__call__": "is no import path",
        "mine.:f": "is no import path",
        "..outside:f": "is no import path",
        "absent:f": "is no module in the sweep file's folder",
        "absent.py:f": "there is no file",
        "__main__:f": "give the function or class itself",
    }
    file = write(folder, model=list(cases))
    done = command("plan", file)
    assert done.code == 2
    lines = done.err.splitlines()
    assert len(lines) == len(cases)
    for name, message in cases.items():
        (line,) = [line for line in lines if f"model {name!r}" in line]
        assert message in line
    assert not marker.exists()


def test_what_a_module_imports_is_not_the_sweeps_to_call(tmp_path: Path, command: Command) -> None:
    write_models(tmp_path, "importing_models")
    marker = tmp_path / "marker"
    done = command("plan", write(tmp_path, model={"name": "importing_models:getoutput", "cmd": f"touch {marker}"}))
    assert done.code == 2
    assert "'getoutput' comes from 'subprocess'; name a function that 'importing_models' defines itself" in done.err
    assert not marker.exists()


@pytest.mark.parametrize("model", ["beside_models:narrow", "beside_models.py:narrow", "inner_models.nets:narrow"])
def test_code_beside_the_sweep_file_needs_no_permission(tmp_path: Path, command: Command, model: str) -> None:
    """The working directory is elsewhere: names are relative to the sweep file."""
    if model.startswith("inner_models"):
        write_models(tmp_path / "inner_models", "nets")
        write_models(tmp_path, "unused_models")
    else:
        write_models(tmp_path, "beside_models")
    done = command("plan", write(tmp_path, model=model), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["trials"][0]["refused"] is None


def test_the_working_directory_needs_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    here, folder = tmp_path / "here", tmp_path / "sweeps"
    write_models(here, "here_models")
    monkeypatch.chdir(here)
    file = write(folder, model="here_models:narrow")
    assert "add --allow-code here_models" in refusal(command, "plan", file)
    for allowed in ("here_models", "os"):
        done = command("plan", file, "--allow-code", allowed)
        assert done.code == (0 if allowed == "here_models" else 2), done.err
    named = write(folder, model=f"{here}/here_models.py:narrow")
    assert f"add --allow-code {here}/here_models.py" in refusal(command, "plan", named)
    done = command("plan", named, "--allow-code", "here_models.py")
    assert done.code == 0, done.err
    assert "no such module is installed or lies in" in refusal(command, "plan", named, "--allow-code", "absent_models")
    assert "there is no file" in refusal(command, "plan", named, "--allow-code", "absent.py")
    assert "must be a module or a file" in refusal(command, "plan", named, "--allow-code", "a/b")


@pytest.mark.long
def test_an_installed_package_needs_permission(tmp_path: Path, command: Command) -> None:
    """Allowed, it is run: it then says itself that it takes other arguments."""
    file = write(tmp_path, model="torchvision.models:resnet18")
    assert "add --allow-code torchvision.models" in refusal(command, "plan", file)
    done = command("plan", file, "--allow-code", "torchvision")
    assert done.code == 2
    assert "allow-code" not in done.err
    assert "TypeError in _resnet (resnet.py:" in done.err, done.err


@pytest.mark.long
def test_ray_runs_nothing_from_the_working_directory_nor_from_beside_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep with a model of its own, planned, run and resumed; then its report, without the code."""
    here, folder = tmp_path / "here", tmp_path / "sweeps"
    marker, note = tmp_path / "marker", tmp_path / "note"
    write_models(folder)
    here.mkdir()
    for place in (here, folder):
        (place / "sitecustomize.py").write_text(PLANTED.format(marker=str(marker)))
        (place / "usercustomize.py").write_text(PLANTED.format(marker=str(marker)))
    monkeypatch.chdir(here)
    file, output = write(folder, model={"name": "my_models:narrow", "note": str(note)}), tmp_path / "out"
    done = dpsweep("run", file, "--output", output, "--json")
    assert done.returncode == 0, done.stderr
    (trial,) = json.loads(done.stdout)["trials"]
    assert trial["status"] == "finished", trial["error"]
    assert not marker.exists(), "a planted file ran"
    paths = [line.split("|") for line in note.read_text().splitlines()]
    assert len(paths) >= 2, "once in the plan, once in a worker"
    worker = paths[-1]
    assert str(here) not in worker
    assert "" not in worker
    assert worker[-1] == str(folder), "after all that is installed"
    shutil.rmtree(output / "trials" / trial["key"])
    resumed = dpsweep("run", file, "--output", output, "--json")
    assert resumed.returncode == 0, resumed.stderr

    (folder / "my_models.py").write_text(PLANTED.format(marker=str(marker)))
    before = note.read_text()
    reported = dpsweep("report", output, "--json")
    assert reported.returncode == 0, reported.stderr
    assert json.loads(reported.stdout)["trials"][0]["status"] == "finished"
    assert not marker.exists(), "the report imported the user's code"
    assert note.read_text() == before


class TestPlansWithoutCode:
    @pytest.fixture
    def marker(self, tmp_path: Path) -> Path:
        (tmp_path / "unrun.py").write_text(PLANTED.format(marker=str(tmp_path / "marker")) + MODELS)
        (tmp_path / "helper.py").write_text(HELPER)
        return tmp_path / "marker"

    def test_a_model_is_not_tried(self, tmp_path: Path, command: Command, marker: Path) -> None:
        file = write(tmp_path, model=["unrun:narrow", "mlp", "subprocess:getoutput"])
        done = command("plan", file, "--no-code", "--json")
        assert done.code == 0, done.err
        plan = json.loads(done.out)
        assert [trial["refused"] for trial in plan["trials"]] == [None] * 3
        assert {trial["noise_multiplier"] for trial in plan["trials"]} == {2.0}
        untried = [note for note in plan["notes"] if "was not tried on rows of the data" in note]
        assert [note.split("'")[1] for note in untried] == ["subprocess:getoutput", "unrun:narrow"]
        assert not marker.exists()
        assert command("plan", write(tmp_path, model="unrun:narrow")).code == 0
        assert marker.exists(), "with code, the plan tries it"

    def test_a_data_source_is_refused_by_name(self, tmp_path: Path, command: Command, marker: Path) -> None:
        file = write(tmp_path, data=["digits", "unrun:load"])
        done = command("plan", file, "--no-code", "--json")
        assert done.code == 2
        (line,) = [each for each in done.err.splitlines() if not each.startswith("warning: each setting")]
        assert line.startswith("refused: data source 'unrun:load' is the user's own code, which is not run here")
        trials = json.loads(done.out)["trials"]
        assert [trial["refused"] is None for trial in trials] == [True, False]
        assert not marker.exists()

    def test_nothing_is_written_where_the_sweep_file_says(self, tmp_path: Path, command: Command) -> None:
        texts = {"path": str(make_texts(tmp_path / "texts.csv")), "text": "body", "label": "mood"}
        tokenizer = {"tokenizer": str(make_tokenizer(tmp_path / "tokenizer.json")), "max_length": 8}
        data = {"name": "text", **texts, **tokenizer, "test_fraction": 0.2, "cache": str(tmp_path / "cache")}
        model = {"name": "transformer", "width": 4, "depth": 1, "heads": 1}
        file = write(tmp_path, data=data, model=model)
        assert command("plan", file, "--no-code").code == 0
        assert not (tmp_path / "cache").exists()

    def test_to_allow_code_as_well_is_a_mistake(self, tmp_path: Path, command: Command) -> None:
        assert "give one of them" in refusal(command, "plan", write(tmp_path), "--no-code", "--allow-code", "os")


def test_a_file_that_is_shipped_to_another_folder_is_imported_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shapes.py").write_text("import beside\n\ndef area(side):\n    return beside.SQUARED(side)\n")
    (tmp_path / "beside.py").write_text("def SQUARED(side):\n    return side * side\n")
    code = UserCode((UserModule("shapes.py", str(tmp_path / "shapes.py")).as_it_is(),))
    with shipped_folders(code) as (folders, there):
        shutil.copytree(folders[0], tmp_path / "node" / Path(folders[0]).name)
        for name in ("shapes.py", "beside.py"):
            (tmp_path / name).unlink()
        monkeypatch.syspath_prepend(str(tmp_path / "node"))
        monkeypatch.delitem(sys.modules, Path(folders[0]).name, raising=False)
        assert import_function("shapes.py:area", "model", unpacked(there))(3) == 9
