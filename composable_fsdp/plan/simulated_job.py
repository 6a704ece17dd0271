"""A job of which only the first rank exists: a mesh over a process group that sends nothing, and streams without work.

Streams replace those of ``torch.cpu``, so that the runtime launches the schedule of an accelerator. They only remember
which of them is the current one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp._api.meshes import default_mesh
from composable_fsdp.errors import ConfigurationError, LifecycleError

__all__ = ["Streams", "mesh_shape", "simulated_job"]


def mesh_shape(text: str) -> tuple[int, ...]:
    """Return the shape that ``text`` such as ``"8x64"``, 8 replicas sharded over 64 ranks each, describes.

    Raises:
        ConfigurationError: it does not describe a mesh of one or two dims.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", str(text)):
        raise ConfigurationError(f"mesh must be a number of ranks, or replicas x shards such as '8x64', not {text!r}.")
    return tuple(map(int, str(text).split("x")))


class _Event(torch.cpu.Event):
    def __init__(self, *_: object, **__: object) -> None:
        pass


class _Stream(torch.cpu.Stream):
    def record_event(self, event: _Event | None = None) -> _Event:  # type: ignore[override]  # tells of streams
        return event or _Event()


class Streams:
    """The streams of the simulated device. Invariant: ``current`` is the one on which operations run."""

    def __init__(self) -> None:
        self.default = self.current = _Stream()

    @contextmanager
    def use(self, stream: _Stream | None) -> Iterator[None]:
        """Replace ``torch.cpu.stream``."""
        previous, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = previous

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the streams and events of ``torch.cpu``."""
        names: dict[str, Any] = {"Stream": _Stream, "Event": _Event, "stream": self.use}
        with mock.patch.multiple(torch.cpu, **names, current_stream=lambda device=None: self.current):
            yield


@contextmanager
def simulated_job(shape: tuple[int, ...], *, has_streams: bool) -> Iterator[tuple[DeviceMesh, Streams]]:
    """Yield a mesh of ``shape`` as its first rank, which has the largest shards, and the streams of its device.

    Raises:
        LifecycleError: this process has a process group already.
    """
    if dist.is_initialized():
        raise LifecycleError(
            "plan simulates the job in this process, which has a process group already. Call plan before "
            "init_process_group, or in another process."
        )
    streams = Streams()
    with ExitStack() as stack:
        if has_streams:
            stack.enter_context(streams.installed())
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=prod(shape))
        stack.callback(dist.destroy_process_group)
        mesh = default_mesh()  # also for models that are sharded without a mesh: none can be made from fake tensors
        if len(shape) == 2:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        yield mesh, streams
