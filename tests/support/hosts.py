"""Hosts: several machines in one, as namespaces of network, processes and names, on one switch.

Each host has a separate address, name, process table and name service; files are shared. A host's
own name leads to 127.0.1.1, as in Debian, and the names of other hosts to their addresses. Links
can be slowed and cut, and hosts lost. Root and the tools for namespaces are required.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
from support.runs import Ended

TOOLS = ("ip", "tc", "unshare", "mount")
START = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
GATHER_S = 20.0  # how long torchrun may wait for more hosts at a new start


class Host:
    """A machine. ``Hosts`` makes the machine.

    Args:
        number: the number of the host, from 1.
    """

    def __init__(self, number: int, mark: str, folder: Path) -> None:
        self.name = f"host-{'abcdefgh'[number - 1]}"
        self.address = f"10.231.7.{number}"
        self.namespace = f"{mark}-{number}"
        self.port = f"port{number}"  # of the switch
        self.names = folder / f"{self.name}.hosts"  # the host's /etc/hosts
        self._switch = f"{mark}-switch"
        self._processes: list[subprocess.Popen[str]] = []

    def start(
        self, words: Sequence[str], env: Mapping[str, str] | None = None, out: IO[str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command there; the output goes to a pipe, or to a file."""
        inside = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        begin = ["ip", "netns", "exec", self.namespace, *inside]
        begin += ["sh", "-c", START, "sh", str(self.names), self.name]
        process = subprocess.Popen(
            [*begin, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if out is None else out,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
            process_group=0,
        )
        self._processes.append(process)
        return process

    def slow(self, mbit_per_s: int) -> None:
        """Bound the throughput of the link, in each direction."""
        rate = ["root", "tbf", "rate", f"{mbit_per_s}mbit", "burst", "256kb", "latency", "100ms"]
        _do("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", *rate)
        _do("tc", "-n", self._switch, "qdisc", "replace", "dev", self.port, *rate)

    def cut(self) -> None:
        """Cut the link: sent data is lost, and nobody is told."""
        _do("ip", "-n", self._switch, "link", "set", self.port, "down")

    def mend(self) -> None:
        """Have the link again."""
        _do("ip", "-n", self._switch, "link", "set", self.port, "up")

    def die(self) -> None:
        """End all of the host's processes at once, as a power cut does, and cut the link."""
        self.cut()
        self.kill()

    def kill(self) -> None:
        """End all processes of the host; their output can still be read."""
        for process in self._processes:
            if process.poll() is None:  # the first of the namespace takes the rest along
                for child in psutil.Process(process.pid).children():
                    child.kill()
                process.kill()
            process.wait()

    def close(self) -> None:
        """End all processes of the host."""
        self.kill()
        for process in self._processes:
            if process.stdout is not None:
                process.stdout.close()
        self._processes.clear()


@contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """Make so many hosts on one switch; nothing is left of the hosts afterwards."""
    _remove_what_was_left()
    mark = f"quorate-{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="quorate-hosts-"))
    made = [Host(n, mark, folder) for n in range(1, number + 1)]
    try:
        switch = f"{mark}-switch"
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "switch", "up")
        for host in made:
            _connect(host, switch)
            others = [f"{other.address} {other.name}" for other in made if other is not host]
            lines = ["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *others]
            host.names.write_text("\n".join([*lines, ""]))
        yield made
    finally:
        for host in made:
            host.close()
        _remove(mark)
        shutil.rmtree(folder, ignore_errors=True)


def obstacle() -> str | None:
    """Return why there can be no hosts here; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces of a network take root, on Linux"
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(lacking)} here"
    try:
        with hosts(1) as (host,):
            host.slow(1000)
            if (ended := end(host.start(["true"]), 10)).code != 0:
                return f"no namespace of processes: {ended.out}"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return None


def torchrun(
    nodes: str, per_node: int, *words: str, at: str, restarts: int = 0, conf: str = ""
) -> list[str]:
    """Return torchrun's command line for a host.

    Args:
        nodes: the number of hosts, or ``least:most``.
        per_node: ranks of each.
        words: the script and its arguments.
        at: where the hosts meet: host and port.
        restarts: how often the ranks may be started anew.
        conf: more of the rendezvous's configuration, each with a comma before it.
    """
    # Without, a lost host counts as present for 15 s, and a joining host waits for 600 s.
    meet = f"keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3{conf}"
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes),
        *("--nproc-per-node", str(per_node), "--max-restarts", str(restarts)),
        *("--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", at),
        *("--rdzv-id", "test", "--rdzv-conf", meet, *words),
    ]


def end(process: subprocess.Popen[str], limit_s: float) -> Ended:
    """Wait for a process to end, and return the output."""
    out, _ = process.communicate(timeout=limit_s)
    return Ended(process.returncode, out or "", "")


def end_all(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> list[Ended]:
    """Wait for several processes to end."""
    deadline = time.monotonic() + limit_s
    return [end(process, max(0.1, deadline - time.monotonic())) for process in processes]


def _connect(host: Host, switch: str) -> None:
    _do("ip", "netns", "add", host.namespace)
    inside, outside = ("ip", "-n", host.namespace), ("ip", "-n", switch, "link")
    peer = ("type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _do(*outside, "add", host.port, *peer)
    _do(*outside, "set", host.port, "master", "switch", "up")
    _do(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
    for interface in ("eth0", "lo"):
        _do(*inside, "link", "set", interface, "up")


def _remove_what_was_left() -> None:
    """Remove the remains of killed tests."""
    for line in _do("ip", "netns", "list").splitlines():
        word, pid, *_ = (*line.split()[0].split("-"), "")
        if word == "quorate" and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _remove(f"quorate-{pid}")


def _remove(mark: str) -> None:
    for line in _do("ip", "netns", "list").splitlines():
        if (name := line.split()[0]).startswith(f"{mark}-"):
            for pid in _do("ip", "netns", "pids", name).split():
                os.kill(int(pid), signal.SIGKILL)
            _do("ip", "netns", "delete", name)


def _do(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout
