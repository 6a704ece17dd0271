"""Sends whole tensors to the ranks that compute with them, and the results back to the ranks that hold their shards.

For a bucket of units, one all-to-all sends the shards of all inputs to the owners, and one more sends the shards of all
outputs back. The next bucket's inputs and the last one's outputs are on their way while a bucket is computed.

Invariant: all ranks of an exchange have the same units in the same order, so they assign the same owners and cut the
same buckets. Every rank computes its own part of the messages' layout, and nothing of it is sent. What ranks may
disagree on is a word before each rank's part of a message: which units have a task in this step, and which unit failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import prod
from operator import is_
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
from composable_fsdp.optim._owner_plan import assign_owners, cut_buckets, message_limit
from composable_fsdp.optim._owner_units import Coordinate, Slot, Unit, tiling_of

_WORD = 8
"""The bytes of a word. It takes ``ALIGNMENT_BYTES``, at a multiple of which every piece begins."""


class Task(Protocol):
    """The work on one unit in one step: its inputs, its computation and its outputs."""

    def load(self, slot: int, box: Box) -> torch.Tensor:
        """Return the block ``box`` of this rank's part of input ``slot``, on any device."""
        ...

    def compute(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the whole outputs for the whole ``inputs``, which it may change. It is called on the owner only."""
        ...

    def store(self, slot: int, box: Box, piece: torch.Tensor) -> None:
        """Take ``piece``, the block ``box`` of this rank's part of output ``slot``. Its memory is freed afterwards."""
        ...


Tasks = Sequence[Task | None]
"""The task of each unit, or None for what is unchanged in a step."""


class Members(NamedTuple):
    """The ranks of an exchange, in the order of their process group, with their coordinates in the mesh.

    ``group`` is None for tensors that this rank has alone.
    """

    device: torch.device
    group: dist.ProcessGroup | None = None
    coordinates: tuple[Coordinate, ...] = ((),)
    position: int = 0


class _Piece(NamedTuple):
    """A box of a slot of a unit, and where it begins in a message."""

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
        self.pieces: dict[int, list[_Piece]] = {}
        """By unit."""
        self.splits: list[int] = []
        self.words: list[int] = []
        """The position of each rank's word, counted in words."""
        self.nbytes = 0

    def begin_part(self) -> None:
        """Begin the part of the next rank."""
        self.words.append(self.nbytes // _WORD)
        self.splits.append(ALIGNMENT_BYTES)
        self.nbytes += ALIGNMENT_BYTES

    def append(self, unit: int, slots: Iterable[tuple[int, Slot]], holder: Coordinate) -> None:
        """Append what the rank at ``holder`` holds of ``slots`` to the part of the last rank that was begun."""
        for number, slot in slots:
            for box in slot.boxes(holder):
                self.pieces.setdefault(unit, []).append(_Piece(number, box, self.nbytes, slot.dtype))
                nbytes = aligned_bytes(prod(box.sizes) * slot.dtype.itemsize)
                self.splits[-1] += nbytes
                self.nbytes += nbytes

    def begin(self, word: int, device: torch.device) -> torch.Tensor:
        """Return new memory for the message, with ``word`` in the part of each rank."""
        message = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        message.view(torch.int64)[self.words] = word
        return message

    def words_of(self, message: torch.Tensor) -> list[int]:
        """Return the word of each rank. The host waits for ``message``."""
        return cast("list[int]", message.view(torch.int64)[self.words].tolist())


class _Bucket:
    """The units that are exchanged together, and this rank's four messages."""

    def __init__(self, units: Sequence[Unit], owners: Sequence[int], indices: Sequence[int], members: Members) -> None:
        own = members.coordinates[members.position]
        self.shards, self.owned, self.results, self.updates = (_Message() for _ in range(4))
        self.computed = [index for index in indices if owners[index] == members.position]
        for rank, coordinate in enumerate(members.coordinates):
            for message in (self.shards, self.owned, self.results, self.updates):
                message.begin_part()
            for index in (index for index in indices if owners[index] == rank):
                inputs = [each for each in enumerate(units[index].inputs) if each[1].comes_from(own, coordinate)]
                self.shards.append(index, inputs, own)
                self.updates.append(index, enumerate(units[index].outputs), own)
            for index in self.computed:
                inputs = [each for each in enumerate(units[index].inputs) if each[1].comes_from(coordinate, own)]
                self.owned.append(index, inputs, coordinate)
                self.results.append(index, enumerate(units[index].outputs), coordinate)


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
        buckets = cut_buckets(costs, self.owners, [copies * unit.largest for unit in units], limit)
        self.buckets = [_Bucket(units, self.owners, indices, members) for indices in buckets]

    def run(self, tasks: Tasks) -> None:
        """Do ``tasks``, one for each unit. All ranks must call it together.

        Raises:
            DivergenceError: ranks have tasks for different units. Raised on all ranks, before anything is computed.
            PeerError: an owner raised in ``compute``. Raised on all ranks; on the owner, from its own exception.
        """
        present = crc32(bytes(task is not None for task in tasks))
        flight: _Flight | None = self._send_shards(self.buckets[0], tasks, present)
        returning: tuple[_Bucket, _Flight, Exception | None] | None = None  # the exception is of this rank as an owner
        for bucket, following in zip(self.buckets, [*self.buckets[1:], None], strict=True):
            assert flight is not None
            owned = flight.wait()
            if returning is None and any(word != present for word in bucket.owned.words_of(owned)):
                raise self._difference(tasks)
            flight = None if following is None else self._send_shards(following, tasks, present)
            results = bucket.results.begin(0, self.members.device)
            failure = self._compute(bucket, tasks, owned, results)
            del owned
            if returning is not None:
                self._take(*returning, tasks, flight)
            returning = bucket, self._launch(results, bucket.results, bucket.updates), failure
            del results
        if returning is not None:
            self._take(*returning, tasks, None)

    def _send_shards(self, bucket: _Bucket, tasks: Tasks, present: int) -> _Flight:
        message = bucket.shards.begin(present, self.members.device)
        for unit, pieces in bucket.shards.pieces.items():
            if (task := tasks[unit]) is not None:
                for piece in pieces:
                    piece.of(message).copy_(task.load(piece.slot, piece.box))
        return self._launch(message, bucket.shards, bucket.owned)

    def _compute(self, bucket: _Bucket, tasks: Tasks, owned: torch.Tensor, results: torch.Tensor) -> Exception | None:
        """Compute the units that this rank owns. An exception is returned, and its unit's number goes to all ranks."""
        for index in bucket.computed:
            try:
                if (task := tasks[index]) is not None:
                    _compute(bucket, index, self.units[index].inputs, task, owned, results)
            except Exception as error:  # noqa: PERF203 (of one unit)
                if self.members.group is None:
                    raise
                results.view(torch.int64)[bucket.results.words] = index + 1
                return error
        return None

    def _launch(self, message: torch.Tensor, sent: _Message, received: _Message) -> _Flight:
        group = self.members.group
        if group is None:
            return _Flight(None, message, message)
        memory = message.new_empty(received.nbytes)
        work = dist.all_to_all_single(memory, message, received.splits, sent.splits, group=group, async_op=True)
        return _Flight(work, memory, message)

    def _take(
        self, bucket: _Bucket, flight: _Flight, failure: Exception | None, tasks: Tasks, following: _Flight | None
    ) -> None:
        received = flight.wait()
        if any(failed := bucket.updates.words_of(received)):
            if following is not None:
                following.wait()
            raise self._failure(failed, failure) from failure
        for unit, pieces in bucket.updates.pieces.items():
            if (task := tasks[unit]) is not None:
                for piece in pieces:
                    task.store(piece.slot, piece.box, piece.of(received))

    def _difference(self, tasks: Tasks) -> DivergenceError:
        sets = self.gathered({index for index, task in enumerate(tasks) if task is not None})
        differing = sorted(set.union(*sets.values()) - set.intersection(*sets.values()))
        names = [f"{self.units[i].name} on ranks {[r for r in sets if i in sets[r]]} only" for i in differing]
        shown = ", ".join(names[:5] + ["..."] * (len(names) > 5))
        return DivergenceError(
            f"the ranks of a step have gradients of different parameters: {shown}. Give all ranks of a mesh "
            "gradients of the same parameters, zeros where there is none, before the step."
        )

    def _failure(self, failed: Sequence[int], own: Exception | None) -> PeerError:
        reasons = self.gathered(None if own is None else f"{type(own).__name__}: {own}")
        units = {rank: self.units[number - 1] for rank, number in zip(reasons, failed, strict=True) if number}
        who = "; ".join(f"rank {rank} raised {reasons[rank]} in the update of {units[rank].name}" for rank in units)
        return PeerError(
            f"an owner failed: {who}. Other parameters may be updated already: go on from a checkpoint.",
            units if own is None else (),  # at its end a rank waits for these ranks
        )

    def gathered(self, value: Any) -> dict[int, Any]:
        """Return the ``value`` of each member, by global rank, in the order of the members."""
        group = self.members.group
        if group is None:
            return {0: value}
        values: list[Any] = [None] * len(self.members.coordinates)
        dist.all_gather_object(values, value, group=group)
        return dict(zip(dist.get_process_group_ranks(group), values, strict=True))


def _compute(
    bucket: _Bucket, index: int, slots: Sequence[Slot], task: Task, owned: torch.Tensor, results: torch.Tensor
) -> None:
    wholes = [torch.empty(slot.sizes, dtype=slot.dtype, device=owned.device) for slot in slots]
    for piece in bucket.owned.pieces.get(index, ()):
        wholes[piece.slot][piece.box.slices].copy_(piece.of(owned))
    outputs = task.compute(wholes)
    for piece in bucket.results.pieces.get(index, ()):
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


Keys = list[tuple[int, int]]
"""The units of an exchange: the index of a tensor, and the number among its units."""


def make_exchanges(
    tensors: Sequence[torch.Tensor], units_of: Sequence[Sequence[Unit]], bucket_bytes: int
) -> list[tuple[Exchange, Keys]]:
    """Return the exchanges of the units of ``tensors``.

    Tensors on equal meshes that are cut on the same axes are exchanged together. Where several ranks hold the same
    shards, as with hybrid sharding, as many of these replicas share the work as there is room for in a message.

    Args:
        tensors: parameters with a part on this rank. All ranks have the same in the same order.
        units_of: the units of each tensor.
        bucket_bytes: two times these bytes hold the messages that live at once, unless a matrix is larger.
    """
    by_ranks: dict[Any, Keys] = {}
    for index, tensor in enumerate(tensors):
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        key = mesh, tiling_of(tensor).axes, tensor.device if mesh is None else None
        for number in range(len(units_of[index])):  # a stack may have no matrices
            by_ranks.setdefault(key, []).append((index, number))
    found = []
    for (mesh, axes, device), keys in by_ranks.items():
        units = [units_of[index][number] for index, number in keys]
        largest, copies = max(unit.largest for unit in units), 1
        limit = message_limit(bucket_bytes, largest)
        if mesh is not None:
            shards = prod(mesh.size(axis) for axis in axes)
            replicas = mesh.size() // shards
            # An owner sends the update of a matrix to each replica that shares the work.
            fitting = [n for n in range(1, replicas + 1) if replicas % n == 0 and n * largest <= limit]
            copies = max(fitting, default=1)
            members = _members(mesh, axes, copies * shards)
        else:
            members = Members(device)
        found.append((Exchange(members, units, limit, copies), keys))
    # The most ranks first, so that all of them learn of an error before some go on without those that raise it.
    return sorted(found, key=lambda each: -len(each[0].members.coordinates))


def _members(mesh: DeviceMesh, axes: tuple[int, ...], size: int) -> Members:
    """Return the ``size`` ranks that share the work with this one: those of neighbouring replicas."""
    grid: torch.Tensor = mesh.mesh
    replicas_first = grid.permute([axis for axis in range(mesh.ndim) if axis not in axes] + list(axes))
    places = dict(zip(grid.flatten().tolist(), product(*map(range, grid.shape)), strict=True))
    own, device = places[dist.get_rank()], current_device(mesh.device_type)
    teams: list[list[int]] = replicas_first.reshape(-1, size).tolist()
    group = _group_of(mesh, next(team for team in teams if dist.get_rank() in team))
    if group is None:
        return Members(device, None, (own,))
    coordinates = tuple(places[rank] for rank in dist.get_process_group_ranks(group))
    return Members(device, group, coordinates, dist.get_rank(group))


class OwnerPlans:
    """The exchanges of an optimizer's steps. For ``bucket_bytes`` see :func:`make_exchanges`."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._planned: list[Any] = []
        """The parameters of the last step with their meshes. They are kept, so that no new one is taken for one."""
        self._forms: list[Any] = []
        self._exchanges: list[tuple[Exchange, Keys]] = []

    def of(
        self,
        parameters: Sequence[torch.Tensor],
        units_of: Callable[[], Sequence[Sequence[Unit]]],
        forms: Sequence[Any] = (),
    ) -> list[tuple[Exchange, Keys]]:
        """Return the exchanges of ``parameters``, planned again if they, their meshes or ``forms`` have changed.

        Args:
            parameters: as for :func:`make_exchanges`.
            units_of: returns the units of each parameter.
            forms: what units depend on beside parameters and meshes.
        """
        planned = [*parameters, *(p.device_mesh if isinstance(p, DTensor) else None for p in parameters)]
        is_same = len(planned) == len(self._planned) and all(map(is_, planned, self._planned))
        if not is_same or list(forms) != self._forms:
            self._exchanges = make_exchanges(parameters, units_of(), self.bucket_bytes)
            self._planned, self._forms = planned, list(forms)
        return self._exchanges


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
