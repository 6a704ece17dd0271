"""Sends whole tensors to the ranks that compute with them, and the results back to the ranks that hold their shards.

For a bucket of units, one all-to-all sends the shards of all inputs to the owners, and one more sends the shards of all
outputs back. The next bucket's inputs and the last one's outputs are on their way while a bucket is computed.

Invariant: all ranks of an exchange have the same units in the same order, so they assign the same owners and cut the
same buckets. Every rank computes its own part of the messages' layout, and nothing of it is sent. What ranks may
disagree on is a word before each rank's part of a message: which units have a task in this step, and which unit failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_fsdp._core.layout import ALIGNMENT_BYTES, aligned_bytes
from composable_fsdp._core.memory import current_device
from composable_fsdp._core.params import find_parameter
from composable_fsdp._extents import Box
from composable_fsdp.errors import DivergenceError, PeerError
from composable_fsdp.optim._owner_plan import assign_owners, cut_buckets, message_limit, replicas_together
from composable_fsdp.optim._owner_units import Coordinate, Slot, Unit, tiling_of

_MOST_PLANS = 256
"""With more lists of parameters that get gradients together, plans are made again."""
_WORD = 8
"""The bytes of a word. It takes ``ALIGNMENT_BYTES``, at a multiple of which every piece begins."""


class Task(Protocol):
    """The work on one unit in one step: its inputs, its computation and its outputs."""

    def load(self, slot: int, box: Box) -> torch.Tensor:
        """Return the block ``box`` of this rank's part of input ``slot``, on any device.

        It is called once for every box in every step, on all ranks, also on those whose part nobody needs.
        """
        ...

    def compute(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the whole outputs for the whole ``inputs``, which it may change. It is called on the owner only."""
        ...

    def store(self, slot: int, box: Box, piece: torch.Tensor) -> None:
        """Take ``piece``, the block ``box`` of this rank's part of output ``slot``. Its memory is freed afterwards."""
        ...


@dataclass(frozen=True, eq=False)
class Members:
    """The ranks of an exchange, in the order of their process group, with their coordinates in the mesh.

    ``group`` is None for tensors that this rank has alone.
    """

    group: dist.ProcessGroup | None = None
    coordinates: tuple[Coordinate, ...] = ((),)
    index: int = 0
    device: torch.device = field(default=torch.device("cpu"))

    @property
    def own(self) -> Coordinate:
        return self.coordinates[self.index]

    def all_to_all(self, output: torch.Tensor, received: list[int], input: torch.Tensor, sent: list[int]) -> Any:
        """Launch an all-to-all of bytes, and return its work."""
        if self.group is None:
            output.copy_(input)
            return None
        return dist.all_to_all_single(output, input, received, sent, group=self.group, async_op=True)


class _Piece(NamedTuple):
    """A box of a slot of a unit, and where it begins in a message. ``start`` is -1 if it is not sent."""

    unit: int
    slot: int
    box: Box
    start: int
    dtype: torch.dtype

    def of(self, message: torch.Tensor) -> torch.Tensor:
        """Return its view in ``message``."""
        nbytes = prod(self.box.sizes) * self.dtype.itemsize
        return message.narrow(0, self.start, nbytes).view(self.dtype).view(self.box.sizes)


