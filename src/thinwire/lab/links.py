"""Shaped links on one machine: a network namespace per rank, on one bridge, each at its own rate.

1. A holder process per rank, and one for the bridge, each in a network namespace without a name.
2. A veth pair from each rank's namespace (`eth0`) to the bridge's: nothing appears outside.
3. A token-bucket filter (`tc tbf`) on both ends of each pair: what the rank sends, and receives.

Holders are ended by the kernel when this process dies, however it dies (`setpriv --pdeathsig`);
namespaces and interfaces go with their last process. No interface but these is ever named.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from thinwire.errors import ConfigError, RunError

__all__ = ["INTERFACE", "Links", "burst_nbytes", "parse_rate", "shaped_links"]

INTERFACE = "eth0"
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "setpriv": "util-linux"}
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# The kernel refills a bucket once per timer tick: it must hold what passes in a few of them.
_BURST_S = 0.004
_MIN_BURST_BYTES = 64 * 1024
_QUEUE_S = 0.1
_DIE = ("setpriv", "--pdeathsig", "KILL")


def parse_rate(text: str) -> float:
    """Return bits per second of "100mbit", "1gbit", "2.5gbit"; 0.0 for "none" (not shaped).

    Raises:
        ConfigError: anything else, or a rate outside 1 mbit to 100 gbit.
    """
    if text == "none":
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    rate = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1e6 <= rate <= 1e11:
        raise ConfigError(
            f"--rate {text}: a number with kbit, mbit or gbit, from 1mbit to 100gbit, or none"
        )
    return rate


def burst_nbytes(rate: float) -> int:
    """Return the bytes that an idle link of `rate` bits per second lets pass at once."""
    return max(_MIN_BURST_BYTES, int(rate / 8 * _BURST_S))


@dataclass(frozen=True)
class Links:
    """Where ranks run.

    Attributes:
        holders: process ids that keep the ranks' namespaces.
    """

    holders: tuple[int, ...]

    def prefix(self, rank: int) -> list[str]:
        """Return the words that put a command into a rank's namespace."""
        return [*_DIE, "nsenter", f"--net=/proc/{self.holders[rank]}/ns/net"]

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that bind gloo to the shaped interface."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE}


@contextmanager
def shaped_links(rates: Sequence[float]) -> Iterator[Links]:
    """Build a network of `len(rates)` ranks at these bits per second (0: unlimited).

    Raises:
        ConfigError: not root, or a tool is missing.
        RunError: the kernel refuses.
    """
    _check_tools()
    holders: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(len(rates) + 1):
            holders.append(_holder())
        hub, *ranks = (process.pid for process in holders)
        _run(hub, "ip", "link", "add", "bridge", "type", "bridge")
        _run(hub, "ip", "link", "set", "bridge", "up")
        for rank, (pid, rate) in enumerate(zip(ranks, rates, strict=True)):
            _connect(hub, pid, rank, rate)
        yield Links(tuple(ranks))
    finally:
        for process in holders:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise ConfigError("the lab makes network namespaces, which needs root")
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise ConfigError(f"the lab needs {tool!r}: apt install {package}")


def _holder() -> subprocess.Popen[bytes]:
    """Start a process in a new network namespace; it lives until its standard input ends."""
    process = subprocess.Popen(
        [*_DIE, "unshare", "--net", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"\n":  # the namespace stands once the shell speaks
        _, error = process.communicate()
        raise RunError(f"no network namespace: {error.decode(errors='replace').strip()}")
    return process


def _run(pid: int, *command: str) -> None:
    inside = ["nsenter", f"--net=/proc/{pid}/ns/net", *command]
    done = subprocess.run(inside, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")


def _connect(hub: int, pid: int, rank: int, rate: float) -> None:
    port = f"port{rank}"
    peer = ("type", "veth", "peer", "name", INTERFACE, "netns", str(pid))
    _run(hub, "ip", "link", "add", port, *peer)
    _run(hub, "ip", "link", "set", port, "master", "bridge", "up")
    _run(pid, "ip", "link", "set", "lo", "up")
    _run(pid, "ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", INTERFACE)
    _run(pid, "ip", "link", "set", INTERFACE, "up")
    if rate:
        burst = burst_nbytes(rate)
        limit = burst + int(rate / 8 * _QUEUE_S)
        shape = ("root", "tbf", "rate", f"{int(rate)}bit", "burst", str(burst), "limit", str(limit))
        _run(pid, "tc", "qdisc", "add", "dev", INTERFACE, *shape)
        _run(hub, "tc", "qdisc", "add", "dev", port, *shape)
