"""Simulation of all ranks of an axis in one thread, to test how communicators are used. The simulated ranks take turns.
Each launches its collectives and continues; data move when the last rank has launched the same collective. What would
hang or corrupt data on real ranks is an error here, which names the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from composable_fsdp.errors import ConfigurationError, UnsupportedError
from composable_fsdp.plugins import SUM, Collective, ReduceOp, Traits, Transfer
from tests._internals import format_ranks

_TRAITS = {"averages": True, "coalesces": True, "zero_copy_min_bytes": 0}


class DeadlockError(AssertionError):
    """A rank waits for a collective that other ranks have not launched. Real ranks would hang."""


class MismatchError(AssertionError):
    """Ranks launched different collectives at the same position. Real ranks would hang or corrupt each other's data."""


class _Size(NamedTuple):
    """The dtype and the numbers of elements of one transfer, which ranks must agree on."""

    dtype: torch.dtype
    input: int
    output: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.input} -> {self.output}"


class _Signature(NamedTuple):
    """The properties of a collective that all ranks must agree on."""

    kind: Collective
    op: ReduceOp | None
    sizes: tuple[_Size, ...]

    def __str__(self) -> str:
        operation = f"{self.op.value}, " if self.op else ""
        transfers = f"{len(self.sizes)} transfer{'s'[: len(self.sizes) != 1]}: {', '.join(map(str, self.sizes))}"
        return f"{self.kind.value}({operation}{transfers if self.sizes else 'nothing'})"


class _Collective:
    """The n-th collective of every rank. Invariant: ``transfers`` is empty once the data have moved."""

    def __init__(self, number: int, signature: _Signature) -> None:
        self.number = number
        self.signature = signature
        self.arrived: set[int] = set()
        self.transfers: dict[int, tuple[Transfer, ...]] = {}


@dataclass(frozen=True, slots=True)
class FakeWork:
    """One rank's handle of a launched collective."""

    _world: FakeWorld
    _collective: _Collective
    _rank: int

    def wait(self) -> None:
        """Raise :class:`DeadlockError` if some ranks have not launched the collective. The text names them."""
        collective = self._collective
        if len(collective.arrived) == self._world.size or not collective.signature.sizes:
            return
        missing = set(range(self._world.size)) - collective.arrived
        raise DeadlockError(
            f"rank {self._rank} waits for its collective {collective.number}, {collective.signature}, which "
            f"{format_ranks(missing)} of {self._world.size} did not launch. Real ranks would wait for ever. Let every "
            "simulated rank launch before one of them waits."
        )


class FakeWorld:
    """The ranks of one mesh axis, simulated. A reduction adds in rank order. Floats narrower than fp32 are added in
    fp32 and rounded once at the end, everything else in its own dtype. Data are written below autograd, so version
    counters do not change. Memory does not grow with the square of ``size``: in addition to the callers' tensors, one
    full tensor exists at a time."""

    def __init__(self, size: int, **traits: Any) -> None:
        """Create a world of ``size`` ranks whose communicators have ``traits`` besides averages and coalescing."""
        if size < 1:
            raise ConfigurationError(f"A world has at least one rank, not {size}.")
        self.size = size
        self.traits = Traits(**_TRAITS | traits)
        self._launched = [0] * size
        self._open: dict[int, _Collective] = {}

    def communicator(self, rank: int) -> FakeCommunicator:
        """Return the communicator of ``rank``. All communicators of a rank share one sequence of collectives."""
        if not 0 <= rank < self.size:
            raise ConfigurationError(f"rank {rank} is not in a world of {self.size}: use 0 to {self.size - 1}.")
        return FakeCommunicator(self, rank)

    def _launch(self, rank: int, signature: _Signature, transfers: tuple[Transfer, ...]) -> FakeWork:
        number = self._launched[rank]
        collective = self._open.setdefault(number, _Collective(number, signature))
        if signature != collective.signature:
            raise MismatchError(
                f"ranks disagree on their collective {number} (the first is 0):\n"
                f"  {format_ranks(collective.arrived)}: {collective.signature}\n"
                f"  {format_ranks([rank])}: {signature}"
            )
        self._launched[rank] += 1
        collective.arrived.add(rank)
        collective.transfers[rank] = transfers
        if len(collective.arrived) == self.size:
            del self._open[number]
            in_order = [collective.transfers[r] for r in range(self.size)]
            collective.transfers.clear()
            for of_ranks in zip(*in_order, strict=True):
                results = _results(signature.kind, signature.op, [each.input.data for each in of_ranks])
                for each, result in zip(of_ranks, results, strict=True):
                    each.output.data.copy_(result)
        return FakeWork(self, collective, rank)


