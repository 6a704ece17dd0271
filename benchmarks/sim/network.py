"""A process group of one real and any number of imagined ranks, whose collectives take their time on a virtual wire.

A collective of ``n`` bytes in full takes ``latency + n * (ranks - 1) / ranks / bandwidth``, an all-reduce twice the
second part: what a ring needs. Nothing is sent, so results have the right shapes only. Registered as backend
``simulated`` of ``torch.distributed``, so that whatever uses process groups runs on it unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from sim.device import Device
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["Network", "simulated_ranks"]


@dataclass
class Network:
    """What the wires between the ranks are like. Speeds may change between steps.

    Attributes:
        bandwidth: bytes per microsecond of each rank.
        latency: microseconds of each collective.
        shared: one wire carries all process groups, instead of one wire for each of them.
    """

    device: Device
    bandwidth: float = float("inf")
    latency: float = 0.0
    shared: bool = False

    def __post_init__(self) -> None:
        self._ends: dict[int, float] = {}

    def send(self, group: dist.ProcessGroup, nbytes: float) -> float:
        """When a transfer ends that starts once the current stream gets to it and the wire is free."""
        wire = 0 if self.shared else id(group)
        start = max(self.device.current.end, self.device.host, self._ends.get(wire, 0.0))
        self._ends[wire] = start + self.latency + nbytes / self.bandwidth
        return self._ends[wire]

    def finish(self) -> float:
        """When everything on wires and device is done; the clock then starts anew at 0."""
        sent = max(self._ends.values(), default=0.0)
        self._ends.clear()
        return max(sent, self.device.finish())


class Sent(dist.Work):
    """A collective on its way; it keeps its results alive."""

    def __init__(self, device: Device, end: float, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._device, self._end, self._result = device, end, result
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """The current stream waits, the host does not: as with NCCL."""
        self._device.current.wait_until(self._end)
        return True

    def is_completed(self) -> bool:
        return self._device.host >= self._end

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self._result


class SimulatedGroup(dist.ProcessGroup):
    """Rank ``rank`` of ``size``; the others exist as durations only."""

    def __init__(self, network: Network, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._network, self._rank, self._size = network, rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "simulated"

    @property
    def group_name(self) -> str:
        # The C++ property knows the names of C++ groups only.
        return dist.distributed_c10d._world.pg_names[self]

    def _send(self, full: Sequence[torch.Tensor], result: Sequence[torch.Tensor], rounds: int = 1) -> Sent:
        nbytes = sum(tensor.nbytes for tensor in full) * rounds * (self._size - 1) / self._size
        return Sent(self._network.device, self._network.send(self, nbytes), list(result))

    def all_gather_single(self, output: torch.Tensor, shard: torch.Tensor, options: Any = None) -> Sent:
        return self._send([output], [output])

    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], shards: Any, options: Any = None) -> Sent:
        return self._send(outputs, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, full: torch.Tensor, options: Any = None) -> Sent:
        return self._send([full], [output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], full: list[torch.Tensor], options: Any = None
    ) -> Sent:
        return self._send(full, outputs)

    def all_to_all_single(self, output: torch.Tensor, given: torch.Tensor, *_: Any) -> Sent:
        return self._send([given], [output])

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Sent:
        return self._send(tensors, tensors, rounds=2)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Sent:
        return self._send(tensors, tensors)

    def barrier(self, options: Any = None) -> Sent:
        return self._send([], [])

    # What torch before 2.13 calls them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    allreduce_coalesced = allreduce


_open: list[Network] = []
"""The network that new process groups are on: torch asks for a group by the name of its backend only."""


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(_open[-1], rank, size)


dist.Backend.register_backend("simulated", _create, devices=["cpu"])


@contextmanager
def simulated_ranks(network: Network, size: int) -> Iterator[DeviceMesh]:
    """A mesh of ``size`` ranks over ``network``, as the first of them sees it, on the network's device."""
    _open.append(network)
    try:
        with network.device.installed():
            dist.init_process_group("simulated", store=FakeStore(), rank=0, world_size=size)
            yield init_device_mesh("cpu", (size,))
            dist.destroy_process_group()
    finally:
        _open.pop()
