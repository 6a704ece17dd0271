"""The communicator over gloo, with point-to-point collectives.

Gloo's own all-gather is a ring on a thread of its own. Its reduce-scatter accumulates in the dtype of the message, in
an order that depends on the rank. Here, all-gather, reduce-scatter and all-to-all are point-to-point, and zero-copy for
large tensors. Reduce-scatter accumulates in fp32 and in rank order, so that sums are the same on every rank and in
every run. All-reduce is gloo's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable_fsdp._consistency.order_check import OrderCheck
from composable_fsdp._consistency.process_groups import LostError
from composable_fsdp._consistency.rank_report import OperationId
from composable_fsdp._consistency.rendezvous import own_client, world_store
from composable_fsdp._core.comm import (
    SUM,
    Collective,
    GroupCommunicator,
    OverGroup,
    Traits,
    Transfer,
    has_own_transports,
)
from composable_fsdp._core.layout import ReduceOp, add_up
from composable_fsdp._core.memory import Work
from composable_fsdp.errors import PeerError, UnsupportedError

_ZERO_COPY_BYTES_PER_RANK = 1 << 19
"""The bytes per rank from which a tensor is sent zero-copy instead of being packed with others. With 2 ranks,
all-gather and reduce-scatter are faster from there on; ``benchmarks/gloo_transfers.py`` measures it.
"""

_ZERO_COPY_BYTES = 1 << 21
"""The bytes of all ranks from which a tensor is sent zero-copy anyway, if it has ``_MIN_BYTES_PER_RANK``, because
copies take memory. With 4 ranks, all-gather and reduce-scatter are faster from there on.
"""

_MIN_BYTES_PER_RANK = 1 << 16
"""The cost in bytes of posting a message. Estimated, not measured."""


_NUMBER, _TEXT, _CLOSE, _DATA = 0x46534451, 0x46534452, 0x46534453, 0x46540000
"""Tags of our messages: digests to compare, texts that explain a difference, a tag that is never sent, and the first of
``_DATA_TAGS`` for data, so that messages of one operation are not matched with those of another.
"""
_DATA_TAGS = 1 << 16

_TEXT_BYTES = 4096

Backend = Any
"""``dist.ProcessGroupGloo``, most of whose methods are unknown to the type checker.

It is not registered with torch. Torch would keep it alive, or reuse its name, and with it the old addresses, for the
next one.
"""

_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""The generation of the connections per process group. Each has its own keys, because keys stay in the store."""


@dataclass(eq=False)
class GlooWork:
    """The work of one operation: gloo's works, which the connection keeps by ``key``, and a ``finish`` step.

    They are kept alive until they are waited for, since gloo closes a connection if the receiver of a message is
    deleted. Waiting again does nothing.
    """

    communicator: GlooCommunicator
    key: tuple[int, int]
    label: str
    finish: Callable[[], None] | None = None
    _is_done: bool = False

    def wait(self) -> None:
        """Wait for gloo's works and run ``finish``.

        Raises:
            PeerError: the connection is broken.
            LostError: gloo failed.
        """
        if not self._is_done:
            self.communicator.wait(self.key, self.label)
            self._is_done = True
        if self.finish is not None:
            self.finish()
            self.finish = None