@dataclass(frozen=True, slots=True)
class FakeCommunicator:
    """The communicator of one rank, made by :meth:`FakeWorld.communicator`. Every method raises ``ConfigurationError``
    for tensors that the ``Communicator`` protocol does not allow, ``UnsupportedError`` for an average that the world
    does not support, and :class:`MismatchError` if another rank launched something else at the same position."""

    world: FakeWorld
    rank: int

    size = property(attrgetter("world.size"))
    traits = property(attrgetter("world.traits"))

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def launch(self, kind: Collective, transfers: Sequence[Transfer], label: str = "", op: ReduceOp = SUM) -> FakeWork:
        input_size = 1 if kind in (Collective.ALL_GATHER, Collective.ALL_REDUCE) else self.size
        output_size = 1 if kind in (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE) else self.size
        for index, transfer in enumerate(transfers):
            problem = _problem(transfer, input_size, output_size)
            if problem:
                raise ConfigurationError(f"rank {self.rank}, {kind.value}, transfer {index}: {problem}")
        sizes = tuple(_Size(t.input.dtype, t.input.numel(), t.output.numel()) for t in transfers)
        if op is ReduceOp.AVERAGE and not self.traits.averages:
            raise UnsupportedError(
                f"rank {self.rank}, {kind.value}: this world does not average. Ask for its traits first, or sum and "
                "divide."
            )
        for dtype in [size.dtype for size in sizes if op is ReduceOp.AVERAGE]:
            if not (dtype.is_floating_point or dtype.is_complex):
                raise UnsupportedError(f"rank {self.rank}, {kind.value}: {dtype} has no average. Use ReduceOp.SUM.")
        reduces = kind in (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
        return self.world._launch(self.rank, _Signature(kind, op if reduces else None, sizes), tuple(transfers))


def _problem(transfer: Transfer, input_size: int, output_size: int) -> str:
    """Return how a transfer violates the ``Communicator`` protocol, or an empty text."""
    output, input = transfer
    for name, tensor in transfer._asdict().items():
        if tensor.dim() != 1 or not tensor.is_contiguous():
            shape = f"of shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            return f"{name} must be 1-d and contiguous, not {shape}."
    if output.dtype != input.dtype:
        return f"output is {output.dtype} and input {input.dtype}. Cast before you send."
    if output.numel() * input_size != input.numel() * output_size:
        must = f"they must be as {output_size} to {input_size}"
        return f"output has {output.numel()} elements and input {input.numel()}, but {must}."
    if output.numel() % output_size:
        return f"{output.numel()} elements cannot be cut in {output_size} equal parts."
    return ""


def _results(kind: Collective, op: ReduceOp | None, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the output of each rank, in memory of its own: inputs may be views of outputs."""
    size = len(inputs)
    if kind is Collective.ALL_GATHER:
        return [torch.cat(inputs)] * size
    if kind is Collective.ALL_TO_ALL:
        return [torch.cat(received) for received in zip(*(sent.chunk(size) for sent in inputs), strict=True)]
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize else dtype
    total = inputs[0].to(wide, copy=True)
    for each in inputs[1:]:
        total += each.to(wide)
    if op is ReduceOp.AVERAGE:
        total = total / size
    return [total] * size if kind is Collective.ALL_REDUCE else total.chunk(size)
