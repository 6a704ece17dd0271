"""Small ordered messages between the ranks of one host. Sending never blocks."""

from __future__ import annotations

import errno
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch

from composable_fsdp.plugins.shared_memory.segment import Segment, check_sealed, map_segment

PROGRESS_ONLY = -1
_GIVE_UP = -2

_HEADER = struct.Struct("=qi")
_MAX_BYTES = 4096
_DESCRIPTOR = struct.Struct("=i")


class Message(NamedTuple):
    """The next step that a rank has staged.

    Args:
        slot: the index of its staging slot.
        about: the description of the operation.
        memory: the memory that the operation shares, if any.
    """

    slot: int
    about: bytes
    memory: torch.Tensor | None


class ShmSocket:
    """Sockets to every peer.

    There is always room for messages: a rank stages at most ``NUM_SLOTS`` steps before a peer has completed the first,
    and tells it of progress at most as often. 104 such pairs fit into Linux's default buffer of 212,992 bytes.

    Args:
        sockets: connected, non-blocking sockets of type ``SOCK_SEQPACKET``, by peer. They are closed with this object.

    Attributes:
        peers: the peers.
        inbox: by peer, the messages read, in order.
        completed: by peer, the number of steps that it has completed according to the messages read.
        ended: by peer, the reason why it sends no more messages, empty if unknown.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets, self.peers = dict(sockets), tuple(sockets)
        self.inbox: dict[int, deque[Message]] = {peer: deque() for peer in sockets}
        self.completed = dict.fromkeys(sockets, 0)
        self.ended: dict[int, str] = {}
        self.close = weakref.finalize(self, close, tuple(sockets.values()))

    def broadcast(self, completed: int, slot: int, about: bytes = b"", segment: Segment | None = None) -> None:
        """Tell every peer that this rank has ``completed`` steps, and staged the next one unless ``PROGRESS_ONLY``."""
        data = [_HEADER.pack(completed, slot), about]
        sent = [] if segment is None else [_DESCRIPTOR.pack(segment.descriptor)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, each) for each in sent]
        for each in self._sockets.values():
            # A peer that is gone shows when it is waited for; it may have sent all that we need.
            with suppress(BrokenPipeError, ConnectionResetError):
                each.sendmsg(data, rights, socket.MSG_NOSIGNAL)

    def has(self, peer: int) -> bool:
        """Return whether the next step of ``peer`` is in the inbox. Reads no further messages if it is."""
        while not self.inbox[peer]:
            if not self._receive(peer):
                return False
        return True

    def receive_all(self) -> None:
        """Read all messages that have arrived."""
        for peer in self.peers:
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
        completed, slot = _HEADER.unpack_from(data)
        if slot == _GIVE_UP:
            self.ended[peer] = data[_HEADER.size :].decode(errors="replace")
            return False
        self.completed[peer] = completed
        if slot != PROGRESS_ONLY:
            self.inbox[peer].append(Message(slot, data[_HEADER.size :], _received_memory(ancillary)))
        return True

    def descriptors(self, *, of_missing: bool) -> list[int]:
        """Return what to poll: the sockets of peers with an empty inbox if ``of_missing``, otherwise of all."""
        peers = (peer for peer in self.peers if peer not in self.ended)
        return [self._sockets[peer].fileno() for peer in peers if not (of_missing and self.inbox[peer])]

    def give_up(self, reason: str) -> None:
        """Send ``reason`` to all peers as our last message, and close."""
        if self.close.alive:
            with suppress(BlockingIOError):
                self.broadcast(0, _GIVE_UP, reason.encode()[: _MAX_BYTES - _HEADER.size])
            self.close()


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
