"""A store of which a rank is cut off for a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


class PartitionableStore(dist.Store):
    """A store that forwards to ``base`` until this rank is cut off, for ``init_process_group(store=...)``. Final. While
    cut off, every call waits, and raises ``dist.DistNetworkError``, a ``RuntimeError``, after ``seconds``. Clones are
    cut off together with their original. ``base``: any store. ``seconds``: the time for which a call waits for the
    store to answer again."""

    def __init__(self, base: dist.Store, seconds: float = 300.0) -> None:
        super().__init__()
        self.base, self.seconds = base, seconds
        self._connected = threading.Event()
        self._connected.set()
        self._clones: list[PartitionableStore] = []
        """Kept alive, since the C++ side that uses clones does not keep their Python side."""

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Block all calls to the store inside the block."""
        self._connected.clear()
        try:
            yield
        finally:
            self._connected.set()

    def clone(self) -> PartitionableStore:
        clone = PartitionableStore(cast(Any, self.base).clone(), self.seconds)
        clone._connected = self._connected
        self._clones.append(clone)
        return clone

    @property
    def timeout(self) -> timedelta:
        return cast(timedelta, cast(Any, self.base).timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self.base.set_timeout(timeout)

    def get(self, key: str) -> bytes:
        return self._call(lambda: self.base.get(key))

    def set(self, key: str, value: Any) -> None:
        self._call(lambda: self.base.set(key, value))

    def add(self, key: str, value: int) -> int:
        return self._call(lambda: self.base.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return self._call(lambda: bool(cast(Any, self.base).check(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._call(lambda: self.base.compare_set(key, expected, desired))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._call(lambda: self.base.wait(keys, *timeout))

    def delete_key(self, key: str) -> bool:
        return self._call(lambda: self.base.delete_key(key))

    def num_keys(self) -> int:
        return self._call(self.base.num_keys)

    def _call(self, call: Callable[[], T]) -> T:
        if not self._connected.wait(self.seconds):
            raise dist.DistNetworkError(f"the store did not answer in {self.seconds:g} s")
        return call()
