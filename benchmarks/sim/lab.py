"""Network namespaces, one for each rank, joined by a switch in user space with a limited rate and a delay.

Real processes communicate over real sockets and a slow network on one Linux machine. Many kernels lack netem of ``tc``,
but all have TUN devices. Needs root, ``ip`` and ``/dev/net/tun``.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

__all__ = ["Lab", "Link", "lacking", "open_lab"]

TUN = "/dev/net/tun"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
BURST = 64
"""The number of packets taken from one rank before the next."""
QUEUE_SECONDS = 0.25
"""The delay from which a packet is dropped, as by a switch with a full buffer."""


def lacking() -> str | None:
    """Return what is missing to open a lab, or None."""
    missing = [
        name
        for name, is_there in {
            "root": os.geteuid() == 0,
            "ip (iproute2)": shutil.which("ip") is not None,
            TUN: os.access(TUN, os.R_OK | os.W_OK),
        }.items()
        if not is_there
    ]
    return ", ".join(missing) or None


@dataclass(frozen=True)
class Link:
    """The connection of every rank: megabits per second in each direction, milliseconds from rank to rank."""

    mbit: float
    delay_ms: float = 0.0


@dataclass
class Lab:
    """The open namespaces and the switch between them.

    Attributes:
        namespaces: the namespaces by rank. Rank ``r`` has the address ``address(r)`` on the device ``devices[r]``.
        ports: the file descriptors of the devices, which the switch reads and writes.
    """

    link: Link
    namespaces: list[str]
    devices: list[str]
    ports: list[int]
    _waiting: list[tuple[float, int, bytes]] = field(default_factory=list)

    @staticmethod
    def address(rank: int) -> str:
        return f"10.88.0.{rank + 1}"

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """Return ``command`` as it is run on ``rank``."""
        return ["ip", "netns", "exec", self.namespaces[rank], *command]

    def forward_while(self, is_needed: Callable[[], bool]) -> None:
        """Forward packets as long as ``is_needed``."""
        leaving, arriving = [0.0] * len(self.ports), [0.0] * len(self.ports)
        while is_needed():
            now = time.monotonic()
            due = min(self._waiting[0][0] - now, 0.1) if self._waiting else 0.1
            ready, _, _ = select.select(self.ports, [], [], max(due, 0.0))
            for port in ready:
                for packet in read(port):
                    self._enqueue(self.ports.index(port), packet, leaving, arriving)
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, target, packet = heapq.heappop(self._waiting)
                os.write(self.ports[target], packet)

    def _enqueue(self, source: int, packet: bytes, leaving: list[float], arriving: list[float]) -> None:
        """Delay the packet by its sender's link, then by its receiver's link."""
        is_ipv4, target = packet[0] >> 4 == 4, packet[19] - 1
        now = time.monotonic()
        if not is_ipv4 or not 0 <= target < len(self.ports):
            return
        if max(leaving[source], arriving[target]) > now + QUEUE_SECONDS:
            return
        duration = len(packet) * 8e-6 / self.link.mbit
        leaving[source] = max(leaving[source], now) + duration
        arriving[target] = max(leaving[source], arriving[target] + duration)
        heapq.heappush(self._waiting, (arriving[target] + self.link.delay_ms / 1e3, target, packet))


def read(port: int) -> Iterator[bytes]:
    """Read the packets that wait at a port, at most ``BURST``."""
    with suppress(BlockingIOError):
        for _ in range(BURST):
            yield os.read(port, MTU + 100)


@contextmanager
def open_lab(ranks: int, link: Link) -> Iterator[Lab]:
    """Create namespaces, and delete them at the end in any case."""
    prefix = f"cf{os.getpid()}"
    names = [f"{prefix}n{rank}" for rank in range(ranks)]
    lab = Lab(link, names, [f"{prefix}t{rank}" for rank in range(ranks)], [])
    with ExitStack() as stack:
        for rank, (namespace, device) in enumerate(zip(names, lab.devices, strict=True)):
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "del", namespace)
            port = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, port)
            fcntl.ioctl(port, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
            ip("link", "set", device, "netns", namespace)
            ip("-n", namespace, "addr", "add", f"{lab.address(rank)}/24", "dev", device)
            ip("-n", namespace, "link", "set", device, "mtu", str(MTU), "txqueuelen", "5000", "up")
            ip("-n", namespace, "link", "set", "lo", "up")
            lab.ports.append(port)
        yield lab


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
