"""``describe``: the parameter groups of a sharded model, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp._core.hooks import root_of, states_of
from composable_fsdp._core.params import ShardedParameter
from composable_fsdp._core.state import FSDPState
from composable_fsdp._text import count, text_table
from composable_fsdp.policies import ReshardKind

_AFTER_FORWARD = {ReshardKind.ALWAYS: "free", ReshardKind.NEVER: "keep", ReshardKind.SMALLER: "keep 1/{}"}


@dataclass(frozen=True)
class GroupDescription:
    """One parameter group.

    Attributes:
        names: names of its modules in the model; ``""`` is the model itself.
        classes: their classes before ``fully_shard``.
        is_root: True if no other group's module contains it.
        parameters: the number of elements of its unsharded parameters.
        bytes: the bytes of its unsharded parameters in the dtypes of their shards.
        bytes_per_rank: the bytes of this rank's shards, including padding.
        placements: the distinct placements of its parameters.
        meshes: the distinct meshes of its parameters: device type, and sizes with the names of mesh dims, if any.
        dtypes: for each kind of parameter: the dtypes of sharded parameters, of computation and of gradient reduction.
        after_forward: what happens to the unsharded parameters.
        tied: the names of each parameter with several, the one it belongs to within the group first.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...]
    is_root: bool
    parameters: int
    bytes: int
    bytes_per_rank: int
    placements: tuple[str, ...]
    meshes: tuple[str, ...]
    dtypes: tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...]
    after_forward: str
    tied: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, repr=False)
class ModelDescription:
    """The result of :func:`describe`, printed as a table.

    Attributes:
        groups: the parameter groups, in the order of modules.
        unsharded: bytes of the parameters that are in no group, including ignored ones, by name.
    """

    groups: tuple[GroupDescription, ...]
    unsharded: Mapping[str, int]

    @property
    def notes(self) -> tuple[str, ...]:
        """Totals, and the parameters in no group."""
        total = sum(group.bytes for group in self.groups)
        per_rank = sum(group.bytes_per_rank for group in self.groups)
        notes = [f"{count(len(self.groups), 'group')}, {_size(total)} in full, {_size(per_rank)} on this rank."]
        if self.unsharded:
            names = ", ".join(list(self.unsharded)[:5]) + (", ..." if len(self.unsharded) > 5 else "")
            notes.append(
                f"Not sharded, being ignored or in no group: {count(len(self.unsharded), 'parameter')}, "
                f"{_size(sum(self.unsharded.values()))}: {names}"
            )
        return tuple(notes)

    def __repr__(self) -> str:
        """Return the table without empty columns. Columns with one distinct value are in a note instead."""
        rows = [_cells(group) for group in _merge_repeated(self.groups)]
        columns = {title: [row[title] for row in rows] for title in rows[0]}
        distinct = {title: set(filter(None, column)) for title, column in columns.items()}
        same = {title: text for title in _COMMON_COLUMNS if len(distinct[title]) == 1 for text in distinct[title]}
        shown = {title: column for title, column in columns.items() if distinct[title] and title not in same}
        common = "; ".join(f"{title}: {text}" for title, text in same.items())
        notes = [*([f"All groups: {common}."] if common else []), *self.notes]
        return "\n".join([text_table(tuple(shown), list(zip(*shown.values(), strict=True)), _NUMBERS), *notes])


def describe(model: nn.Module) -> ModelDescription:
    """Return the parameter groups of ``model`` with their sizes, meshes, dtypes and strategies.

    It can be called as soon as any module is sharded, also with parameters on the meta device. It does not communicate
    or allocate tensors.

    Args:
        model: the outermost sharded module, or one that contains it.

    Raises:
        ConfigurationError: no module in it is sharded.
    """
    states = [state for _, state in states_of(model)]
    places = {module: name for name, module in model.named_modules()}
    held = {id(parameter) for state in states for parameter in state.registered_parameters()}
    return ModelDescription(
        tuple(_describe_group(state, places) for state in states),
        {name: p.nbytes for name, p in model.named_parameters() if id(p) not in held},
    )


