"""Measures the peak memory of a training step or another part of a program, and finds live storages."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_above_idle(model: nn.Module, x: Tensor) -> int:
    """Return the peak bytes that torch allocates during a step, minus the bytes allocated before it."""
    for _ in range(2):  # the first steps record the order
        model(x).sum().backward()
        model.zero_grad()
    return peak_of(lambda: model(x).sum().backward())


def peak_of(action: Callable[[], object]) -> int:
    """Return the peak bytes that torch allocates during ``action``, minus the bytes allocated before it."""
    gc.collect()
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler,
        record_function("action"),
    ):
        action()
    events = profiler.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return int(max(accumulate(nbytes for _, nbytes in sorted(sizes, key=lambda size: size[0]))))


class Peak(TorchDispatchMode):
    """Measures the peak bytes of plain tensors that are made while this mode is active."""

    observes_sharding = True

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._storages[reference.cdata] = reference
        self._storages = {key: reference for key, reference in self._storages.items() if not reference.expired()}
        self.bytes = max(self.bytes, sum(map(size_of, self._storages.values())))
        return out


def size_of(reference: StorageWeakRef) -> int:
    """Return a storage's current size. Unsharded buffers are resized to zero as soon as they are laid out."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes()


class LiveStorages:
    """Finds storages that were allocated after this object and that a tensor still uses. Sizes are in bytes. Staging
    memory of messages is not counted. It is mapped from files and shared by all groups, and only written pages take
    memory. ``test_shared_memory_transport.py`` shows that it is bounded."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # existing storages are not counted

    def check(self, where: str, *, least: int, expected: list[int]) -> None:
        """Check the sizes of the storages of at least ``least`` bytes. A bias may add 8 KiB to each."""
        deadline = time.monotonic() + 5
        while True:
            actual = self._sizes(least)
            if len(actual) == len(expected) and all(0 <= a - e < 8192 for a, e in zip(actual, expected, strict=True)):
                return
            # gloo's threads release a message shortly after its completion.
            assert time.monotonic() < deadline, f"{where}: storages of {actual} bytes, expected {expected}"
            time.sleep(0.01)

    def _sizes(self, least: int) -> list[int]:
        gc.collect()
        storages = {}
        for obj in gc.get_objects():
            kind = type(obj)  # isinstance would load lazy objects, and some of them warn
            if issubclass(kind, torch.Tensor) and not issubclass(kind, DTensor):
                storage = obj.untyped_storage()
                if not storage.filename:
                    storages[storage._cdata] = storage.nbytes()
        return sorted(nbytes for nbytes in storages.values() if nbytes >= least)


# Every full weight of this task is larger than this, and every shard is smaller.
FULL = 3_000_000
