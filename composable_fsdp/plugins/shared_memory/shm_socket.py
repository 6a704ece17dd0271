"""Small ordered messages between the ranks of one host. Sending never blocks."""

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
from zlib import crc32

import torch

from composable_fsdp.plugins.shared_memory.segment import Segment, check_sealed, map_segment

NO_BLOCK = -1
_GIVE_UP_ROUND = -1

_HEADER = struct.Struct("=qqqqqq")
_MAX_BYTES = 4096
_LABEL_BYTES = _MAX_BYTES - _HEADER.size
_DESCRIPTOR = struct.Struct("=i")


class Message(NamedTuple):
    """The progress of a rank in one round of one operation.

    Args:
        sequence: number of the operation.
        round: number of the round. Only the message of the first round describes the operation.
        completed: number of operations that the rank has completed.
        nbytes: size of the operation in bytes.
        shape: hash of the tensors' sizes.
        block: index of the rank's staging block, or ``NO_BLOCK``.
        label: label of the operation.
        memory: the block, if it is new to the receiver, or the memory that the operation shares.
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
        return _HEADER.pack(*self[:6]) + self.label.encode()[:_LABEL_BYTES]


def label_in_message(label: str) -> str:
    """Return ``label``, or its beginning and a checksum if it is too long for a message.

    A label names the modules of a group, of which there may be hundreds.
    """
    data = label.encode()
    if len(data) <= _LABEL_BYTES:
        return label
    return f"{data[: _LABEL_BYTES - 16].decode(errors='ignore')}... {crc32(data):08x}"


class ShmSocket:
    """Sockets to every peer.

    Args:
        sockets: connected, non-blocking sockets of type ``SOCK_SEQPACKET``, by peer. They are closed with this object.

    Attributes:
        peers: the peers.
        unsent: by peer, the messages for which its socket has had no room.
        completed: by peer, the number of operations that it has completed according to the messages read.
        ended: by peer, the reason why it sends no more messages, empty if unknown.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets, self.peers = dict(sockets), tuple(sockets)
        self._inbox: dict[int, dict[tuple[int, int], Message]] = {peer: {} for peer in sockets}
        self.unsent: dict[int, deque[tuple[bytes, Segment | None]]] = {}
        self.completed = dict.fromkeys(sockets, 0)
        self.ended: dict[int, str] = {}
        self._finalizer = weakref.finalize(self, close, tuple(sockets.values()))

    def broadcast(self, message: Message, segment: Segment | None = None) -> None:
        """Send ``message`` to every peer, with ``segment`` for them to map. Queues what a socket has no room for."""
        data = message.encoded()
        for peer in self._sockets:
            if peer in self.unsent or not self._send(peer, data, segment):
                self.unsent.setdefault(peer, deque()).append((data, segment))

    def flush(self) -> None:
        """Send queued messages as far as there is room."""
        for peer, waiting in list(self.unsent.items()):
            while waiting and self._send(peer, *waiting[0]):
                waiting.popleft()
            if not waiting:
                del self.unsent[peer]

    def _send(self, peer: int, data: bytes, segment: Segment | None) -> bool:
        sent = [] if segment is None else [_DESCRIPTOR.pack(segment.descriptor)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, each) for each in sent]
        try:
            self._sockets[peer].sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            return True  # the peer is gone, which waiting for it will show; it may have sent all that we need
        return True

    def has(self, peer: int, sequence: int, round: int) -> bool:
        """Return whether that message has arrived from ``peer``. Reads messages up to that one only."""
        while not self.has_read(peer, sequence, round):
            if not self._receive(peer):
                return False
        return True

    def has_read(self, peer: int, sequence: int, round: int) -> bool:
        return (sequence, round) in self._inbox[peer]

    def last_label(self, peer: int) -> str:
        """Return the label of the last operation that ``peer`` has launched, among messages read and not popped."""
        launches = [message for message in self._inbox[peer].values() if message.label]
        return max(launches, key=lambda message: message.sequence).label if launches else ""

    def pop(self, peer: int, sequence: int, round: int) -> Message:
        return self._inbox[peer].pop((sequence, round))

    def receive_all(self) -> None:
        """Read all messages that have arrived."""
        for peer in self._sockets:
            while self._receive(peer):
                pass

    def _receive(self, peer: int) -> bool:
        """Read one message. Return ``False`` if there is none."""
        if peer in self.ended:
            return False
        try:
            data, ancillary, flags, _ = self._sockets[peer].recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_DESCRIPTOR.size))
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it closed with unread messages; those it sent before can still be read
            return True
        if not data:
            self.ended[peer] = ""
            return False
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, f"no file descriptor is free for the memory of peer {peer}; raise `ulimit -n`")
        label = data[_HEADER.size :].decode(errors="replace")
        numbers: tuple[int, int, int, int, int, int] = _HEADER.unpack_from(data)
        message = Message(*numbers, label, _received_memory(ancillary))
        if message.round == _GIVE_UP_ROUND:
            self.ended[peer] = message.label
            return False
        self.completed[peer] = message.completed
        self._inbox[peer][message.sequence, message.round] = message
        return True

    def poll_events(self, peers: Iterable[int]) -> Iterator[tuple[socket.socket, int]]:
        """Yield the sockets and events to poll for, until ``peers`` have sent something or a queued message fits."""
        events = dict.fromkeys(self.unsent, select.POLLOUT)
        for peer in peers:
            events[peer] = events.get(peer, 0) | select.POLLIN
        return ((self._sockets[peer], mask) for peer, mask in events.items())

    def give_up(self, reason: str) -> None:
        """Send ``reason`` to all peers as our last message, and close."""
        self.unsent.clear()
        self.broadcast(Message(0, _GIVE_UP_ROUND, 0, label=reason))
        self.close()

    def close(self) -> None:
        self.unsent.clear()
        self._finalizer()


def _received_memory(ancillary: list[tuple[int, int, bytes]]) -> torch.Tensor | None:
    for _, _, data in ancillary:
        (descriptor,) = _DESCRIPTOR.unpack(data)
        try:
            check_sealed(descriptor)
            return map_segment(descriptor)
        finally:
            os.close(descriptor)
    return None


def close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()
