"""Shared memory: transfers in pieces, ranks of a host, the shard store, and memory under saved views."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests._internals import (
    OwnedBuffer,
    RankInfo,
    Segment,
    ShmSocket,
    StagedRange,
    cast_and_move,
    connect,
    meet_peers,
    plan_rounds,
)

CAPACITY = 1 << 12
extents = st.lists(
    st.builds(StagedRange, st.integers(0, 5000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 15)), max_size=6
)


@given(extents)
def test_pieces_tile_every_tensor_in_order_with_rows_on_separate_cache_lines(tensors: Sequence[StagedRange]) -> None:
    rounds = plan_rounds(tuple(tensors), CAPACITY)
    assert all(rounds) or rounds == ((),), "at least one round, and no other is empty"
    pieces = [piece for pieces in rounds for piece in pieces]
    for index, tensor in enumerate(tensors):
        elements = [e for piece in pieces if piece.tensor == index for e in range(piece.start, piece.stop)]
        assert elements == list(range(tensor.numel))
    for staged in rounds:
        end = 0
        for piece in staged:
            tensor = tensors[piece.tensor]
            for row in range(tensor.rows):
                begin = piece.offset + row * piece.stride
                assert begin >= end
                assert begin % 64 == 0
                end = begin + (piece.stop - piece.start) * tensor.itemsize
        assert end <= CAPACITY


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
    return [RankInfo(tuple(each.getsockname() for each in sockets), False, "") for sockets in own]


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


def test_ranks_of_several_hosts_open_no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank would open one for each lower rank, of which there may be more than a process can open files."""
    opened = []
    monkeypatch.setattr(connect, "gather_objects", lambda own, group: [own, f"another {own}"])
    monkeypatch.setattr(connect, "_open", lambda own, rank, staging: opened.append(rank))
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    group: Any = None
    assert connect.connect(group) is None
    assert not opened


def test_memory_that_is_handed_over_cannot_shrink() -> None:
    segment = Segment(1 << 20)
    segment.memory.fill_(1)
    for nbytes in (0, 1 << 19, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, nbytes)
    assert os.fstat(segment.descriptor).st_blocks * 512 >= 1 << 20


@pytest.mark.parametrize("flags", [os.MFD_CLOEXEC, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING])
def test_memory_that_can_shrink_is_refused(flags: int) -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    mine, theirs = ShmSocket({1: ends[0]}), ShmSocket({0: ends[1]})
    segment = Segment(4096)
    theirs.broadcast(0, 0, b"", segment)
    assert mine.has(1)
    memory = mine.inbox[1].popleft().memory
    assert memory is not None
    assert memory.numel() == 4096
    segment.descriptor = os.memfd_create("unsealed", flags)
    os.ftruncate(segment.descriptor, 4096)
    theirs.broadcast(0, 0, b"", segment)
    with pytest.raises(PermissionError, match="memory that is not sealed against shrinking"):
        mine.has(1)
    os.close(segment.descriptor)
    mine.close()
    theirs.close()


CPU = torch.device("cpu")
META = torch.device("meta")


class Operators(TorchDispatchMode):
    """Records the names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "device", "kernels"),
    [(torch.float32, CPU, 0), (torch.bfloat16, CPU, 1), (torch.float32, META, 1), (torch.bfloat16, META, 2)],
)
def test_a_payload_takes_a_copy_to_another_device_and_then_a_cast(dtype: torch.dtype, device, kernels: int) -> None:
    shard = torch.tensor([0.1, -2.5, 3e38])
    before = shard.clone()
    with Operators() as ran:
        payload = cast_and_move(shard, dtype, device)
    assert ran.names == ["_to_copy"] * kernels
    assert (payload.device, payload.dtype) == (device, dtype)
    assert (payload is shard) == (kernels == 0)
    assert torch.equal(shard, before)
    assert device is META or torch.equal(payload, before.to(dtype))


def made() -> tuple[OwnedBuffer, torch.Tensor]:
    buffer = OwnedBuffer(1000, torch.float32, torch.device("cpu"))
    return buffer, buffer.parameter_data(100, (30, 30))


def test_existing_memory_is_not_allocated_again() -> None:
    # torch would move the data, which takes the time of a copy and twice the memory.
    buffer, view = made()
    buffer.region(100, 900).copy_(torch.arange(900.0))
    before = view.data_ptr()
    buffer.allocate()
    assert view.data_ptr() == before
    assert torch.equal(view.view(-1), torch.arange(900.0))


def test_views_survive_freeing_of_the_storage() -> None:
    buffer, view = made()
    buffer.free()
    buffer.free()
    assert buffer.nbytes == 0
    buffer.allocate()
    assert buffer.nbytes == 4000
    buffer.region(100, 900).fill_(3.0)
    assert torch.equal(view, torch.full((30, 30), 3.0))
