"""Messages between the ranks of one host: small, in order, from each to each, and never waited for when sent."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from composable_fsdp._comm.shm.segment import Segment, map_segment

__all__ = ["NO_BLOCK", "Message", "ShmSocket"]

NO_BLOCK = -1
_GIVES_UP = -1

_HEADER = struct.Struct("=qqqqqq")
_LONGEST = 4096
_DESCRIPTOR = struct.Struct("=i")


class Message(NamedTuple):
    """What a rank says about one round of one operation.

    Args:
        sequence: number of the operation.
        round: of it; the first message says what the operation is, those after it only how far the rank is.
        completed: operations that the rank has completed.
        nbytes: of the operation.
        shape: a hash of how these are divided.
        block: where the rank stages, or ``NO_BLOCK``.
        label: what the operation is called.
        memory: the block, where the receiver has not seen it before, or the memory that the operation is about.
    """

    sequence: int
    round: int
    completed: int
    nbytes: int = 0
    shape: int = 0
    block: int = NO_BLOCK
    label: str = ""
    memory: torch.Tensor | None = None

    def encoded(self) -> bytes:
        return _HEADER.pack(*self[:6]) + self.label.encode()[: _LONGEST - _HEADER.size]


class ShmSocket:
    """One socket to every peer.

    Args:
        sockets: by peer, connected ones of type ``SOCK_SEQPACKET`` that do not block. They are closed with the wire.

    Attributes:
        completed: by peer, the operations that it has completed, as far as heard.
        ended: by peer, why nothing more will come from there.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        self._inbox: dict[int, dict[tuple[int, int], Message]] = {peer: {} for peer in sockets}
        self._unsent: dict[int, deque[tuple[bytes, Segment | None]]] = {}
        self.completed = dict.fromkeys(sockets, 0)
        self.ended: dict[int, str] = {}
        self._finalizer = weakref.finalize(self, _close, tuple(sockets.values()))

    @property
    def peers(self) -> Iterable[int]:
        return self._inbox

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def broadcast(self, message: Message, segment: Segment | None = None) -> None:
        """Sends ``message`` to every peer, with ``segment`` for them to map. What a socket has no room for waits."""
        data = message.encoded()
        for peer in self._sockets:
            if peer in self._unsent or not self._send(peer, data, segment):
                self._unsent.setdefault(peer, deque()).append((data, segment))

    def flush(self) -> None:
        """Sends what waits, as far as there is room."""
        for peer, waiting in list(self._unsent.items()):
            while waiting and self._send(peer, *waiting[0]):
                waiting.popleft()
            if not waiting:
                del self._unsent[peer]

    def _send(self, peer: int, data: bytes, segment: Segment | None) -> bool:
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(segment.descriptor))]
            if segment is not None
            else []
        )
        try:
            self._sockets[peer].sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            return True  # it is gone, which whoever waits for it will see; it may have said all that was to be said
        return True

    def has(self, peer: int, sequence: int, round: int) -> bool:
        """Whether that message has come from ``peer``. Reads no further than to it."""
        while not self.has_read(peer, sequence, round):
            if not self._receive(peer):
                return False
        return True

    def has_read(self, peer: int, sequence: int, round: int) -> bool:
        return (sequence, round) in self._inbox[peer]

    def last_label(self, peer: int) -> str:
        """Of the last operation that ``peer`` has launched, among the messages that were read and not popped."""
        launches = [message for message in self._inbox[peer].values() if message.label]
        return max(launches, key=lambda message: message.sequence).label if launches else ""

    def pop(self, peer: int, sequence: int, round: int) -> Message:
        return self._inbox[peer].pop((sequence, round))

    def receive_all(self) -> None:
        """Reads what has come."""
        for peer in self._sockets:
            while self._receive(peer):
                pass

    def _receive(self, peer: int) -> bool:
        """Reads one message. False if there is none."""
        if peer in self.ended:
            return False
        try:
            data, ancillary, flags, _ = self._sockets[peer].recvmsg(_LONGEST, socket.CMSG_SPACE(_DESCRIPTOR.size))
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it closed with messages unread; what it sent before can be read still
            return True
        if not data:
            self.ended[peer] = ""
            return False
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, f"no file descriptor is free for the memory of peer {peer}; raise `ulimit -n`")
        label = data[_HEADER.size :].decode(errors="replace")
        numbers: tuple[int, int, int, int, int, int] = _HEADER.unpack_from(data)
        message = Message(*numbers, label, _received_memory(ancillary))
        if message.round == _GIVES_UP:
            self.ended[peer] = message.label
            return False
        self.completed[peer] = message.completed
        self._inbox[peer][message.sequence, message.round] = message
        return True

    def awaited(self, peers: Iterable[int]) -> Iterator[tuple[socket.socket, int]]:
        """The sockets to poll, and for what, until something comes from ``peers`` or can be sent."""
        events = dict.fromkeys(self._unsent, select.POLLOUT)
        for peer in peers:
            events[peer] = events.get(peer, 0) | select.POLLIN
        return ((self._sockets[peer], mask) for peer, mask in events.items())

    def give_up(self, reason: str) -> None:
        """Tells all peers why nothing more will come from here, and closes."""
        self._unsent.clear()
        self.broadcast(Message(0, _GIVES_UP, 0, label=reason))
        self.close()

    def close(self) -> None:
        self._unsent.clear()
        self._finalizer()


def _received_memory(ancillary: list[tuple[int, int, bytes]]) -> torch.Tensor | None:
    for _, _, data in ancillary:
        (descriptor,) = _DESCRIPTOR.unpack(data)
        try:
            return map_segment(descriptor)
        finally:
            os.close(descriptor)
    return None


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()
