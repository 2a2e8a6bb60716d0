"""What Ray's nodes tell the driver stands in the log, not on the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray._private import worker

from orchestration.execution.cluster import logged_to, nodes_told_to_the_log

DUMP = "Raylet is terminated. Last 20 lines of the Raylet logs:\n    [state-dump] NodeManager.GcsCheckAlive"


def tell() -> None:
    """As Ray's listener does, which looks the function up with every message."""
    assert "print_to_stdstream" in worker.listen_error_messages.__code__.co_names
    worker.print_to_stdstream({"lines": [DUMP], "pid": "raylet", "is_err": False}, ignore_prefix=False)


def test_the_last_lines_of_a_dead_raylet_stand_in_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "ray.log"
    with nodes_told_to_the_log(), logged_to(log):
        tell()
    assert capfd.readouterr() == ("", "")
    assert f"(raylet) {DUMP}" in log.read_text()
    tell()
    assert "Raylet is terminated" in capfd.readouterr().out, "as it was before"
