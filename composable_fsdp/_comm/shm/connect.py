"""How ranks find out that they are on one host, and connect there.

Addresses are abstract: they are no files, and go with the socket. They are seen within one network namespace, so ranks
in different ones count as on different hosts.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from composable_fsdp._comm.shm.engine import ShmEngine
from composable_fsdp._comm.shm.peer_errors import Peers
from composable_fsdp._comm.shm.segment import Segment
from composable_fsdp._comm.shm.shm_socket import ShmSocket
from composable_fsdp._consistency.watchdog import job_watchdog
from composable_fsdp.errors import PeerError

__all__ = ["SWITCH", "connect", "host_identity", "reconnect"]

SWITCH = "COMPOSABLE_FSDP_SHARED_MEMORY"
"""Environment variable: ``0``, on any rank, keeps all ranks from using shared memory; ``copy`` from keeping shards,
or full parameters, in memory that they have in common.
"""

_HELLO = struct.Struct("=16si")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank says of itself: where it is, and where it listens. ``host`` is empty where it does not take part."""

    host: str
    address: bytes
    secret: bytes
    process: int
    copies: bool


def host_identity() -> str:
    """The same text for processes of one host and one network namespace, and only for those; empty if not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    return f"{socket.gethostname()} {boot} {namespace.st_dev}:{namespace.st_ino}"


def connect(group: dist.ProcessGroup) -> ShmEngine | None:
    """An engine for the ranks of ``group``, or None where not all of them are on this host and want it.

    All ranks must call it together, and get the same: where it fails on one, all get None and the first one warns.
    """
    connected = _connect(group)
    if connected is None:
        return None
    wire, offers = connected
    peers = Peers(dist.get_process_group_ranks(group), [each.process for each in offers])
    timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    aliases = not any(each.copies for each in offers)
    rank, name = dist.get_rank(group), group.group_name
    return ShmEngine(rank, wire, timeout, peers, aliases=aliases, watchdog=job_watchdog(), name=name)


def reconnect(group: dist.ProcessGroup, engine: ShmEngine) -> None:
    """Begins anew with the ranks of ``group``, to which ``engine`` has lost its connection. All must call it together.

    Raises:
        PeerError: it cannot be had any more on some rank.
    """
    connected = _connect(group)
    if connected is None:
        raise PeerError(
            f"ranks {dist.get_process_group_ranks(group)} shared memory before, and cannot connect to each other again."
        )
    engine.reopen(connected[0])


def _connect(group: dist.ProcessGroup) -> tuple[ShmSocket, list[_Offer]] | None:
    with ExitStack() as stack:
        listener = _listener(stack)
        host = host_identity() if listener is not None else ""
        address = listener.getsockname() if listener is not None else b""
        copies = os.environ.get(SWITCH) == "copy"
        offer = _Offer(host, address, secrets.token_bytes(16), os.getpid(), copies)
        offers = _everyones(group, offer)
        if listener is None or not host or any(each.host != host for each in offers):
            return None
        rank, sockets = dist.get_rank(group), dict[int, socket.socket]()
        problems = _everyones(group, _problem(lambda: _dial(offers, rank, sockets)))
        if not any(problems):
            problems = _everyones(group, _problem(lambda: _answer(listener, offer.secret, rank, len(offers), sockets)))
    if any(problems):
        for each in sockets.values():
            each.close()
        if rank == 0:
            _warn(problems)
        return None
    return ShmSocket(dict(sorted(sockets.items()))), offers


def _listener(stack: ExitStack) -> socket.socket | None:
    """Where the kernel found a free address; None where shared memory is not wanted, or not to be had."""
    if os.environ.get(SWITCH, "1") == "0" or not sys.platform.startswith("linux"):
        return None
    with suppress(OSError):
        listener = stack.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
        listener.bind("")
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
        return listener
    return None


def _dial(offers: list[_Offer], rank: int, sockets: dict[int, socket.socket]) -> None:
    """Connects to all lower ranks. That takes no answer from there: connections wait in the listener's backlog."""
    Segment(1)  # whether there is memory to share here at all
    for peer in range(rank):
        sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sockets[peer].setblocking(False)
        sockets[peer].connect(offers[peer].address)
        sockets[peer].send(_HELLO.pack(offers[peer].secret, rank))


def _answer(listener: socket.socket, secret: bytes, rank: int, size: int, sockets: dict[int, socket.socket]) -> None:
    """Takes in all higher ranks, which have connected, and turns away who does not know the secret."""
    while len(sockets) < size - 1:
        connection, _ = listener.accept()
        connection.setblocking(False)
        known, peer = _HELLO.unpack(connection.recv(_HELLO.size).ljust(_HELLO.size, b"\0"))
        if secrets.compare_digest(known, secret) and rank < peer < size:
            sockets[peer] = connection
        else:
            connection.close()


def _problem(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _everyones(group: dist.ProcessGroup, own: T) -> list[T]:
    everyones = [own] * dist.get_world_size(group)
    with torch.device("cpu"):  # not where the caller has tensors made by default
        dist.all_gather_object(everyones, own, group=group)
    return everyones


def _warn(problems: list[str]) -> None:
    rank = next(rank for rank, problem in enumerate(problems) if problem)
    warnings.warn(
        f"ranks on one host cannot share memory, so everything goes over gloo, which is slower: rank {rank} of "
        f"{len(problems)} met {problems[rank]}. Set {SWITCH}=0 to have it so without this warning.",
        stacklevel=2,
    )