def _describe_group(state: FSDPState, places: Mapping[nn.Module, str]) -> GroupDescription:
    parameters, specs = state.group.parameters, state.group.plan.specs
    inside = {below for module in state.modules for below in module.modules()}
    owned = [p for owner in state.owner_states for p in owner.group.parameters]
    used = [p for p in owned if any(owner in inside for owner, _ in p.owners)]
    return GroupDescription(
        names=tuple(places[module] for module in state.modules if module in places),
        classes=tuple(type(module).__name__.removeprefix("FSDP") for module in state.modules),
        is_root=root_of(state).root_state is state,
        parameters=sum(prod(p.sharding.shape) for p in parameters),
        bytes=sum(prod(p.sharding.shape) * p.dtype.itemsize for p in parameters),
        bytes_per_rank=sum(bucket.shard_bytes for bucket in state.group.plan.buckets),
        placements=tuple(dict.fromkeys(" ".join(map(str, p.sharding.placements)) for p in parameters)),
        meshes=tuple(dict.fromkeys(map(_mesh, [p.sharding.mesh for p in parameters] or [state.group.axes.mesh]))),
        dtypes=tuple(dict.fromkeys((s.dtype, s.compute_dtype, s.reduce_dtype) for s in specs)),
        after_forward=_AFTER_FORWARD[_reshard_kind(state)].format(state.options.reshard.mesh_size),
        tied=tuple(_names(p, places) for p in (*parameters, *used) if len(p.owners) > 1),
    )


def _reshard_kind(state: FSDPState) -> ReshardKind:
    kind = state.options.reshard.kind
    if kind is ReshardKind.AUTO:
        return ReshardKind.NEVER if root_of(state).root_state is state else ReshardKind.ALWAYS
    return kind


def _names(parameter: ShardedParameter, places: Mapping[nn.Module, str]) -> tuple[str, ...]:
    named = ((places[owner], attribute) for owner, attribute in parameter.owners if owner in places)
    return tuple(f"{path}.{attribute}" if path else attribute for path, attribute in named)


def _mesh(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    sizes = (f"{name} {size}".strip() for name, size in zip(names, mesh.shape, strict=True))
    return f"{mesh.device_type} {' x '.join(sizes)}"


# -- as text

_NUMBERS = ("parameters", "bytes", "per rank")
_COMMON_COLUMNS = ("placement", "mesh", "dtypes (rest, compute, reduce)")


def _merge_repeated(groups: Sequence[GroupDescription]) -> list[GroupDescription]:
    """Merge adjacent groups that differ only in their names, and name them by the first and the last."""
    folded = []
    for _, run in groupby(groups, key=lambda group: replace(group, names=())):
        members = list(run)
        first, last = members[0], members[-1]
        if len(members) > 2:
            name = f"{', '.join(first.names)} ... {', '.join(last.names)} (each of {len(members)})"
            members = [replace(first, names=(name,))]
        folded += members
    return folded


def _cells(group: GroupDescription) -> dict[str, str]:
    named = ", ".join(name or "(model)" for name in group.names)
    kinds = [", ".join(str(dtype).removeprefix("torch.") for dtype in kind) for kind in group.dtypes]
    return {
        "group": f"{named} [root]" if group.is_root else named,
        "class": ", ".join(dict.fromkeys(group.classes)),
        "parameters": f"{group.parameters:,}",
        "bytes": _size(group.bytes),
        "per rank": _size(group.bytes_per_rank),
        "placement": "; ".join(group.placements),
        "mesh": "; ".join(group.meshes),
        "dtypes (rest, compute, reduce)": "; ".join(kinds),
        "after forward": group.after_forward,
        "tied": "; ".join(" = ".join(names) for names in group.tied),
    }


def _size(nbytes: float) -> str:
    """Format bytes with three digits and a decimal prefix."""
    for prefix in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {prefix}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