class GlooCommunicator(OverGroup):
    """Collectives of CPU tensors over gloo, and the works in flight.

    The connections between the ranks are separate from those of the user's process group. A hopeless wait can only be
    ended by closing the connections, and this leaves the user's open.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.traits = Traits(
            widens=True,
            coalesces=True,  # all messages of a launch are on their way before the first is waited for
            zero_copy_min_bytes=max(
                min(self.size * _ZERO_COPY_BYTES_PER_RANK, _ZERO_COPY_BYTES), self.size * _MIN_BYTES_PER_RANK
            ),
        )
        self._timeout: timedelta = cast(Any, group._get_backend(torch.device("cpu"))).options._timeout
        self._numbers, self._close_lock = _numbers.setdefault(group, count()), threading.Lock()
        self._open()

    @property
    def is_broken(self) -> bool:
        return bool(self.broken)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def level(self, level: OrderCheck) -> OrderCheck:
        return level

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> GlooWork:
        if op is not ReduceOp.SUM:
            raise UnsupportedError("a communicator over gloo does not average: ask for its traits, or sum and divide.")
        messages = self._messages(transfers) if kind is Collective.REDUCE_SCATTER else []
        if self.broken:
            self.check()
        self.launched += 1
        tag = _DATA + self.launched % _DATA_TAGS
        works, own, finish = list[Work](), list[tuple[torch.Tensor, torch.Tensor]](), None
        try:
            if kind is Collective.REDUCE_SCATTER:
                for _, parts, summands in messages:
                    works += self.exchange(parts, summands, tag)
                finish = partial(_add_up, messages)
            elif kind is Collective.ALL_REDUCE:
                works += [self.backend.allreduce([transfer.output]) for transfer in transfers]
            else:
                for output, sent in transfers:
                    rows = self._rows(output).unbind(0)
                    parts = [sent] * self.size if kind is Collective.ALL_GATHER else list(self._rows(sent).unbind(0))
                    works += self.exchange(parts, rows, tag)
                    own.append((rows[self.rank], parts[self.rank]))
        except RuntimeError as error:
            raise self.lost(error, 0.0) from error
        for target, source in own:  # this rank's own part, while the messages are on their way
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
        key = self.generation, self.launched
        self.kept[key] = works
        return GlooWork(self, key, label or kind.label, finish)

    def _messages(self, transfers: Sequence[Transfer]) -> list[_Message]:
        """Return the messages of a reduce-scatter. Small tensors share one for each dtype, and are copied in."""
        small: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        large: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        for output, full in transfers:
            rows = full.view(self.size, full.numel() // self.size)
            if full.nbytes >= self.traits.zero_copy_min_bytes:
                large.append(([output], [rows]))
            else:
                outputs, inputs = small.setdefault(full.dtype, ([], []))
                outputs.append(output)
                inputs.append(rows)
        messages = []
        for outputs, inputs in (*small.values(), *large):
            rows = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)
            summands = list(rows.new_empty(self.size - 1, rows.size(1)).unbind(0))
            summands.insert(self.rank, rows[self.rank])  # this rank's part is summed in place
            messages.append(_Message(outputs, rows.unbind(0), summands))
        return messages

    def _rows(self, full: torch.Tensor) -> torch.Tensor:
        return full.view(self.size, full.numel() // self.size)

    # -- connections

    def _open(self) -> None:
        self.generation = next(self._numbers)
        # Two threads may open connections at once, in another order than on other ranks, and wait for their peers.
        is_alone = threading.current_thread() is threading.main_thread()
        client = None if is_alone else own_client()
        store = dist.PrefixStore(f"connection/{self.name}/{self.generation}", client or world_store())
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
        return [int(each) for each in self._exchange_now(torch.tensor([own]), _NUMBER)]

    def exchange_texts(self, own: str) -> dict[int, str]:
        """Return the texts of all ranks by global rank. All of them must call it together."""
        text = own.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        received = self._exchange_now(torch.frombuffer(bytearray(text), dtype=torch.uint8), _TEXT)
        texts = (bytes(each.numpy()).rstrip(b"\0").decode(errors="replace") for each in received)
        return dict(zip(self.ranks, texts, strict=True))

    def _exchange_now(self, own: torch.Tensor, tag: int) -> list[torch.Tensor]:
        self.check()
        received = [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]
        begin = time.monotonic()
        try:
            for work in self.exchange([own] * self.size, received, tag):
                work.wait()
        except RuntimeError as error:
            raise self.lost(error, time.monotonic() - begin) from error
        return received


class _Message(NamedTuple):
    """A message of a reduce-scatter: the part for each rank, and the memory for the part that each rank sends."""

    outputs: Sequence[torch.Tensor]
    parts: Sequence[torch.Tensor]
    summands: Sequence[torch.Tensor]


def _add_up(messages: Sequence[_Message]) -> None:
    for outputs, _, summands in messages:
        widths = [output.numel() for output in outputs]
        columns = zip(*[summand.split(widths) for summand in summands], strict=True)
        for output, column in zip(outputs, columns, strict=True):
            add_up(column, output)


def over_gloo(group: dist.ProcessGroup, device_type: str) -> GroupCommunicator | None:
    """Return a communicator for CPU tensors over gloo."""
    return GlooCommunicator(group) if has_own_transports(group, device_type) else None
