"""Other users of the host connect to a rank's socket, and a peer sends memory that it can shrink."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import torch

from tests._internals import Message, RankInfo, Segment, ShmSocket, connect, meet_peers

Listener = tuple[socket.socket, RankInfo]


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    """Return sockets of three ranks with short queues."""
    found = []
    for rank in range(3):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("")
        listener.listen(4)
        listener.setblocking(False)
        found.append((listener, RankInfo("host", listener.getsockname(), bytes([rank]) * 16, 1, False)))
    yield found
    for listener, _ in found:
        listener.close()


def stranger(address: bytes, says: bytes = b"") -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    with suppress(BlockingIOError, ConnectionError):  # the queue is full, or it was dropped already
        connection.connect(address)
        if says:
            connection.send(says)
    return connection


@pytest.mark.parametrize("says", [b"", b"\0", b"\xff" * 20, b"x" * 2000, b"x" * 16 + b"\2\0\0\0"])
def test_strangers_do_not_keep_ranks_from_each_other(listeners: list[Listener], says: bytes) -> None:
    """Eight strangers fill a queue of four before the ranks come, and 200 more come meanwhile."""
    infos = [info for _, info in listeners]
    strangers = [stranger(info.address, says) for info in infos for _ in range(8)]
    sockets: list[dict[int, socket.socket]] = [{}, {}, {}]
    begin = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(meet_peers, listeners[r][0], infos, r, sockets[r]) for r in (2, 1, 0)]
        while not all(each.done() for each in done) and len(strangers) < 200:
            strangers.append(stranger(infos[0].address, says))
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


def test_a_peer_that_connects_again_keeps_its_first_connection(listeners: list[Listener]) -> None:
    infos = [info for _, info in listeners]
    first, again, other = (stranger(infos[0].address, infos[0].secret + bytes([peer, 0, 0, 0])) for peer in (1, 1, 2))
    sockets: dict[int, socket.socket] = {}
    meet_peers(listeners[0][0], infos, 0, sockets)
    first.send(b"first")
    assert sockets[1].recv(9) == b"first"
    with suppress(ConnectionResetError):
        assert again.recv(9) == b""
    for connection in (first, again, other, *sockets.values()):
        connection.close()


def test_a_peer_that_does_not_come_is_named(listeners: list[Listener], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_MOST_SECONDS", 0.2)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of the group did not connect"):
        meet_peers(listeners[0][0], [info for _, info in listeners[:2]], 0, {})


@pytest.mark.parametrize(("seconds", "most"), [(0.1, 64), (100.0, 5)])
def test_silent_connections_are_dropped_while_a_rank_waits(
    listeners: list[Listener], monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    """All of them after a second, and before that the oldest if there are too many: each takes a descriptor."""
    monkeypatch.setattr(connect, "_MOST_SILENT_SECONDS", seconds)
    monkeypatch.setattr(connect, "_MOST_SILENT", most)
    infos = [info for _, info in listeners[:2]]
    sockets: list[dict[int, socket.socket]] = [{}, {}]
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        waiting = pool.submit(meet_peers, listeners[0][0], infos, 0, sockets[0])
        for connection in silent:
            stack.callback(connection.close)
            connection.connect(infos[0].address)  # waits while the queue is full
            connection.settimeout(10)
        for connection in silent if seconds < 1 else silent[:-most]:
            assert connection.recv(1) == b"", "it is closed"
        assert not waiting.done()
        pool.submit(meet_peers, listeners[1][0], infos, 1, sockets[1]).result()
        waiting.result()
    for connection in (*sockets[0].values(), *sockets[1].values()):
        connection.close()


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
