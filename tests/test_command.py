"""The command where Python finds packages of other projects under the names of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.orchestration.processes import environment

ROOT = Path(__file__).parent.parent
PACKAGES = ("accounting", "workers", "orchestration")


def python(code: str, folder: Path, first: Path) -> subprocess.CompletedProcess[str]:
    """``code`` in ``folder``, with ``first`` before our own packages on Python's path."""
    changes = {"PYTHONPATH": f"{first}:{ROOT}"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(**changes),
        capture_output=True,
        text=True,
        check=False,
    )


def plant(folder: Path, package: str) -> Path:
    """Another project's package, which leaves a file when it is imported."""
    (folder / package).mkdir(parents=True)
    file = folder / package / "__init__.py"
    file.write_text(f"open({str(folder / 'imported')!r}, 'w').close()\n")
    return file


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("where", ["PYTHONPATH", "working directory"])
def test_another_package_of_the_name_is_one_line(tmp_path: Path, package: str, where: str) -> None:
    file, elsewhere = plant(tmp_path, package), tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder, first = (tmp_path, ROOT) if where == "working directory" else (elsewhere, tmp_path)
    ended = python("import dpsweep.command; dpsweep.command.main()", folder, first)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"error: dpsweep needs its own package {package!r}, which lies in {ROOT}, but Python finds {file}; rename that "
        "one, or take its folder from PYTHONPATH\n"
    )
    assert not (tmp_path / "imported").exists()
    library = python("import dpsweep; dpsweep.open('x')", folder, first)
    assert library.stderr.splitlines()[-1].startswith(f"ImportError: dpsweep needs its own package {package!r}")
    assert not (tmp_path / "imported").exists()


def test_a_single_module_and_a_folder_without_code(tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text("")
    assert f"Python finds {tmp_path}/workers.py" in python("import dpsweep; dpsweep.run", tmp_path, ROOT).stderr
    (tmp_path / "workers.py").unlink()
    (tmp_path / "workers").mkdir()
    ended = python("from dpsweep.command import main; main()", tmp_path, ROOT)
    assert "Usage" in ended.stdout, ended.stderr


def test_the_console_script_is_this_command() -> None:
    assert '[project.scripts]\ndpsweep = "dpsweep.command:main"\n' in (ROOT / "pyproject.toml").read_text()


def test_the_package_runs_as_the_command(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "dpsweep", "epsilon", "--help"]
    ended = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert "Usage: python -m dpsweep epsilon" in " ".join(ended.stdout.split())
