"""The communicator over gloo: collectives made of what gloo does well, compared before they begin.

Gloo's own all-gather copies what it moves in and out, and its reduce-scatter adds up in the dtype of the wire, in an
order that depends on the rank. Here large parts go point to point, from where they lie to their place. Sums are made
where the parts arrive: in fp32, in the order of ranks, so that they are the same on every rank and from run to run.

Everything goes over connections of our own, a *line*, so that a wait that has become hopeless can be ended by
closing them, which gloo offers no other way to do, without touching those of the user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from composable_fsdp import trace
from composable_fsdp.comm.agreement import Agreement, OrderCheck
from composable_fsdp.comm.protocol import Transfer, Work
from composable_fsdp.comm.roll import Place
from composable_fsdp.comm.shown import show
from composable_fsdp.comm.sums import add_up
from composable_fsdp.comm.watch import Watch
from composable_fsdp.errors import DivergenceError, FSDPError, PeerError, UnsupportedError
from composable_fsdp.layout.bucket import NEVER_DIRECT
from composable_fsdp.layout.reduction import ReduceOp

__all__ = ["GlooCommunicator", "Line"]

_DIRECT_PART_BYTES = 1 << 17
"""One rank's part, from which it travels point to point. On an idle machine a quarter of that wins as well, as
``benchmarks/gloo_transfers.py`` shows; on a busy one every message more waits for a thread to wake up.
"""

_DATA, _NUMBER, _TEXT, _CLOSE = 0x46534450, 0x46534451, 0x46534452, 0x46534453
"""Tags of our messages: data, what ranks compare, what they tell when it differs; the last one is never sent."""

_TEXT_BYTES = 4096

Backend = Any
"""``dist.ProcessGroupGloo``, of whose methods the type checker knows little.

It is not registered with torch, which would keep it, or give its name, with the old addresses, to the next one.
"""

_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""Of the lines over a process group, since what one has in the store stays there."""


def _nothing() -> None:
    pass


