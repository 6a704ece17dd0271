"""One load of a state dict: match, exchange, refuse alike, apply. Models, optimizers and averages share it.

torch's ``torch.distributed.checkpoint.state_dict`` does not serve: placements cannot describe every uneven shard of a
tensor-parallel one, and a rank that finds an error there does not tell the others, which load. Its functions for
optimizers make a step if there is no state (``test_checkpoint_of_torch.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_fsdp._api.extents import has_own_memory
from composable_fsdp._api.meshes import default_mesh
from composable_fsdp._consistency.broadcast import broadcast_
from composable_fsdp._core.mesh import ParameterSharding
from composable_fsdp._core.params import local_part
from composable_fsdp.checkpoint._coordination.mismatch import Mismatch, refuse, tensor_text
from composable_fsdp.checkpoint._state_dict.forms import Form, Full, compare, fill
from composable_fsdp.checkpoint._state_dict.tensors import Entry, plain_name

__all__ = ["OwnerRanks", "Report", "StateDictLoader", "digest"]

T = TypeVar("T")


def digest(value: object) -> str:
    """Return a short digest of the ``repr`` of ``value``, to compare it between ranks."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


@dataclass(frozen=True)
class OwnerRanks:
    """All ranks of ``mesh``, the largest mesh with a tensor of the model. ``None``: this rank only.

    The *source* of a tensor is the rank that provides its values if only one rank has them: the first rank of ``mesh``,
    which is rank 0 in most jobs. Parameters on ``smaller_meshes`` have fewer data-parallel ranks than others, such as
    experts, and are different on other ranks. Their source is the first rank of their own mesh.

    With ``only_sources`` a tensor's source has its values in a state dict and other ranks have not. Otherwise each rank
    has its own.
    """

    mesh: DeviceMesh | None
    smaller_meshes: frozenset[DeviceMesh] = frozenset()
    only_sources: bool = False

    @staticmethod
    def of(tensors: Iterable[tuple[object, ParameterSharding | None]], *, only_sources: bool = False) -> OwnerRanks:
        """Find the owner ranks of ``tensors``, given with their sharding by ``fully_shard``.

        With ``only_sources``, if no tensor is a DTensor, they are the ranks of the default process group, if any.
        """
        placed = [(v.device_mesh, sharding) for v, sharding in tensors if isinstance(v, DTensor)]
        meshes = dict.fromkeys(mesh for mesh, _ in placed)
        if not meshes and only_sources and dist.is_initialized():
            return OwnerRanks(default_mesh(), only_sources=True)
        num_ranks = {mesh: sharding.axes.num_ranks for mesh, sharding in placed if sharding is not None}
        smaller_meshes = frozenset(mesh for mesh, ranks in num_ranks.items() if ranks < max(num_ranks.values()))
        return OwnerRanks(max(meshes, key=lambda mesh: mesh.size(), default=None), smaller_meshes, only_sources)

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else dist.get_rank()

    def is_source_of(self, value: object = None) -> bool:
        return self._source_of(value) == self.rank

    def provider_of(self, value: object = None) -> int:
        """Return the global rank whose state dict has ``value`` for this one, by default all other values."""
        return self._source_of(value) if self.only_sources else self.rank

    def provides(self, value: object = None) -> bool:
        return self.provider_of(value) == self.rank

    def _source_of(self, value: object) -> int:
        mesh = self._mesh_of(value)
        return self.rank if mesh is None else int(mesh.mesh.flatten()[0])

    def exchange(self, value: T) -> dict[int, T]:
        """Gather the values of all ranks, by global rank. Collective; for small values, which are pickled."""
        found = {self.rank: value}
        for axis in range(self.mesh.ndim if self.mesh is not None else 0):
            assert self.mesh is not None
            received: list[Any] = [None] * self.mesh.size(axis)
            dist.all_gather_object(received, found, self.mesh.get_group(axis))
            found = {rank: each for part in received for rank, each in part.items()}
        return dict(sorted(found.items()))

    def send(self, like: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> Any:
        """Broadcast the source's full ``value`` for ``like``, with ``dtype`` and ``shape``. Collective on the mesh."""
        mesh = self._mesh_of(like)
        if mesh is None:
            return value
        if self.is_source_of(like):
            assert value is not None
            full = value.detach().to(mesh.device_type, dtype)
        else:
            full = torch.empty(tuple(shape), dtype=dtype, device=mesh.device_type)
        broadcast_([full], mesh)
        return full

    def _mesh_of(self, value: object) -> DeviceMesh | None:
        is_smaller = isinstance(value, DTensor) and value.device_mesh in self.smaller_meshes
        return cast(DTensor, value).device_mesh if is_smaller else self.mesh


@dataclass
class Report:
    """One rank's findings about the state dict that it was given.

    ``digest`` is one of what ranks must have been given alike. ``values`` are not tensors; for optimizers they are the
    state of each parameter. ``settings`` is what the state dict has besides values by name.
    """

    mismatch: Mismatch = field(default_factory=Mismatch)
    digest: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    settings: Any = None


class StateDictLoader:
    """One load on one rank. Nothing is changed on any rank before :meth:`agree` has returned on this one.

    Attributes:
        owners: the ranks that load together. If only sources have values, they broadcast them.
        given: the values that this rank was given, by name. Empty if this rank provides none.
        reports: the findings of all ranks by rank, after :meth:`agree`.
    """

    def __init__(self, owners: OwnerRanks, form: Form | None) -> None:
        self.owners = owners
        self.form = Full() if owners.only_sources else form
        self.given: dict[str, Any] = {}
        self.report = Report()
        self.reports = {owners.rank: self.report}

    def match(self, entries: Mapping[str, Entry], state_dict: object) -> None:
        """Match the values of ``state_dict`` with ``entries`` by name, and report the differences."""
        owners, mismatch = self.owners, self.report.mismatch
        mine = [entry for entry in entries.values() if owners.provides(entry.value)]
        if not mine and not owners.provides():
            return
        if not isinstance(state_dict, Mapping):
            mismatch.others.append(f"a state dict maps names to values, but a {type(state_dict).__name__} was given")
            return
        self.given = {plain_name(str(name)): value for name, value in state_dict.items()}
        for entry in mine:
            self._match_entry(entry)
        if owners.provides():
            unexpected = {str(n): v for n, v in state_dict.items() if plain_name(str(n)) not in entries}
            mismatch.unexpected = {name: _described(value) for name, value in unexpected.items()}

    def _match_entry(self, entry: Entry) -> None:
        name, mismatch = entry.name, self.report.mismatch
        if name not in self.given:
            mismatch.missing[name] = _described(entry.value)
            return
        value = self.given[name]
        if not entry.is_tensor:
            self.report.values[name] = value
            return
        compare(name, entry.value, value, self.form, mismatch)
        if self.owners.only_sources and isinstance(value, torch.Tensor) and not has_own_memory(local_part(value)):
            mismatch.others.append(
                f"{name!r} is a {type(value).__name__}, which cannot be sent from rank 0: only plain tensors can. "
                "Load it on all ranks, without broadcast_from_rank0"
            )

    def agree(self, what: str, *, strict: bool = True) -> None:
        """Exchange the reports of all ranks, and raise the same error on all of them if any has differences.

        Without ``strict``, missing names are differences only if not all ranks miss them, and unexpected ones never.
        """
        separate = not self.owners.only_sources  # each rank was given values of its own
        reports = self.owners.exchange(Report(self.report.mismatch, self.report.digest) if separate else self.report)
        mismatches = {rank: report.mismatch for rank, report in reports.items()}
        if not strict:
            common = set.intersection(*(set(mismatch.missing) for mismatch in mismatches.values()))
            for rank, mismatch in mismatches.items():
                uneven = [name for name in mismatch.missing if separate and name not in common]
                mismatches[rank] = replace(mismatch, missing=dict.fromkeys(uneven, "other ranks have it"))
        refuse(what, mismatches, ignore=() if strict else ("unexpected",))
        if separate and len({report.digest for report in reports.values()}) > 1:
            refuse(what, {0: Mismatch(others=["ranks were given state of different parameters"])})
        self.reports = {**reports, self.owners.rank: self.report}

    def report_of(self, value: object = None) -> Report:
        """Return the report of the rank that provides ``value``, or by default the rest of the state dict."""
        return self.reports[self.owners.provider_of(value)]

    def receive(self, like: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype, shape: Any) -> Any:
        """Return the ``value`` for ``like``: this rank's own, or the one that the source broadcasts."""
        return self.owners.send(like, value, dtype, shape) if self.owners.only_sources else value

    def fill(self, entries: Mapping[str, Entry]) -> dict[str, Any]:
        """Fill the tensors of ``entries`` in place, and return all present values by the entries' keys."""
        values: dict[str, Any] = {}
        filled: set[int] = set()
        with torch.inference_mode(False), torch.no_grad():
            for name, entry in entries.items():
                target, report = entry.value, self.report_of(entry.value)
                if name in report.mismatch.missing:
                    continue
                values[entry.key] = target if entry.is_tensor else report.values[name]
                if entry.is_tensor and id(target) not in filled:
                    filled.add(id(target))
                    value = self.receive(target, self.given.get(name), target.dtype, target.shape)
                    fill(target, entry.sharding, value, self.form)
                    del value  # before the next one is received
        return values


def _described(value: object) -> str:
    return tensor_text(value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