class _Message:
    """The layout of a message: the part of each rank, which is a word and pieces, and its bytes."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.splits: list[int] = []
        self.words: list[int] = []
        """The position of each rank's word, counted in words."""
        self.nbytes = 0

    def begin_part(self) -> None:
        """Begin the part of the next rank."""
        self.words.append(self.nbytes // _WORD)
        self.splits.append(ALIGNMENT_BYTES)
        self.nbytes += ALIGNMENT_BYTES

    def append(self, unit: int, number: int, slot: Slot, holder: Coordinate) -> None:
        """Append what the rank at ``holder`` holds of a slot to the part of the last rank that was begun."""
        for box in slot.boxes(holder):
            self.pieces.append(_Piece(unit, number, box, self.nbytes, slot.dtype))
            nbytes = aligned_bytes(prod(box.sizes) * slot.dtype.itemsize)
            self.splits[-1] += nbytes
            self.nbytes += nbytes

    def memory(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def fill_words(self, message: torch.Tensor, word: int) -> None:
        message.view(torch.int64)[self.words] = word

    def words_of(self, message: torch.Tensor) -> list[int]:
        """Return the word of each rank. The host waits for ``message``."""
        return cast("list[int]", message.view(torch.int64)[self.words].tolist())


class _Bucket:
    """The units that are exchanged together, and this rank's four messages."""

    def __init__(self, units: Sequence[Unit], owners: Sequence[int], indices: Sequence[int], members: Members) -> None:
        self.units = units
        own = members.own
        self.shards, self.owned, self.results, self.updates = _Message(), _Message(), _Message(), _Message()
        self.unsent: list[_Piece] = []
        of_owner: dict[int, list[int]] = {}
        for index in indices:
            of_owner.setdefault(owners[index], []).append(index)
        self.computed = of_owner.get(members.index, [])
        for rank, coordinate in enumerate(members.coordinates):
            for message in (self.shards, self.owned, self.results, self.updates):
                message.begin_part()
            for index in of_owner.get(rank, ()):
                for number, slot in enumerate(units[index].inputs):
                    if slot.comes_from(own, coordinate):
                        self.shards.append(index, number, slot, own)
                    else:
                        self.unsent += [_Piece(index, number, box, -1, slot.dtype) for box in slot.boxes(own)]
                for number, slot in enumerate(units[index].outputs):
                    self.updates.append(index, number, slot, own)
            for index in self.computed:
                for number, slot in enumerate(units[index].inputs):
                    if slot.comes_from(coordinate, own):
                        self.owned.append(index, number, slot, coordinate)
                for number, slot in enumerate(units[index].outputs):
                    self.results.append(index, number, slot, coordinate)
        self.parts = _by_unit(self.owned.pieces)
        self.answers = _by_unit(self.results.pieces)


def _by_unit(pieces: Sequence[_Piece]) -> dict[int, list[_Piece]]:
    found: dict[int, list[_Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.unit, []).append(piece)
    return found


class _Flight(NamedTuple):
    """A message on its way: the work, the received bytes, and the sent ones, which must live as long."""

    work: Any
    received: torch.Tensor
    sent: torch.Tensor

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


class Exchange:
    """The buckets of ``units`` over ``members``.

    Args:
        members: the ranks.
        units: the same ones in the same order on all of them.
        limit: the most bytes of the units in a message, except for a single unit.
        copies: the number of ranks that receive each output.
        owners: the owner of each unit, if they are not to be assigned by cost.
    """

    def __init__(
        self, members: Members, units: Sequence[Unit], limit: int, copies: int = 1, owners: Sequence[int] | None = None
    ) -> None:
        self.members, self.units, self.limit, self.copies = members, units, limit, copies
        costs = [unit.cost for unit in units]
        self.owners = assign_owners(costs, len(members.coordinates)) if owners is None else owners
        buckets = cut_buckets(costs, self.owners, lambda i: copies * units[i].largest, lambda i: units[i].held, limit)
        self.buckets = [_Bucket(units, self.owners, indices, members) for indices in buckets]

    def run(self, tasks: Sequence[Task | None]) -> None:
        """Do ``tasks``, one for each unit, or None for what is unchanged. All ranks must call it together.

        Raises:
            DivergenceError: ranks have tasks for different units. Raised on all ranks, before anything is computed.
            PeerError: an owner raised in ``compute``. Raised on all ranks; on the owner, from its own exception.
        """
        present = crc32(bytes(task is not None for task in tasks))
        flight = self._send_shards(self.buckets[0], tasks, present) if self.buckets else None
        returning: tuple[_Bucket, _Flight, Exception | None] | None = None  # the exception is of this rank as an owner
        for bucket, following in zip(self.buckets, [*self.buckets[1:], None], strict=True):
            assert flight is not None
            owned = flight.wait()
            if returning is None and any(word != present for word in bucket.owned.words_of(owned)):
                raise self._difference(tasks)
            flight = self._send_shards(following, tasks, present) if following is not None else None
            results = bucket.results.memory(self.members.device)
            failure = self._compute(bucket, tasks, owned, results)
            del owned
            if returning is not None:
                self._take(*returning, tasks, flight)
            returning = bucket, self._launch(results, bucket.results, bucket.updates), failure
            del results
        if returning is not None:
            self._take(*returning, tasks, None)

    def _send_shards(self, bucket: _Bucket, tasks: Sequence[Task | None], present: int) -> _Flight:
        message = bucket.shards.memory(self.members.device)
        bucket.shards.fill_words(message, present)
        for piece in (*bucket.unsent, *bucket.shards.pieces):
            if (task := tasks[piece.unit]) is not None:
                part = task.load(piece.slot, piece.box)
                if piece.start >= 0:
                    piece.of(message).copy_(part)
        return self._launch(message, bucket.shards, bucket.owned)

    def _compute(
        self, bucket: _Bucket, tasks: Sequence[Task | None], owned: torch.Tensor, results: torch.Tensor
    ) -> Exception | None:
        """Compute the units that this rank owns. An exception is returned, and its unit's number goes to all ranks."""
        bucket.results.fill_words(results, 0)
        for index in bucket.computed:
            try:
                if (task := tasks[index]) is not None:
                    _compute(bucket, index, task, owned, results)
            except Exception as error:  # noqa: PERF203 (of one unit)
                if self.members.group is None:
                    raise
                bucket.results.fill_words(results, index + 1)
                return error
        return None

    def _launch(self, message: torch.Tensor, sent: _Message, received: _Message) -> _Flight:
        memory = received.memory(self.members.device)
        return _Flight(self.members.all_to_all(memory, received.splits, message, sent.splits), memory, message)

    def _take(
        self,
        bucket: _Bucket,
        flight: _Flight,
        failure: Exception | None,
        tasks: Sequence[Task | None],
        following: _Flight | None,
    ) -> None:
        received = flight.wait()
        if any(failed := bucket.updates.words_of(received)):
            if following is not None:
                following.wait()
            raise self._failure(failed, failure) from failure
        for piece in bucket.updates.pieces:
            if (task := tasks[piece.unit]) is not None:
                task.store(piece.slot, piece.box, piece.of(received))

    def _difference(self, tasks: Sequence[Task | None]) -> DivergenceError:
        sets = self._gathered({index for index, task in enumerate(tasks) if task is not None})
        differing = sorted(set.union(*sets.values()) - set.intersection(*sets.values()))
        names = [f"{self.units[i].name} on ranks {[r for r in sets if i in sets[r]]} only" for i in differing]
        shown = ", ".join(names[:5] + ["..."] * (len(names) > 5))
        return DivergenceError(
            f"the ranks of a step have gradients of different parameters: {shown}. Give all ranks of a mesh "
            "gradients of the same parameters, zeros where there is none, before the step."
        )

    def _failure(self, failed: Sequence[int], own: Exception | None) -> PeerError:
        reasons = self._gathered(None if own is None else f"{type(own).__name__}: {own}")
        units = {rank: self.units[number - 1] for rank, number in zip(reasons, failed, strict=True) if number}
        who = "; ".join(f"rank {rank} raised {reasons[rank]} in the update of {units[rank].name}" for rank in units)
        return PeerError(
            f"an owner failed: {who}. Other parameters may be updated already: go on from a checkpoint.",
            units if own is None else (),  # at its end a rank waits for these ranks
        )

    def _gathered(self, value: Any) -> dict[int, Any]:
        """Return the ``value`` of each member, by global rank, in the order of the members."""
        values: list[Any] = [None] * len(self.members.coordinates)
        dist.all_gather_object(values, value, group=self.members.group)
        group = cast(dist.ProcessGroup, self.members.group)
        return dict(zip(dist.get_process_group_ranks(group), values, strict=True))


def _compute(bucket: _Bucket, index: int, task: Task, owned: torch.Tensor, results: torch.Tensor) -> None:
    slots = bucket.units[index].inputs
    wholes = [torch.empty(slot.sizes, dtype=slot.dtype, device=owned.device) for slot in slots]
    for piece in bucket.parts.get(index, ()):
        wholes[piece.slot][piece.box.slices].copy_(piece.of(owned))
    outputs = task.compute(wholes)
    for piece in bucket.answers.get(index, ()):
        piece.of(results).copy_(outputs[piece.slot][piece.box.slices])


# -- the ranks of an exchange


def is_planned(tensor: torch.Tensor) -> bool:
    """Return whether the parameter ``tensor`` may have a gradient, and this rank a part of it, if only an empty one.

    It is the same on all ranks, which a missing gradient need not be.
    """
    is_here = not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None
    return is_here and (tensor.requires_grad or tensor.grad is not None)


def title_of(tensor: torch.Tensor) -> str:
    """Return the name of a sharded parameter for errors."""
    found = find_parameter(tensor)
    return f"a parameter of shape {tuple(tensor.shape)}" if found is None else repr(found.name)


def make_exchanges(
    tensors: Sequence[torch.Tensor], units_of: Callable[[int], Sequence[Unit]], bucket_bytes: int
) -> list[tuple[Exchange, list[tuple[int, int]]]]:
    """Return the exchanges of the units of ``tensors``, with the tensor and the number among its units of each unit.

    Tensors on equal meshes that are cut on the same axes are exchanged together. Where several ranks hold the same
    shards, as with hybrid sharding, as many of these replicas share the work as there is room for in a message.

    Args:
        tensors: parameters with a part on this rank. All ranks have the same in the same order.
        units_of: a function from the index of a tensor to its units.
        bucket_bytes: two times these bytes hold the messages that live at once, unless a matrix is larger.
    """
    by_ranks: dict[Any, list[tuple[int, int]]] = {}
    units: dict[tuple[int, int], Unit] = {}
    for index, tensor in enumerate(tensors):
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        key = mesh, tiling_of(tensor).uncut, tensor.device if mesh is None else None
        for number, unit in enumerate(units_of(index)):
            units[index, number] = unit
            by_ranks.setdefault(key, []).append((index, number))
    found = []
    for (mesh, uncut, device), keys in by_ranks.items():
        of_mesh = [units[key] for key in keys]
        largest = max(unit.largest for unit in of_mesh)
        limit = message_limit(bucket_bytes, largest, ALIGNMENT_BYTES * (1 if mesh is None else mesh.size()))
        if mesh is None:
            members, copies = Members(device=device), 1
        else:
            copies = replicas_together(prod(mesh.size(axis) for axis in uncut), largest, limit)
            members = _members(mesh, uncut, copies)
        found.append((Exchange(members, of_mesh, limit, copies), keys))
    # The most ranks first, so that all of them learn of an error before some go on without those that raise it.
    return sorted(found, key=lambda each: -len(each[0].members.coordinates))


def _members(mesh: DeviceMesh, uncut: tuple[int, ...], copies: int) -> Members:
    """Return the ranks that share the work with this one: those of ``copies`` neighbouring replicas."""
    own = mesh.get_coordinate()
    assert own is not None
    sizes = [mesh.size(axis) for axis in uncut]

    def team(coordinate: Sequence[int]) -> int:
        replica = 0
        for axis, size in zip(uncut, sizes, strict=True):
            replica = replica * size + coordinate[axis]
        return replica // copies

    everywhere = zip(mesh.mesh.flatten().tolist(), product(*map(range, mesh.mesh.shape)), strict=True)
    places = {rank: at for rank, at in everywhere if team(at) == team(own)}
    group = _group_of(mesh, list(places))
    if group is None:
        return Members(None, (tuple(own),), 0, current_device(mesh.device_type))
    ranks = dist.get_process_group_ranks(group)
    coordinates = tuple(places[rank] for rank in ranks)
    return Members(group, coordinates, dist.get_rank(group), current_device(mesh.device_type))


class OwnerPlans:
    """The exchanges of an optimizer's steps, planned once for each list of parameters that are stepped together.

    With ``offload_optimizer``, a step has several lists. For ``bucket_bytes`` see :func:`make_exchanges`.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._plans: dict[tuple[int, ...], tuple[list[Any], list[tuple[Exchange, list[tuple[int, int]]]]]] = {}
        """By the ids of their parameters, which are kept, with their meshes and forms, so that ids are not reused."""

    def of(
        self,
        parameters: Sequence[torch.Tensor],
        units_of: Callable[[], Sequence[Sequence[Unit]]],
        forms: Sequence[Any] = (),
    ) -> list[tuple[Exchange, list[tuple[int, int]]]]:
        """Return the exchanges of ``parameters``, planned again if their meshes or ``forms`` have changed.

        Args:
            parameters: as for :func:`make_exchanges`.
            units_of: returns the units of each parameter.
            forms: what units depend on beside parameters and meshes.
        """
        ids = tuple(map(id, parameters))
        meshes = [p.device_mesh if isinstance(p, DTensor) else None for p in parameters]
        key = [list(map(id, meshes)), list(forms)]
        known, exchanges = self._plans.get(ids, ([], []))
        if known[:2] != key:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            exchanges = make_exchanges(parameters, units_of().__getitem__, self.bucket_bytes)
            self._plans[ids] = [*key, list(parameters), meshes], exchanges
        return exchanges


_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""The process groups that were made for exchanges, by the default process group and their ranks."""


def _group_of(mesh: DeviceMesh, ranks: list[int]) -> dist.ProcessGroup | None:
    """Return the process group of ``ranks``: that of a mesh axis, the default one, or a new one. None for one rank."""
    if len(ranks) == 1:
        return None
    wanted = sorted(ranks)
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    for group in (*(mesh.get_group(axis) for axis in range(mesh.ndim)), world):
        if sorted(dist.get_process_group_ranks(group)) == wanted:
            return group
    known, key = _groups.setdefault(world, {}), tuple(wanted)
    if key not in known:
        known[key] = dist.new_group(wanted, use_local_synchronization=True, group_desc="composable_fsdp owners")
    return cast(dist.ProcessGroup, known[key])
