"""Late execution: the operations of a simulated accelerator again, in another order that its events allow. A
:class:`Recording` has each operation with its stream and its vector clock. :meth:`Recording.run_late` executes them on
copies of the memory. Each stream keeps its order; beyond that, an operation runs when everything is done that its clock
has, or as much later as a seed chooses. It gives an operation the arguments of the host's order, and compares the bits
that it writes or returns with those of the host's order, and at the end the memory that is still in use. Memory has
defined contents. Allocated memory is filled with :data:`POISON` on its stream, in the order of the host too. Freed
memory is filled on its stream at the first allocation there that may get it, and must stay so. So each allocation has a
copy of its own, and reuse is the worst that an allocator may do."""

from __future__ import annotations

import ctypes
import random
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

POISON = 0xFF
"""The byte of memory that nothing has written: NaN in every floating-point dtype, and -1 in signed integers."""
_CHANGES = 3
"""The number of times that the first of the streams becomes the last one in an order."""
_MOST_DIFFERENCES = 10


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor: a part of the memory of an allocation, by its number. Empty tensors have none."""

    memory: int | None
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Copies:
    def __init__(self, contents: Sequence[torch.Tensor | int]) -> None:
        self._contents = contents
        self._storages: dict[int, torch.UntypedStorage] = {}

    def memory(self, number: int) -> torch.Tensor:
        """Return all bytes of an allocation."""
        return torch.empty(0, dtype=torch.uint8).set_(self._storage(number))

    def tensor(self, place: _Place) -> torch.Tensor:
        if place.memory is None:
            return torch.empty_strided(place.shape, place.strides, dtype=place.dtype)
        storage = self._storage(place.memory)
        return torch.empty(0, dtype=place.dtype).set_(storage, place.offset, place.shape, place.strides)

    def value(self, value: Any) -> Any:
        return self.tensor(value) if isinstance(value, _Place) else value

    def _storage(self, number: int) -> torch.UntypedStorage:
        if number not in self._storages:
            first = self._contents[number]
            filled = torch.full((first,), POISON, dtype=torch.uint8) if isinstance(first, int) else first.clone()
            self._storages[number] = filled.untyped_storage()
        return self._storages[number]


Action = Callable[[Copies], str]
"""Executes an operation, and returns how it differs from the host's order, or an empty text."""


@dataclass(frozen=True, slots=True)
class _Step:
    """An operation of a stream."""

    number: int
    clock: Mapping[int, int]
    what: tuple[object, ...]
    action: Action


