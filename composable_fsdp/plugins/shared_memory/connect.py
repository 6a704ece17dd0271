"""Detect that the ranks of a group are on one host, and connect them.

Socket addresses are abstract: they are not files, and disappear with the socket. They are visible within one network
namespace, so ranks in different namespaces count as on different hosts.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from composable_fsdp._consistency.process_groups import gather_objects
from composable_fsdp.errors import ConfigurationError, printable
from composable_fsdp.plugins.shared_memory.segment import NUM_SLOTS, SLOT_BYTES, Segment
from composable_fsdp.plugins.shared_memory.shm_socket import ShmSocket, close

SWITCH = "COMPOSABLE_FSDP_SHARED_MEMORY"
"""An environment variable: ``0`` on any rank disables shared memory on all ranks; ``copy`` disables shards and
unsharded parameters in shared memory.
"""

MODES = ("0", "1", "copy")
"""The words that it may have. ``1`` is the default."""

_MOST_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The address of a rank of this host.

    Args:
        addresses: those of its sockets: one for each lower rank, to which it connects, and the one that listens.
        copies: it shares memory for messages only.
        error: why it has no sockets or no shared memory.
    """

    addresses: tuple[bytes, ...]
    copies: bool
    error: str


def host_identity() -> str:
    """Return a text that identifies this host and network namespace, or an empty one if they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    return f"{socket.gethostname()} {boot} {namespace.st_dev}:{namespace.st_ino}"


class Connection(NamedTuple):
    """The sockets to the other ranks of a group, this rank's staging slots, and whether shards may be shared too."""

    shm_socket: ShmSocket
    staging: Segment
    aliases: bool


def connect(group: dist.ProcessGroup) -> Connection | None:
    """Connect the ranks of ``group``, or return ``None`` if they are not all on this host or one disables it.

    All ranks must call it together and get the same result: if one fails, all get ``None`` and rank 0 warns.
    """
    mode = os.environ.get(SWITCH) or "1"
    if mode not in MODES:
        raise ConfigurationError(
            f"the environment variable {SWITCH} is one of {', '.join(map(repr, MODES))}, not {mode!r}: '0' uses "
            "sockets between ranks of one host, 'copy' shares memory for messages only."
        )
    hosts = gather_objects(host_identity() if mode != "0" else "", group)
    if not all(hosts) or len(set(hosts)) > 1:
        return None
    rank, own, sockets = dist.get_rank(group), list[socket.socket](), dict[int, socket.socket]()
    staging = list[Segment]()
    with ExitStack() as stack:
        stack.callback(lambda: close((*own, *sockets.values())))
        error = _error_text(lambda: _open(own, rank, staging))
        addresses = tuple(each.getsockname() for each in own)
        infos = gather_objects(RankInfo(addresses, mode == "copy", error), group)
        errors = [each.error for each in infos]
        if not any(errors):
            errors = gather_objects(_error_text(lambda: meet_peers(own, infos, sockets)), group)
        if any(errors):
            if rank == 0:
                _warn(errors)
            return None
        own[rank].close()
        stack.pop_all()
    aliases = not any(each.copies for each in infos)
    return Connection(ShmSocket(dict(sorted(sockets.items()))), staging[0], aliases)


def _open(own: list[socket.socket], rank: int, staging: list[Segment]) -> None:
    """Append a socket for each lower rank to ``own``, and one that listens; and this rank's slots to ``staging``.

    Raises:
        OSError: shared memory is unavailable.
    """
    for _ in range(rank + 1):
        own.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        own[-1].setblocking(False)
        own[-1].bind("")
    own[rank].listen(socket.SOMAXCONN)
    staging.append(Segment(NUM_SLOTS * SLOT_BYTES))


def meet_peers(own: Sequence[socket.socket], infos: Sequence[RankInfo], sockets: dict[int, socket.socket]) -> None:
    """Connect to all lower ranks, and accept the connections of all higher ones, into ``sockets`` by rank.

    A connection is from a peer if its address is one that the peer has bound for this rank. All others are closed: any
    user of the host can make them.

    Raises:
        OSError: a socket cannot connect, or a peer has not come within ``_MOST_SECONDS``.
    """
    rank, end = len(own) - 1, time.monotonic() + _MOST_SECONDS
    expected = {infos[peer].addresses[rank]: peer for peer in range(rank + 1, len(infos))}
    poll = select.poll()
    poll.register(own[rank], select.POLLIN)
    while missing := [peer for peer in range(len(infos)) if peer != rank and peer not in sockets]:
        if time.monotonic() > end:
            raise OSError(errno.ETIMEDOUT, f"ranks {missing} of the group did not connect")
        for peer in missing:
            with suppress(BlockingIOError):  # the queue of its socket is full
                if peer < rank:
                    own[peer].connect(infos[peer].addresses[peer])
                    sockets[peer] = own[peer]
        if len(sockets) < len(infos) - 1 and poll.poll(10):
            connection, address = own[rank].accept()
            if address in expected:
                connection.setblocking(False)
                sockets[expected[address]] = connection
            else:
                connection.close()


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
