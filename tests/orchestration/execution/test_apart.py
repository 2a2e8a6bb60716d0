"""Work in a process of its own ends with the driver that asked for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.orchestration.processes import descendants, is_alive, wait_until

DRIVER = "import time; from dpsweep.orchestration.execution.apart import run_apart; run_apart('w', time.sleep, 900)"


def test_a_killed_driver_leaves_no_process_that_writes_beside_the_next_one() -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER])
    wait_until(lambda: bool(descendants(driver.pid)), "the other process has begun")
    (other,) = descendants(driver.pid)
    wait_until(lambda: len(os.listdir(Path(f"/proc/{other}/task"))) > 1, "it watches its driver")
    driver.kill()
    driver.wait()
    wait_until(lambda: not is_alive(other), "it has ended")