class Recording:
    """The operations and the memory of a simulated accelerator."""

    def __init__(self) -> None:
        self._steps: dict[int, list[_Step]] = {}
        self._contents: list[torch.Tensor | int] = []
        """The first contents of each allocation, or its bytes if nothing has been written to it."""
        self._numbers: dict[int, int] = {}
        """The number of the allocation at each address."""
        self._freed: dict[int, object] = {}
        """The freed allocations that another one may have got, with a text for errors."""
        self._live: list[tuple[int, object, weakref.ref[torch.UntypedStorage]]] = []
        self._last: list[tuple[int, object, int]] = []
        """The number, text and digest of the allocations that are in use at the end."""

    # -- recording

    def allocate(self, storage: torch.UntypedStorage, what: object, *, fills: bool, keeps: bool) -> int:
        """Add the memory of ``storage``, and return its number. ``what``: a text for errors. ``fills``: fill it with
        :data:`POISON`, since the host's order has not written to it. ``keeps``: its contents were there before the
        recording."""
        number = self._numbers[storage.data_ptr()] = len(self._contents)
        with _unseen():
            contents = torch.empty(0, dtype=torch.uint8).set_(storage)
            if fills:
                contents.fill_(POISON)
            self._contents.append(contents.clone() if keeps else storage.nbytes())
        self._live.append((number, what, weakref.ref(storage)))
        return number

    def free(self, address: int) -> None:
        """Note that the memory at ``address`` is freed."""
        self._numbers.pop(address, None)

    def reuse(self, number: int, what: object) -> Action:
        """Return the action of an allocation that gets freed memory."""
        self._freed[number] = what
        return fill(number)

    def add(self, stream: int, number: int, clock: Mapping[int, int], what: tuple[object, ...], action: Action) -> None:
        self._steps.setdefault(stream, []).append(_Step(number, dict(clock), what, action))

    def call(self, func: Any, args: Any, kwargs: Any, result: Any, written: Sequence[torch.Tensor]) -> Action:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self.exchange([], written, [])
        given = _mapped(self._place_of, list(args)), _mapped(self._place_of, kwargs)
        known = {each.memory for each in leaves(given) if isinstance(each, _Place)}
        returned = [each if isinstance(each, _Place) else repr(each) for each in map(self._place_of, leaves(result))]
        bits = [(self._place(each), _digest(each)) for each in written]

        def action(copies: Copies) -> str:
            new_args, new_kwargs = (_mapped(copies.value, each) for each in given)
            for value, expected in zip(leaves(func(*new_args, **new_kwargs)), returned, strict=True):
                if isinstance(expected, str):
                    if repr(value) != expected:
                        return f"returns {value!r}, not {expected}"
                elif value.shape != expected.shape:
                    return f"returns a tensor of shape {tuple(value.shape)}, not {tuple(expected.shape)}"
                elif expected.memory not in known:
                    copies.tensor(expected).copy_(value)
            return _difference(copies, bits, "writes other bits")

        return action

    def exchange(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], digests: Sequence[int] | None = None
    ) -> Action:
        """Return the action of a transfer that read ``sent`` and wrote ``received``: it writes the same values again.
        ``digests``: :meth:`digests` of ``sent`` before the transfer."""
        read = list(zip(map(self._place, sent), self.digests(sent) if digests is None else digests, strict=True))
        with _unseen(), torch.no_grad():
            values = [(self._place(each), each.clone()) for each in received]

        def action(copies: Copies) -> str:
            difference = _difference(copies, read, "reads other bits")
            for place, value in values:
                copies.tensor(place).copy_(value)
            return difference

        return action

    @staticmethod
    def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
        with _unseen(), torch.no_grad():
            return [_digest(tensor) for tensor in tensors]

    def finish(self) -> None:
        """End the recording, in the order of the host."""
        with _unseen():
            for number, what, storage in self._live:
                alive = storage()
                if alive is not None and alive.nbytes() and self._numbers.get(alive.data_ptr()) == number:
                    self._last.append((number, what, _digest(torch.empty(0, dtype=torch.uint8).set_(alive))))

    def _place_of(self, value: Any) -> Any:
        return self._place(value) if isinstance(value, torch.Tensor) else value

    def _place(self, tensor: torch.Tensor) -> _Place:
        storage = tensor.untyped_storage()
        memory = self._numbers[storage.data_ptr()] if storage.nbytes() and tensor.numel() else None
        offset = int(tensor.storage_offset())
        return _Place(memory, tensor.dtype, offset, tuple(tensor.shape), tuple(tensor.stride()))

    # -- execution

    def run_late(self, seed: int) -> list[str]:
        """Execute all operations in another order. Return the first differences from the order of the host. ``seed``:
        chooses the order. 0 prefers the default stream, 1 prefers it least, and others are random."""
        copies, found = Copies(self._contents), list[str]()
        with _unseen(), torch.no_grad():
            for step in self._order(seed):
                try:
                    difference = step.action(copies)
                except (RuntimeError, IndexError, ValueError) as error:  # of arguments that are wrong
                    difference = f"raises {type(error).__name__}: {error}"
                if difference:
                    found.append(f"{' on '.join(map(str, step.what))} {difference}")
            for number, what, digest in self._last:
                if _digest(copies.memory(number)) != digest:
                    found.append(f"{what} has other bits at the end")
            for number, what in self._freed.items():
                if not bool((copies.memory(number) == POISON).all()):
                    found.append(f"{what} is written after it was freed")
        return found[:_MOST_DIFFERENCES]

    def _order(self, seed: int) -> Iterator[_Step]:
        """Yield the operations: each time the next one of the first stream, in a random order, that waits for nothing.
        The order of the streams changes some times, as in probabilistic concurrency testing (Burckhardt et al. 2010, "A
        randomized scheduler with probabilistic guarantees of finding bugs")."""
        chosen, length = random.Random(seed), sum(map(len, self._steps.values()))
        order, changes = sorted(self._steps, reverse=seed == 1), set[int]()
        if seed > 1 and length:
            chosen.shuffle(order)
            changes = {chosen.randrange(length) for _ in range(_CHANGES)}
        queues = {stream: deque(steps) for stream, steps in self._steps.items()}
        following = {stream: float(steps[0].number) for stream, steps in queues.items()}
        for position in range(length):
            stream = next(each for each in order if queues[each] and _is_ready(each, queues[each][0].clock, following))
            yield queues[stream].popleft()
            following[stream] = queues[stream][0].number if queues[stream] else inf
            if position in changes:
                order.append(order.pop(order.index(stream)))


def _is_ready(stream: int, clock: Mapping[int, int], following: Mapping[int, float]) -> bool:
    return all(other == stream or following.get(other, inf) > number for other, number in clock.items())


def leaves(values: Any) -> Iterator[Any]:
    """Yield the values in lists, tuples and dicts, the only containers in arguments of operations."""
    if isinstance(values, (list, tuple)):
        for each in values:
            yield from leaves(each)
    elif isinstance(values, dict):
        yield from leaves(list(values.values()))
    else:
        yield values


def _mapped(function: Callable[[Any], Any], values: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return type(values)(_mapped(function, each) for each in values)
    if isinstance(values, dict):
        return {key: _mapped(function, each) for key, each in values.items()}
    return function(values)


def fill(number: int) -> Action:
    """Return the action of allocating memory: it fills the allocation ``number`` with :data:`POISON`."""

    def action(copies: Copies) -> str:
        copies.memory(number).fill_(POISON)
        return ""

    return action


@contextmanager
def _unseen() -> Iterator[None]:
    """Execute operations that no dispatch mode sees."""
    with _disable_current_modes():
        yield


def _digest(tensor: torch.Tensor) -> int:
    """Return a checksum of the bits of ``tensor``. No dispatch mode may be active."""
    flat = tensor.detach().contiguous()
    return zlib.crc32((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())) if flat.nbytes else 0


def _difference(copies: Copies, expected: Sequence[tuple[_Place, int]], text: str) -> str:
    for place, digest in expected:
        if _digest(copies.tensor(place)) != digest:
            return text
    return ""
