"""A process group of one real and many simulated ranks, whose collectives take virtual time.

A collective of ``n`` bytes in full takes ``latency + n * (ranks - 1) / ranks / bandwidth``. An all-reduce takes twice
the second summand, as on a ring. Nothing is sent; only the shapes of results are right. The process group is registered
as backend ``simulated`` of ``torch.distributed``, so that other code runs on it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sim.device import Device, Stream
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["VIRTUAL", "Network", "simulated_ranks"]

VIRTUAL = "virtual"
"""The name of a type of device other than the CPU that has the backend too, if it is registered."""


@dataclass
class Transfer:
    """The end of a collective, which is another one each time that it is repeated."""

    end: float = 0.0


@dataclass
class Network:
    """The links between the ranks. Speeds may change between steps.

    Attributes:
        bandwidth: the bytes per microsecond of each rank.
        latency: the microseconds of each collective.
        shared: if true, all process groups share one link. Otherwise each process group has its own.
    """

    device: Device
    bandwidth: float = float("inf")
    latency: float = 0.0
    shared: bool = False

    def __post_init__(self) -> None:
        self._ends: dict[int, float] = {}

    def transfer(self, group: dist.ProcessGroup, nbytes: float, what: str = "") -> Transfer:
        """Return a transfer that starts when the current stream reaches it and the link is free."""
        transfer = Transfer()
        self.device.do(partial(self._send, transfer, id(group), nbytes, self.device.current, what))
        return transfer

    def _send(self, transfer: Transfer, group: int, nbytes: float, stream: Stream, what: str) -> None:
        wire = 0 if self.shared else group
        start = max(stream.end, self.device.host, self._ends.get(wire, 0.0))
        transfer.end = self._ends[wire] = start + self.latency + nbytes / self.bandwidth
        self.device.note("network", start, transfer.end, what)

    def repeat(self, recording: Sequence[Callable[[], None]]) -> float:
        """Repeat the work of a ``recording`` of the device, and return the time at which all of it is done."""
        for work in recording:
            work()
        return self.finish()

    def finish(self) -> float:
        """Return the time at which all links and the device are done, and restart the clock at 0."""
        sent = max(self._ends.values(), default=0.0)
        self._ends.clear()
        return max(sent, self.device.finish())


class InFlight(dist.Work):
    """A collective in flight. It keeps its results alive."""

    def __init__(self, device: Device, transfer: Transfer, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._device, self._transfer, self._result = device, transfer, result
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait, but not the host, as with NCCL."""
        transfer = self._transfer
        self._device.current.wait_until(lambda: transfer.end)  # a recording of it must not keep the results alive
        return True

    def is_completed(self) -> bool:
        return self._device.host >= self._transfer.end

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self._result


class SimulatedGroup(dist.ProcessGroup):
    """Rank ``rank`` of ``size``. The other ranks exist only as durations."""

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
        # The C++ property knows only names of C++ groups.
        return dist.distributed_c10d._world.pg_names[self]

    def _launch(
        self, what: str, full: Sequence[torch.Tensor], result: Sequence[torch.Tensor], rounds: int = 1
    ) -> InFlight:
        nbytes = sum(tensor.nbytes for tensor in full) * rounds * (self._size - 1) / self._size
        return InFlight(self._network.device, self._network.transfer(self, nbytes, what), list(result))

    def all_gather_single(self, output: torch.Tensor, shard: torch.Tensor, options: Any = None) -> InFlight:
        return self._launch("all-gather", [output], [output])

    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], shards: Any, options: Any = None) -> InFlight:
        return self._launch("all-gather", outputs, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, full: torch.Tensor, options: Any = None) -> InFlight:
        return self._launch("reduce-scatter", [full], [output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], full: list[torch.Tensor], options: Any = None
    ) -> InFlight:
        return self._launch("reduce-scatter", full, outputs)

    def all_to_all_single(self, output: torch.Tensor, given: torch.Tensor, *_: Any) -> InFlight:
        return self._launch("all-to-all", [given], [output])

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> InFlight:
        return self._launch("all-reduce", tensors, tensors, rounds=2)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> InFlight:
        return self._launch("broadcast", tensors, tensors)

    def barrier(self, options: Any = None) -> InFlight:
        return self._launch("barrier", [], [])

    # The names of these methods before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    allreduce_coalesced = allreduce


_open: list[Network] = []
"""The network of new process groups. Torch creates a group only by the name of its backend."""


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(_open[-1], rank, size)


dist.Backend.register_backend("simulated", _create, devices=["cpu", VIRTUAL])


@contextmanager
def simulated_ranks(network: Network, size: int, module: Any = torch.cpu, kind: str = "cpu") -> Iterator[DeviceMesh]:
    """Yield a mesh of ``size`` ranks over ``network``, as its first rank, on the network's device.

    Args:
        module: the module of torch that gets the device's streams.
        kind: the type of tensors on the device.
    """
    _open.append(network)
    try:
        with network.device.installed(module):
            dist.init_process_group("simulated", store=FakeStore(), rank=0, world_size=size)
            yield init_device_mesh(kind, (size,))
            dist.destroy_process_group()
    finally:
        _open.pop()
