"""Detect that the ranks of a group are on one host, and connect them.

Socket addresses are abstract: they are not files, and disappear with the socket. They are visible within one network
namespace, so ranks in different namespaces count as on different hosts.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from composable_fsdp._consistency.process_groups import gather_objects
from composable_fsdp._consistency.watchdog import job_watchdog
from composable_fsdp.errors import ConfigurationError, PeerError, printable
from composable_fsdp.plugins.shared_memory.engine import ShmEngine
from composable_fsdp.plugins.shared_memory.peer_errors import Peers
from composable_fsdp.plugins.shared_memory.segment import Segment
from composable_fsdp.plugins.shared_memory.shm_socket import ShmSocket

SWITCH = "COMPOSABLE_FSDP_SHARED_MEMORY"
"""An environment variable: ``0`` on any rank disables shared memory on all ranks; ``copy`` disables shards and
unsharded parameters in shared memory.
"""

MODES = ("0", "1", "copy")
"""The words that it may have. ``1`` is the default."""

_HELLO = struct.Struct("=16si")
_MOST_SECONDS = 30.0
_MOST_SILENT_SECONDS, _MOST_SILENT = 1.0, 64
"""For how long, and how many, connections may be open that have said nothing. Any user of the host can open one."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """How to reach a rank. ``host`` is empty if it does not use shared memory."""

    host: str
    address: bytes
    secret: bytes
    process: int
    copies: bool


def host_identity() -> str:
    """Return a text that identifies this host and network namespace, or an empty one if they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    return f"{socket.gethostname()} {boot} {namespace.st_dev}:{namespace.st_ino}"


def connect(group: dist.ProcessGroup) -> ShmEngine | None:
    """Return an engine for ``group``, or ``None`` if its ranks are not all on this host or one disables shared memory.

    All ranks must call it together and get the same result: if one fails, all get ``None`` and rank 0 warns.
    """
    connected = _connect(group)
    if connected is None:
        return None
    shm_socket, infos = connected
    peers = Peers(dist.get_process_group_ranks(group), [each.process for each in infos])
    timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    aliases = not any(each.copies for each in infos)
    rank, name = dist.get_rank(group), group.group_name
    return ShmEngine(rank, shm_socket, timeout, peers, aliases=aliases, watchdog=job_watchdog(), name=name)


def reconnect(group: dist.ProcessGroup, engine: ShmEngine) -> None:
    """Reconnect ``engine`` to the ranks of ``group`` after its connection broke. All ranks must call it together.

    Raises:
        PeerError: some rank cannot connect.
    """
    connected = _connect(group)
    if connected is None:
        raise PeerError(
            f"ranks {dist.get_process_group_ranks(group)} shared memory before, and cannot connect to each other again."
        )
    engine.reopen(connected[0])


def _connect(group: dist.ProcessGroup) -> tuple[ShmSocket, list[RankInfo]] | None:
    mode = os.environ.get(SWITCH) or "1"
    if mode not in MODES:
        raise ConfigurationError(
            f"the environment variable {SWITCH} is one of {', '.join(map(repr, MODES))}, not {mode!r}: '0' uses "
            "sockets between ranks of one host, 'copy' shares memory for messages only."
        )
    with ExitStack() as stack:
        listener = _listener(stack) if mode != "0" else None
        host = host_identity() if listener is not None else ""
        address = listener.getsockname() if listener is not None else b""
        copies = mode == "copy"
        info = RankInfo(host, address, secrets.token_bytes(16), os.getpid(), copies)
        infos = gather_objects(info, group)
        if listener is None or not host or any(each.host != host for each in infos):
            return None
        rank, sockets = dist.get_rank(group), dict[int, socket.socket]()
        errors = gather_objects(_error_text(lambda: Segment(1)), group)  # raises if shared memory is unavailable
        if not any(errors):
            errors = gather_objects(_error_text(lambda: meet_peers(listener, infos, rank, sockets)), group)
    if any(errors):
        for each in sockets.values():
            each.close()
        if rank == 0:
            _warn(errors)
        return None
    return ShmSocket(dict(sorted(sockets.items()))), infos


def _listener(stack: ExitStack) -> socket.socket | None:
    """Return a listening socket, or ``None`` if shared memory is unavailable."""
    if not sys.platform.startswith("linux"):
        return None
    with suppress(OSError):
        listener = stack.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
        listener.bind("")
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
        return listener
    return None


def meet_peers(listener: socket.socket, infos: list[RankInfo], rank: int, sockets: dict[int, socket.socket]) -> None:
    """Connect to all lower ranks, and accept the connections of all higher ones into ``sockets``.

    Others are dropped: those that do not know the secret, and those that say nothing. Peers are served meanwhile, and
    try again while a listener's queue is full. A peer speaks as soon as it has connected.

    Raises:
        OSError: no socket can be opened, or a peer has not come within ``_MOST_SECONDS``.
    """
    lower, silent = list(range(rank)), dict[socket.socket, float]()
    end = time.monotonic() + _MOST_SECONDS
    with ExitStack() as stack:
        stack.callback(lambda: deque(map(socket.socket.close, silent), 0))
        while len(sockets) < len(infos) - 1:
            if time.monotonic() > end:
                missing = [peer for peer in range(len(infos)) if peer != rank and peer not in sockets]
                raise OSError(errno.ETIMEDOUT, f"ranks {missing} of the group did not connect")
            lower = [peer for peer in lower if not _reach(infos[peer], peer, rank, sockets)]
            with suppress(BlockingIOError):
                for _ in range(_MOST_SILENT):
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    silent[connection] = time.monotonic() + _MOST_SILENT_SECONDS
            for newer, (connection, limit) in zip(range(len(silent) - 1, -1, -1), list(silent.items()), strict=True):
                hello = _received(connection)
                if hello is None and newer < _MOST_SILENT and time.monotonic() < limit:
                    continue
                del silent[connection]
                known, peer = _HELLO.unpack((hello or b"").ljust(_HELLO.size, b"\0"))
                is_peer = secrets.compare_digest(known, infos[rank].secret) and rank < peer < len(infos)
                if is_peer and peer not in sockets:
                    sockets[peer] = connection
                else:
                    connection.close()
            if len(sockets) < len(infos) - 1:
                poll = select.poll()
                for each in (listener, *silent):
                    poll.register(each, select.POLLIN)
                poll.poll(10 if lower else 100)


def _reach(info: RankInfo, peer: int, rank: int, sockets: dict[int, socket.socket]) -> bool:
    """Connect to ``peer``. Return ``False`` if its queue is full."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    try:
        connection.connect(info.address)
        connection.send(_HELLO.pack(info.secret, rank))
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        connection.close()
        return False
    except OSError:
        connection.close()
        raise
    sockets[peer] = connection
    return True


def _received(connection: socket.socket) -> bytes | None:
    """Return the first message of ``connection``, empty if it has ended, or ``None`` if it has said nothing so far."""
    try:
        return connection.recv(_HELLO.size)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def _error_text(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _warn(errors: list[str]) -> None:
    rank = next(rank for rank, error in enumerate(errors) if error)
    warnings.warn(
        f"ranks on one host cannot share memory, so everything goes over gloo, which is slower: rank {rank} of "
        f"{len(errors)} met {printable(errors[rank])}. Set {SWITCH}=0 to have it so without this warning.",
        stacklevel=2,
    )
