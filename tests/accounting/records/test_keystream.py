"""A process that holds a key leaves no core file when it crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpsweep.accounting.records.encryption import KEY_VARIABLE

_CRASH = """
import os, resource
most = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (most, most))
{made}
os.abort()
"""
_KEYS = {
    "of noise": "from dpsweep.accounting.records.keystream import KeyedStream; KeyedStream.from_os()",
    "of the user": "from dpsweep.accounting.records.encryption import is_encrypting; is_encrypting()",
}


def limit_after(made: str, folder: Path) -> int:
    """The limit of core files, in bytes, of a process that has made a key."""
    code = f"{_CRASH.format(made=made)}".replace("os.abort()", "print(resource.getrlimit(resource.RLIMIT_CORE)[0])")
    environment = {**os.environ, KEY_VARIABLE: "0" * 64}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, cwd=folder, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("which", _KEYS)
def test_a_process_with_a_key_writes_no_core_file(which: str, tmp_path: Path) -> None:
    assert limit_after(_KEYS[which], tmp_path) in (0, 1)


def test_nor_does_it_when_it_crashes(tmp_path: Path) -> None:
    """A process without a key shows whether this machine writes core files at all."""
    left: dict[str, list[str]] = {}
    for made in ("", _KEYS["of noise"]):
        folder = tmp_path / str(len(left))
        folder.mkdir()
        crashed = subprocess.run([sys.executable, "-c", _CRASH.format(made=made)], cwd=folder, check=False)
        assert crashed.returncode < 0
        left[made] = os.listdir(folder)
    if not left[""]:
        pytest.skip("this machine writes no core files into the folder of a process")
    assert left[_KEYS["of noise"]] == []
