"""The job of a plan, of which only the first rank exists, and a count of its memory and time, on fake tensors.

Its mesh is over a process group that sends nothing. Streams without work replace those of ``torch.cpu``, so that the
runtime launches the schedule of an accelerator. They only remember which of them is the current one.

Every storage is counted from the operation that made it until it is freed, exactly. Temporary memory inside of a kernel
is not counted. The time of a kernel is that of its floating-point operations or of its memory traffic, whichever is
longer (the roofline model). Only operations of modules on the default stream take time: those of the runtime are part
of the prediction of the schedule.

Torch has tools for both. Its ``FSDPMemTracker`` counts the same peak, but raises a ``KeyError`` if a sharded module
does not run, and has nothing but the peak; its ``RuntimeEstimator`` needs the GPU that it predicts.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from composable_fsdp._core.full_mesh import default_mesh
from composable_fsdp.errors import ConfigurationError, LifecycleError
from composable_fsdp.plan.known_accelerators import Accelerator

KINDS = ("parameters", "gradients", "optimizer state", "unsharded", "activations", "messages")
"""The kinds of memory."""

_FREE = ("_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations that move no data, although their schema does not mark them as views."""

_ATEN = torch.ops.aten
_FLOPS: dict[Any, Any] = dict(flop_registry)
for _pass in ("", "_backward"):  # attention on CPU takes the operations of that on accelerators
    _FLOPS[getattr(_ATEN, f"_scaled_dot_product_flash_attention_for_cpu{_pass}")] = flop_registry[
        getattr(_ATEN, f"_scaled_dot_product_flash_attention{_pass}")
    ]


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
    names: dict[str, Any] = {"Stream": _Stream, "Event": _Event, "stream": streams.use}
    names["current_stream"] = lambda device=None: streams.current
    with ExitStack() as stack:
        if has_streams:
            stack.enter_context(mock.patch.multiple(torch.cpu, **names))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=prod(shape))
        stack.callback(dist.destroy_process_group)
        mesh = default_mesh()  # also for models that are sharded without a mesh: none can be made from fake tensors
        if len(shape) == 2:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        yield mesh, streams


# -- memory and time


class MemoryLedger(TorchDispatchMode):
    """A context that counts operations, and changes of the size of storages.

    Attributes:
        kind: the kind of the memory that operations of modules make.
        in_runtime: true while the runtime works in a hook.
        place: where the model is, in words.
        seconds: the time of all operations so far.
        flops: their floating-point operations.
        changes: the changes of memory since :meth:`restart`, beginning with all that was in use: the key of a storage,
            by how many bytes, and where.
        kind_of: the kind of each storage, by its key.
    """

    def __init__(self, accelerator: Accelerator, streams: Streams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._accelerator, self._streams = accelerator, streams
        self.kind, self.in_runtime, self.place = "parameters", False, "sharding"
        self.seconds = self.flops = 0.0
        self.changes: list[tuple[int, int, str]] = []
        self.kind_of: dict[int, str] = {}
        self._live: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}
        """The key and size of each storage by its address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # is dispatched again as operations on its local tensor
        if self.in_runtime and func is _ATEN._local_scalar_dense.default:
            return 0  # the flag of a parameter without gradient: no other rank has one either
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.in_runtime and self._streams.current is self._streams.default:
            self._charge(func, args, kwargs, result)
        for tensor in _tensors((result,)):
            self._track(tensor)
        return result

    def _charge(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = func.overloadpacket
        if func.is_view or func.namespace not in ("aten", "custom") or packet.__name__ in _FREE:
            return
        tensors = {id(t): t for t in _tensors((*args, *kwargs.values(), result))}.values()
        flops = float(_FLOPS[packet](*args, **kwargs, out_val=result)) if packet in _FLOPS else 0.0
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        self.flops += flops
        self.seconds += self._accelerator.seconds(flops, sum(t.nbytes for t in tensors), dtype)

    def _track(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor) or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live:
            key = len(self.kind_of)
            self.kind_of[key] = "messages" if self.in_runtime else self.kind
            self._live[address] = key, 0, weakref.ref(storage, lambda _: self._resize(address, 0))
            self._resize(address, storage.nbytes())

    def _resize(self, address: int, nbytes: int) -> None:
        """Note that the storage at ``address`` has another size. One that has ended has 0 bytes."""
        key, before, reference = self._live.pop(address)
        if nbytes != before:
            self.changes.append((key, nbytes - before, self.place))
        if reference() is not None:
            self._live[address] = key, nbytes, reference

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count all operations in this context, and changes of the size of storages."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._live:
                self.kind_of[self._live[storage._cdata][0]] = "unsharded"  # only buffers of full parameters are resized
                self._resize(storage._cdata, storage.nbytes())
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resize_), self:
            try:
                yield
            finally:
                self._live.clear()  # what ends later is not counted

    def mark(self, tensor: torch.Tensor, kind: str) -> None:
        """Set the kind of the storage of ``tensor``."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        if known is not None:
            self.kind_of[known[0]] = kind

    def restart(self) -> None:
        """Forget the changes so far, and note what is in use."""
        self.changes = [(key, size, self.place) for key, size, _ in list(self._live.values())]

    def peak(self) -> tuple[dict[str, int], dict[str, int], str]:
        """Return the bytes by kind at the peak since :meth:`restart`, the most bytes of each kind, and the place."""
        now, largest = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        total, most, place, at_peak = 0, -1, "", now
        for key, nbytes, where in self.changes:
            kind = self.kind_of[key]
            now[kind] += nbytes
            total += nbytes
            largest[kind] = max(largest[kind], now[kind])
            if total > most:
                most, place, at_peak = total, where, dict(now)
        return at_peak, largest, place


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
