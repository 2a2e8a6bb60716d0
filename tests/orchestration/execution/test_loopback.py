"""An embedded cluster is for this machine alone: nothing of it listens on an address that others can reach."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.known import known
from tests.orchestration.processes import PATIENCE, descendants, environment

LISTEN = "0A"
SCRIPT = """
import json, sys
from pathlib import Path
from dpsweep.orchestration.execution.environment import EMBEDDED, prepare_environment
prepare_environment(EMBEDDED)
import os, ray
from dpsweep.orchestration.execution.cluster import connected

class Worker:
    def pid(self):
        return os.getpid()

with connected(EMBEDDED, Path(sys.argv[1])):
    workers = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)]
    print(json.dumps(ray.get([worker.pid.remote() for worker in workers])), flush=True)
    sys.stdin.read()
"""


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    found = set()
    for handle in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = os.readlink(handle)
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def listeners() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Inode and address of every listening TCP socket of this machine."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTEN:
                words = bytes.fromhex(columns[1].partition(":")[0])
                big = b"".join(words[place : place + 4][::-1] for place in range(0, len(words), 4))
                yield columns[9], ipaddress.ip_address(big)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc that tells who listens where")
def test_an_embedded_cluster_listens_on_loopback_only(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        line = known(process.stdout).readline()
        assert line, "the driver ended; what it said is on stderr"
        actors = json.loads(line)
        family = {process.pid, *descendants(process.pid)}
        owned = set().union(*map(sockets_of, family))
        addresses = [address for inode, address in listeners() if inode in owned]
        known(process.stdin).close()
        assert process.wait(PATIENCE) == 0
    assert set(actors) <= family
    assert len(addresses) >= 4, "a scheduler, a store of cluster state, two actors"
    mapped = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    assert all(address.is_loopback for address in mapped), mapped
