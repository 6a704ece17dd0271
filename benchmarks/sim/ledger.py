"""Counts the bytes of all live tensors of a process on a simulated device.

Memory is counted after every operation. Temporary memory inside a kernel is not counted, because it differs between the
kernels of CPUs and other devices. Fake tensors are counted like others, so models may have any size. Allocators get the
same memory, on the stream that is current when an operation makes it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from sim.allocator import Allocator, Block
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Ledger"]


class Ledger(TorchDispatchMode):
    """A context that counts memory.

    Args:
        allocators: the allocators that get it too.

    Attributes:
        held: the bytes after the last operation.
        peak: the largest number of bytes after any operation.
    """

    observes_sharding = True

    def __init__(self, *allocators: Allocator) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._allocators = allocators
        self._storages: dict[int, StorageWeakRef] = {}
        self._blocks: dict[int, tuple[int, list[Block]]] = {}
        """The bytes of each storage and its blocks, one for each allocator."""
        self._patches = ExitStack()

    def __enter__(self) -> Ledger:
        """Begin to count. Allocators also see at once when a storage is resized, and when their cache is emptied."""
        if self._allocators:
            resize = torch.UntypedStorage.resize_

            def resize_(storage: torch.UntypedStorage, size: int) -> Any:
                result = resize(storage, size)
                self.count()
                return result

            def empty_cache() -> None:
                self.count()
                for allocator in self._allocators:
                    allocator.empty_cache()

            self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
            self._patches.enter_context(mock.patch.object(torch.cpu, "empty_cache", empty_cache, create=True))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # is dispatched again as operations on its local tensor
        if self._allocators:
            self.count()  # what was freed since the last operation can be used by this one
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, result)):
            if isinstance(each, torch.Tensor) and not isinstance(each, DTensor):
                self._track(each.untyped_storage())
        self.count()
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        known = self._storages.get(storage._cdata)
        if known is None or known.expired():
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def forget_peak(self) -> None:
        """Reset the peak."""
        self.peak = self.count()

    def count(self) -> int:
        """Return the bytes held now."""
        self.held = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            nbytes = 0 if storage is None else storage.nbytes()
            if self._allocators:
                self._allocate(key, nbytes)
            if storage is None:
                del self._storages[key]
            self.held += nbytes
        self.peak = max(self.peak, self.held)
        return self.held

    def _allocate(self, key: int, nbytes: int) -> None:
        """Let the allocators know that the storage ``key`` has ``nbytes`` bytes now."""
        before, blocks = self._blocks.get(key, (0, []))
        if nbytes == before:
            return
        for allocator, block in zip(self._allocators, blocks, strict=False):
            allocator.free(block)
        if nbytes:
            stream = id(torch.cpu.current_stream())
            self._blocks[key] = nbytes, [each.allocate(nbytes, stream) for each in self._allocators]
        else:
            del self._blocks[key]
