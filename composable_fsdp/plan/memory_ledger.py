"""A count of the memory and the time of operations on fake tensors.

Every storage is counted from the operation that made it until it is freed, exactly. Temporary memory inside of a kernel
is not counted. The time of a kernel is that of its floating-point operations or of its memory traffic, whichever is
longer (the roofline model). Only operations of modules on the default stream take time: those of the runtime are part
of the prediction of the schedule.

Torch has tools for both. Its ``FSDPMemTracker`` counts the same peak, but raises a ``KeyError`` if a sharded module
does not run, and has nothing but the peak; its ``RuntimeEstimator`` needs the GPU that it predicts.
tests/unit/test_plan.py shows both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from composable_fsdp.plan.known_accelerators import Accelerator
from composable_fsdp.plan.simulated_job import Streams

__all__ = ["KINDS", "Change", "MemoryLedger", "Peak", "peak_of"]

KINDS = ("parameters", "gradients", "optimizer state", "unsharded", "activations", "messages")
"""The kinds of memory."""

_FREE = ("_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations that move no data, although their schema does not mark them as views."""

_ATEN = torch.ops.aten
_FLOPS: Mapping[Any, Any] = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
}


class Change(NamedTuple):
    """A change of the memory in use: of which storage, by how many bytes, where, and when."""

    key: int
    nbytes: int
    place: str
    seconds: float


class MemoryLedger(TorchDispatchMode):
    """A context that counts operations.

    Attributes:
        kind: the kind of the memory that operations of modules make.
        in_runtime: true while the runtime works in a hook.
        place: where the model is, in words.
        seconds: the time of all operations so far.
        flops: their floating-point operations.
        changes: the changes of memory since :meth:`restart`, beginning with all that was in use.
        kind_of: the kind of each storage, by its key.
    """

    def __init__(self, accelerator: Accelerator, streams: Streams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._accelerator, self._streams = accelerator, streams
        self.kind, self.in_runtime, self.place = "parameters", False, "sharding"
        self.seconds = self.flops = 0.0
        self.changes: list[Change] = []
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
        if address in self._live:
            return
        key, size = len(self.kind_of), storage.nbytes()
        self.kind_of[key] = "messages" if self.in_runtime else self.kind
        self._live[address] = key, size, weakref.ref(storage, lambda _: self._end(address))
        self._note(key, size)

    def _note(self, key: int, nbytes: int) -> None:
        if nbytes:
            self.changes.append(Change(key, nbytes, self.place, self.seconds))

    def _end(self, address: int) -> None:
        key, size, _ = self._live.pop(address)
        self._note(key, -size)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._live.get(storage._cdata)
        if known is not None:
            key, size, reference = known
            self._note(key, -size)
            self.kind_of[key] = "unsharded"  # only buffers of full parameters are resized
            self._live[storage._cdata] = key, storage.nbytes(), reference
            self._note(key, storage.nbytes())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count all operations in this context, and changes of the size of storages."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
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
        self.changes.clear()
        for key, size, _ in list(self._live.values()):
            self._note(key, size)


class Peak(NamedTuple):
    """The largest memory of a step.

    Args:
        nbytes: the bytes at the peak by kind.
        largest: the most bytes of each kind at any time.
        place: where the peak is.
        curve: the bytes of each kind over the time of computation, in seconds from the begin of the step.
    """

    nbytes: dict[str, int]
    largest: dict[str, int]
    place: str
    curve: tuple[tuple[float, tuple[int, ...]], ...]


def peak_of(ledger: MemoryLedger) -> Peak:
    """Return the peak of the changes that ``ledger`` has noted."""
    now, largest = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    total, most, place, at_peak = 0, -1, "", now
    curve = list[tuple[float, tuple[int, ...]]]()
    begin = ledger.changes[0].seconds if ledger.changes else 0.0
    for key, nbytes, where, seconds in ledger.changes:
        kind = ledger.kind_of[key]
        now[kind] += nbytes
        total += nbytes
        largest[kind] = max(largest[kind], now[kind])
        if total > most:
            most, place, at_peak = total, where, dict(now)
        curve.append((seconds - begin, tuple(now.values())))
    return Peak(at_peak, largest, place, tuple(curve))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
