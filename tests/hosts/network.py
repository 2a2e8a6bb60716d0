"""Hosts on one machine: each has a network namespace of its own, joined to the others by a bridge.

A host has a name, an address, a home folder and a /tmp/ray of its own; files, processes and packages are those of the
machine. It is root's work, with iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LONGEST = 1000.0
"""Seconds after which a command is given up."""
_ENTER = """
set -e
hostname "$1"
mount --make-rprivate /
mount --bind "$2/ray" /tmp/ray
export HOME="$2"
cd "$2"
shift 2
exec "$@"
"""
"""A command in the host's namespace of network, in mount and host-name namespaces of its own."""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass
class Host:
    """One host. environment: of every command that runs there."""

    name: str
    address: str
    folder: Path
    namespace: str
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *command: object, log: str = "log", **changes: str) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own; what it prints is added to the host's file ``log``."""
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                self._entered(command), env=self._all(changes), stdout=output, stderr=output, start_new_session=True
            )

    def run(self, *command: object, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self._entered(command), env=self._all(changes), capture_output=True, text=True, timeout=_LONGEST
        )

    def watch(self, *command: object, **changes: str) -> subprocess.Popen[str]:
        """Start a command whose lines on stdout are read."""
        return subprocess.Popen(
            self._entered(command), env=self._all(changes), stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def dpsweep(self, *arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run dpsweep."""
        return self.run(
            sys.executable,
            "-P",
            "-c",
            "from dpsweep.orchestration.commands.main import main; main()",
            *arguments,
            **changes,
        )

    def processes(self, *words: str) -> list[int]:
        """Processes of the host whose command line holds all of these words."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [pid for pid in map(int, found.stdout.split()) if all(word in _command_line(pid) for word in words)]

    def signal(self, number: signal.Signals, *words: str) -> int:
        """Send a signal to the processes with these words in their command lines; returns how many there were."""
        found = self.processes(*words)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(found)

    def _entered(self, command: Sequence[object]) -> list[str]:
        inside = ["unshare", "--mount", "--uts", "sh", "-c", _ENTER, "sh", self.name, str(self.folder)]
        return ["ip", "netns", "exec", self.namespace, *inside, *map(str, command)]

    def _all(self, changes: Mapping[str, str]) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("LANG", "DPSWEEP_DATA") if name in os.environ}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        root = str(Path(__file__).parents[2])
        return {**kept, "PATH": path, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **self.environment, **changes}


@dataclass
class Network:
    """The bridge, and the hosts on it. subnet: the first three numbers of their addresses."""

    folder: Path
    prefix: str
    subnet: str = "10.77.0"
    hosts: dict[str, Host] = field(default_factory=dict)

    def add(self, name: str, **environment: str) -> Host:
        """Another host, with the next address."""
        number = len(self.hosts) + 1
        host = Host(name, f"{self.subnet}.{number}", self.folder / name, f"{self.prefix}{name}", dict(environment))
        (host.folder / "ray").mkdir(parents=True)
        Path("/tmp/ray").mkdir(exist_ok=True)
        _ip("netns", "add", host.namespace)
        inside = ("-n", host.namespace)
        _ip("link", "add", self._cable(number), "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _ip("link", "set", self._cable(number), "netns", self._switch)
        _ip("-n", self._switch, "link", "set", self._cable(number), "master", "br0", "up")
        _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip(*inside, "link", "set", device, "up")
        _ip(*inside, "route", "add", "default", "dev", "eth0")
        self.hosts[name] = host
        return host

    def cut(self, host: Host) -> None:
        """Take the cable of a host out."""
        self._set_cable(host, "down")

    def join(self, host: Host) -> None:
        """Put the cable of a host in again."""
        self._set_cable(host, "up")

    def _set_cable(self, host: Host, state: str) -> None:
        _ip("-n", self._switch, "link", "set", self._cable(int(host.address.rpartition(".")[2])), state)

    def _cable(self, number: int) -> str:
        return f"{self.prefix}c{number}"

    @property
    def _switch(self) -> str:
        return f"{self.prefix}switch"

    def begin(self) -> None:
        """Make the bridge."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")

    def end(self) -> None:
        """End every process of the hosts, and remove their namespaces."""
        for host in self.hosts.values():
            for _ in range(50):
                if not host.signal(signal.SIGKILL):
                    break
                time.sleep(0.1)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
        subprocess.run(["ip", "netns", "del", self._switch], capture_output=True)


@contextlib.contextmanager
def network(folder: Path) -> Iterator[Network]:
    """A network without hosts; everything of it is gone when the block ends."""
    made = Network(folder, f"d{os.getpid() % 100000}")
    made.begin()
    try:
        yield made
    finally:
        made.end()


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