class Line:
    """What the communicators over one process group share on this rank: connections, and what was agreed on. Final.

    Args:
        group: of the user.
        watch: of this process; ``None`` has nobody asked.
        level: how much ranks compare before they begin.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch | None, level: OrderCheck) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.ranks = tuple(ranks)
        self.rank, self.size = dist.get_rank(group), len(ranks)
        options = cast(Any, group._get_backend(torch.device("cpu"))).options
        self._timeout: timedelta = options._timeout
        self._watch, self._level = watch, level
        self._name, self._numbers = group.group_name, _numbers.setdefault(group, count())
        self._open()

    def _open(self) -> None:
        self._connection = next(self._numbers)
        self._place_name = f"{self._name}/{self._connection}"
        store = dist.PrefixStore(f"composable_fsdp/line/{self._place_name}", dist.distributed_c10d._get_default_store())
        self.backend: Backend = dist.ProcessGroupGloo(store, self.rank, self.size, self._timeout)
        self._agreement = Agreement(self._compare, self._tell, self._level)
        self._broken = ""

    def reopen(self) -> None:
        """Begins anew with other connections. All ranks must do so together."""
        self._close()
        self._open()

    @property
    def position(self) -> str:
        """Where this rank is in the sequence of operations; the same on all ranks that are about to do the same."""
        return "broken" if self._broken else str(self._agreement.number)

    @property
    def compared(self) -> int:
        """Operations before which ranks have compared what they are about to do."""
        return self._agreement.compared

    def compare(self, level: OrderCheck) -> None:
        """How much is compared from now on. The same on every rank."""
        self._level = self._agreement.level = level

    def begin(self, label: str, transfers: Sequence[Transfer]) -> Place:
        """The next operation, once all ranks are about to do it.

        Raises:
            DivergenceError: some are not.
            PeerError: some are gone, or an earlier operation has failed.
        """
        if self._broken:
            raise PeerError(f"ranks {list(self.ranks)} cannot go on together, since {self._broken}")
        sizes = tuple(transfer.input.numel() * transfer.input.itemsize for transfer in transfers)
        self._label = label
        place = Place(self.ranks, self._agreement.number + 1, label, self._place_name)
        show(label)
        if trace.listeners:
            trace.emit(trace.Operation.COLLECTIVE, label, sum(sizes), position=self._position_of(place))
        try:
            self._agreement.begin(f"{label} ({sum(sizes)} bytes in {len(sizes)} tensors, {hash(sizes) & 0xFFFF:04x})")
        except DivergenceError as error:
            trace.tell_fault(error, str(place), self._position_of(place))
            raise
        return place

    def _position_of(self, place: Place) -> trace.Position:
        return trace.Position(self._name, self.ranks, self._connection, place.number)

    def wait(self, place: Place, works: Sequence[Work]) -> None:
        """Waits in gloo: turns its errors into ours, and is ended when it has become hopeless.

        Raises:
            PeerError: a rank failed, is gone, or did not come within the timeout of the process group.
            DivergenceError: a rank is about to do something else.
        """
        begin = time.monotonic()
        if self._watch is not None:
            self._watch.begin_wait(place, self._give_up)
        done = False
        try:
            for work in works:
                work.wait()
            done = True
        except RuntimeError as error:
            raise self.explained(place, error, time.monotonic() - begin) from error
        finally:
            if self._watch is not None:
                self._watch.end_wait(done=done)

    def launching(self, place: Place) -> Launching:
        """A context for what tells gloo to begin ``place``, which may find that a rank has closed its connection."""
        return Launching(self, place)

    def explained(self, place: Place, error: RuntimeError, seconds: float) -> FSDPError:
        """What to raise where gloo has failed after ``seconds`` of waiting. The line is of no use any more."""
        watch, found = self._watch, None
        if watch is not None:
            timed_out = seconds >= self._timeout.total_seconds()
            found = watch.find(place, f"After {seconds:.1f} s gloo says: {error}", timed_out=timed_out)
        if found is None:
            found = PeerError(
                f"{place} failed after {seconds:.1f} s of waiting: a rank is gone, or did not answer within the "
                f"timeout of the process group. Look at the output of each for the first error. Gloo says: {error}"
            )
        self._give_up(str(found).split("\n", 1)[0])
        trace.tell_fault(found, str(place), self._position_of(place))
        return found

    def _give_up(self, reason: str) -> None:
        """Ends all waits on this line, for ever: gloo closes a connection on which a wait has timed out."""
        self._broken = self._broken or reason
        self._close()

    def _close(self) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    self.backend.recv([torch.empty(1)], peer, _CLOSE).wait(timedelta(milliseconds=1))

    def _compare(self, own: int) -> list[int]:
        sent = torch.tensor([own])
        received = torch.empty(self.size, dtype=torch.int64)
        self._swap(sent, list(received.split(1)), _NUMBER)
        received[self.rank] = own
        return cast(list[int], received.tolist())

    def _tell(self, own: str) -> dict[int, str]:
        text = own.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        sent = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self._swap(sent, received, _TEXT)
        received[self.rank] = sent
        texts = (bytes(each.numpy()).rstrip(b"\0").decode(errors="replace") for each in received)
        return dict(zip(self.ranks, texts, strict=True))

    def _swap(self, sent: torch.Tensor, received: Sequence[torch.Tensor], tag: int) -> None:
        place = Place(self.ranks, self._agreement.number, self._label, self._place_name)
        with self.launching(place):
            works = exchange(self.backend, self.rank, [sent] * self.size, received, tag)
        self.wait(place, works)


@dataclass(frozen=True, slots=True)
class Launching:
    """While gloo is told to begin an operation; its errors become ours."""

    line: Line
    place: Place

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """
        Raises:
            PeerError: a rank failed, or is gone.
            DivergenceError: a rank is about to do something else.
        """
        if isinstance(error, RuntimeError):
            raise self.line.explained(self.place, error, 0.0) from error


@dataclass(frozen=True, slots=True)
class Arrival:
    """Works of gloo, and what is left to do once they are done."""

    line: Line
    place: Place
    works: Sequence[Work]
    finish: Callable[[], None] = _nothing

    def wait(self) -> None:
        """
        Raises:
            PeerError: a rank failed, is gone, or did not come within the timeout of the process group.
            DivergenceError: a rank is about to do something else.
        """
        self.line.wait(self.place, self.works)
        self.finish()


class GlooCommunicator:
    """Collectives of CPU tensors over gloo. Final.

    Args:
        group: the ranks.
        line: of this group. All its communicators on one rank share it.
    """

    aliases = False
    averages = False
    """Gloo sums and divides in one pass more; a division folded into the shard-sized result is cheaper."""
    widens = True
    whole_bytes = NEVER_DIRECT
    """The sum of gloo's all-reduce is not in the order of ranks."""
    batch_bytes = 1 << 21
    """``benchmarks/group_transfers.py``: with a quarter of that, groups of 2 to 4 MiB take up to twice the time."""

    def __init__(self, group: dist.ProcessGroup, line: Line) -> None:
        self.group = group
        self.rank, self.size = line.rank, line.size
        self.direct_bytes = line.size * _DIRECT_PART_BYTES
        self._line = line

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    def __eq__(self, other: object) -> bool:
        """Whether what goes over both may go in one launch."""
        return isinstance(other, GlooCommunicator) and self.group is other.group

    def __hash__(self) -> int:
        return id(self.group)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def with_pool(self, pooled: bool) -> GlooCommunicator:
        return self

    def all_gather(self, transfers: Sequence[Transfer], label: str = "all-gather") -> Work:
        place = self._line.begin(label, transfers)
        backend, rank = self._line.backend, self.rank
        works: list[Work] = []
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        with self._line.launching(place):
            for output, shard in transfers:
                if shard.nbytes < _DIRECT_PART_BYTES:
                    works.append(backend._allgather_base(output, shard))
                    continue
                places = output.view(-1, shard.numel()).unbind(0)
                works += exchange(backend, rank, [shard] * len(places), places, _DATA)
                own.append((places[rank], shard))
        for destination, shard in own:  # while the wire works
            if destination.data_ptr() != shard.data_ptr():
                destination.copy_(shard)
        return Arrival(self._line, place, works)

    def reduce_scatter(self, transfers: Sequence[Transfer], op: ReduceOp, label: str = "reduce-scatter") -> Work:
        _check_sum(op)
        place = self._line.begin(label, transfers)
        backend, rank, size = self._line.backend, self.rank, self.size
        works: list[Work] = []
        sums: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
        small = [transfer for transfer in transfers if transfer.input.nbytes < self.direct_bytes]
        for dtype in dict.fromkeys(transfer.input.dtype for transfer in small):
            alike = [transfer for transfer in small if transfer.input.dtype == dtype]
            rows = [full.view(size, -1) for _, full in alike]
            sent = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
            received = torch.empty_like(sent)
            with self._line.launching(place):
                works.append(_all_to_all(backend, received.view(-1), sent.view(-1)))
            columns = torch.split_with_sizes(received, [row.size(1) for row in rows], dim=1)
            sums += [(output, column.unbind(0)) for (output, _), column in zip(alike, columns, strict=True)]
        for output, full in transfers:
            if full.nbytes < self.direct_bytes:
                continue
            parts = list(full.view(size, -1).unbind(0))
            summands = list(full.new_empty(size - 1, output.numel()).unbind(0))
            summands.insert(rank, parts[rank])
            with self._line.launching(place):
                works += exchange(backend, rank, parts, summands, _DATA)
            sums.append((output, summands))

        def finish() -> None:
            for output, summands in sums:
                add_up(summands, output)

        return Arrival(self._line, place, works, finish)

    def all_to_all(self, transfers: Sequence[Transfer], label: str = "all-to-all") -> Work:
        place = self._line.begin(label, transfers)
        with self._line.launching(place):
            works = [_all_to_all(self._line.backend, output, full) for output, full in transfers]
        return Arrival(self._line, place, works)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp, label: str = "all-reduce") -> Work:
        _check_sum(op)
        place = self._line.begin(label, [Transfer(tensor, tensor) for tensor in tensors])
        with self._line.launching(place):
            works = [self._line.backend.allreduce([tensor]) for tensor in tensors]
        return Arrival(self._line, place, cast(list[Work], works))


def _check_sum(op: ReduceOp) -> None:
    if op is not ReduceOp.SUM:
        raise UnsupportedError("a communicator over gloo does not average: ask its `averages`, or sum and divide.")


def _all_to_all(backend: Backend, received: torch.Tensor, sent: torch.Tensor) -> Work:
    work: Work = backend.alltoall_base(received, sent, [], [])
    return work


def exchange(
    backend: Backend, rank: int, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], tag: int
) -> list[Work]:
    """Each rank's part, straight from where it lies to its place; peers in turn, so that none is everyone's first."""
    size = len(sent)
    works: list[Work] = []
    for distance in range(1, size):
        source, target = (rank - distance) % size, (rank + distance) % size
        works.append(backend.recv([received[source]], source, tag))
        works.append(backend.send([sent[target]], target, tag))
    return works
