"""Other users of the host connect to a rank's socket, and a peer sends memory that it can shrink."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from tests._internals import Message, RankInfo, Segment, ShmSocket, connect, meet_peers

Sockets = list[list[socket.socket]]


@pytest.fixture
def own() -> Iterator[Sockets]:
    """Return the sockets of three ranks, which listen with short queues."""
    found: Sockets = [[socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(r + 1)] for r in range(3)]
    for sockets in found:
        for each in sockets:
            each.setblocking(False)
            each.bind("")
        sockets[-1].listen(4)
    yield found
    for sockets in found:
        for each in sockets:
            each.close()


def infos_of(own: Sockets) -> list[RankInfo]:
    return [RankInfo("host", tuple(each.getsockname() for each in sockets), 1, False, "") for sockets in own]


def stranger(address: bytes, says: bytes = b"") -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    connection.bind("")
    with suppress(BlockingIOError, ConnectionError):  # the queue is full, or it was dropped already
        connection.connect(address)
        if says:
            connection.send(says)
    return connection


@pytest.mark.parametrize("says", [b"", b"x" * 2000])
def test_strangers_do_not_keep_ranks_from_each_other(own: Sockets, says: bytes) -> None:
    """Eight strangers fill a queue of four before the ranks come, and 200 more come meanwhile."""
    infos = infos_of(own)
    listening = [info.addresses[-1] for info in infos]
    strangers = [stranger(address, says) for address in listening for _ in range(8)]
    sockets: list[dict[int, socket.socket]] = [{}, {}, {}]
    begin = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(meet_peers, own[r], infos, sockets[r]) for r in (2, 1, 0)]
        while not all(each.done() for each in done) and len(strangers) < 200:
            strangers.append(stranger(listening[0], says))
            time.sleep(0.001)
        for each in done:
            each.result()
    assert time.monotonic() - begin < 20
    assert [sorted(each) for each in sockets] == [[1, 2], [0, 2], [0, 1]]
    for rank, peers in enumerate(sockets):
        for peer, connection in peers.items():
            connection.send(b"%d" % rank)
            sockets[peer][rank].setblocking(True)
            assert sockets[peer][rank].recv(9) == b"%d" % rank
    for connection in (*strangers, *(connection for peers in sockets for connection in peers.values())):
        connection.close()


def test_a_connection_of_another_address_is_closed(own: Sockets) -> None:
    """A rank takes no connection but from the address that its peer has bound for it, and nobody else can bind that."""
    infos, sockets = infos_of(own), dict[int, socket.socket]()
    others = [stranger(infos[0].addresses[0]) for _ in range(2)]
    for peer in (1, 2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other, pytest.raises(OSError, match="in use"):
            other.bind(infos[peer].addresses[0])
        own[peer][0].connect(infos[0].addresses[0])
    own[2][1].connect(infos[1].addresses[1])  # to rank 1, which does not accept
    meet_peers(own[0], infos, sockets)
    for each in others:
        each.setblocking(True)
        assert each.recv(1) == b"", "it is closed"
    assert {peer: each.getpeername() for peer, each in sockets.items()} == {r: infos[r].addresses[0] for r in (1, 2)}
    for connection in (*others, *sockets.values()):
        connection.close()


def test_a_peer_that_does_not_come_is_named(own: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_MOST_SECONDS", 0.2)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of the group did not connect"):
        meet_peers(own[0], infos_of(own)[:2], {})


def test_memory_that_is_handed_over_cannot_shrink() -> None:
    segment = Segment(1 << 20)
    segment.memory.fill_(1)
    for nbytes in (0, 1 << 19, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, nbytes)
    assert os.fstat(segment.descriptor).st_blocks * 512 >= 1 << 20
    segment.discard()
    assert os.fstat(segment.descriptor).st_blocks == 0
    assert not segment.memory.any()
    segment.memory.fill_(2)
    assert torch.all(segment.memory == 2)


@pytest.mark.parametrize("flags", [os.MFD_CLOEXEC, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING])
def test_memory_that_can_shrink_is_refused(flags: int) -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    mine, theirs = ShmSocket({1: ends[0]}), ShmSocket({0: ends[1]})
    segment = Segment(4096)
    theirs.broadcast(Message(0, 0, 0), segment)
    assert mine.has(1, 0, 0)
    memory = mine.pop(1, 0, 0).memory
    assert memory is not None
    assert memory.numel() == 4096
    segment.descriptor = os.memfd_create("unsealed", flags)
    os.ftruncate(segment.descriptor, 4096)
    theirs.broadcast(Message(1, 0, 0), segment)
    with pytest.raises(PermissionError, match="memory that is not sealed against shrinking"):
        mine.has(1, 1, 0)
    os.close(segment.descriptor)
    mine.close()
    theirs.close()
