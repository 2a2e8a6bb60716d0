"""What a library would load from the working directory is refused before the library is imported."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

import dpsweep
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.jobs.working_directory import require_harmless_working_directory

MACHINE = platform.machine()


@pytest.mark.parametrize(
    "name",
    [
        ".numba_config.yaml",
        "libcuda.so.1",
        "libnvrtc.so.13",
        f"{MACHINE}/libcuda.so.1",
        f"tls/{MACHINE}/{MACHINE}/libcuda.so.1",
        "glibc-hwcaps/x86-64-v3/libcuda.so.1",
    ],
)
def test_what_a_library_would_load_from_there_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tls").mkdir()
    monkeypatch.chdir(tmp_path)
    require_harmless_working_directory()
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).symlink_to("somewhere")
    with pytest.raises(InvalidInput, match=rf"holds {name}, .* change to another directory"):
        require_harmless_working_directory()
    with pytest.raises(InvalidInput, match="the working directory holds"):
        _ = dpsweep.open
    assert issubclass(dpsweep.InvalidInput, InvalidInput), "errors can be named"


def test_the_command_refuses_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / ".numba_config.yaml").mkdir()
    line = [sys.executable, "-P", "-m", "dpsweep", "epsilon", "--help"]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: the working directory holds .numba_config.yaml, ")
    assert len(ended.stderr.splitlines()) == 1
