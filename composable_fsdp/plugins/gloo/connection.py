"""Gloo connections between the ranks of one process group.

The connections are separate from those of the user's process group. A hopeless wait can only be ended by closing the
connections, and this leaves the user's open.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable_fsdp._consistency.process_groups import LostError
from composable_fsdp._consistency.rank_report import OperationId
from composable_fsdp._consistency.rendezvous import own_client, world_store
from composable_fsdp._core.memory import Work
from composable_fsdp.errors import PeerError

_NUMBER, _TEXT, _CLOSE, DATA = 0x46534451, 0x46534452, 0x46534453, 0x46540000
"""Tags of our messages: digests to compare, texts that explain a difference, a tag that is never sent, and the first of
``DATA_TAGS`` for data, so that messages of one operation are not matched with those of another.
"""
DATA_TAGS = 1 << 16

_TEXT_BYTES = 4096

Backend = Any
"""``dist.ProcessGroupGloo``, most of whose methods are unknown to the type checker.

It is not registered with torch. Torch would keep it alive, or reuse its name, and with it the old addresses, for the
next one.
"""

_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""The generation of the connections per process group. Each has its own keys, because keys stay in the store."""


class GlooConnection:
    """The connections of this rank to the other ranks of ``group``, and the works in flight over them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.ranks = tuple(ranks)
        self.rank, self.size = dist.get_rank(group), len(ranks)
        options = cast(Any, group._get_backend(torch.device("cpu"))).options
        self._timeout: timedelta = options._timeout
        self._name, self._numbers = group.group_name, _numbers.setdefault(group, count())
        self._close_lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self.generation = next(self._numbers)
        # Two threads may open connections at once, in another order than on other ranks, and wait for their peers.
        is_alone = threading.current_thread() is threading.main_thread()
        client = None if is_alone else own_client()
        store = dist.PrefixStore(f"connection/{self._name}/{self.generation}", client or world_store())
        self.backend: Backend = dist.ProcessGroupGloo(store, self.rank, self.size, self._timeout)
        self.launched = 0
        """The number of operations that were launched."""
        self.broken = ""
        """Why the connection cannot be used any more."""
        self.kept: dict[tuple[int, int], Sequence[Work]] = {}
        """Works in flight that have not been waited for, by generation of the connection and number of operation."""

    def abandon(self) -> None:
        """Abort operations in flight, so that gloo no longer writes to their memory. Call it before :meth:`reopen`."""
        self.give_up("this rank connects anew after a failed pass")
        self.kept.clear()

    def reopen(self) -> None:
        """Replace the connections by new ones. All ranks must call it together."""
        self._close()
        self._open()

    def check(self) -> None:
        """Raise a ``PeerError`` if the connection is broken."""
        if self.broken:
            raise PeerError(f"ranks {list(self.ranks)} cannot go on together, since {self.broken}")

    def wait(self, key: tuple[int, int], label: str) -> None:
        """Wait for the kept works of an operation. Call it once per operation.

        Raises:
            PeerError: the connection is broken, or was reopened: gloo itself would wait for the full timeout.
            LostError: gloo failed.
        """
        works = self.kept.get(key)
        if self.broken or works is None:
            operation = OperationId(self.ranks, key[1], label)
            if self.broken:
                raise PeerError(f"{operation} cannot be done, since {self.broken}")
            raise PeerError(f"{operation} was given up when the ranks connected anew. Begin the step again.")
        begin = time.monotonic()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.lost(error, time.monotonic() - begin) from error
        del self.kept[key]

    def lost(self, error: RuntimeError, seconds: float) -> LostError:
        """Return our error for gloo's ``error`` after ``seconds`` of waiting."""
        is_late = seconds >= self._timeout.total_seconds()
        return LostError(f"After {seconds:.1f} s gloo says: {error}", timed_out=is_late)

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], tag: int) -> list[Work]:
        """Exchange ``sent[r]`` for ``received[r]`` with each rank r, zero-copy. Neighbors first, to spread the load."""
        works: list[Work] = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            works.append(self.backend.recv([received[source]], source, tag))
            works.append(self.backend.send([sent[target]], target, tag))
        return works

    def give_up(self, reason: str) -> None:
        """Close the connection for good, which ends all waits. Gloo closes a connection when a wait on it times out.

        Invariant: a connection is closed before ``broken`` is set, so that gloo no longer writes to its memory. A
        thread that sees ``broken`` may free that memory, even while another thread is still in this method.
        """
        with self._close_lock:
            self._close()
            self.broken = self.broken or reason

    def _close(self) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    self.backend.recv([torch.empty(1)], peer, _CLOSE).wait(timedelta(milliseconds=1))

    def exchange_numbers(self, own: int) -> list[int]:
        """Return the numbers of all ranks, in rank order. All of them must call it together."""
        sent = torch.tensor([own])
        received = torch.empty(self.size, dtype=torch.int64)
        self._exchange_now(sent, list(received.split(1)), _NUMBER)
        received[self.rank] = own
        return cast(list[int], received.tolist())

    def exchange_texts(self, own: str) -> dict[int, str]:
        """Return the texts of all ranks by global rank. All of them must call it together."""
        text = own.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        sent = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self._exchange_now(sent, received, _TEXT)
        received[self.rank] = sent
        texts = (bytes(each.numpy()).rstrip(b"\0").decode(errors="replace") for each in received)
        return dict(zip(self.ranks, texts, strict=True))

    def _exchange_now(self, sent: torch.Tensor, received: Sequence[torch.Tensor], tag: int) -> None:
        self.check()
        begin = time.monotonic()
        try:
            for work in self.exchange([sent] * self.size, received, tag):
                work.wait()
        except RuntimeError as error:
            raise self.lost(error, time.monotonic() - begin) from error
