"""What ``fully_shard`` has made of a model, as a table of groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp._runtime.groups.state import FSDPState
from composable_fsdp._runtime.lazy_init import iteration_of
from composable_fsdp._runtime.params.sharded_param import ShardedParameter
from composable_fsdp._sharding.strategy import ShardingStrategy
from composable_fsdp.diagnostics.communication_report import states_of
from composable_fsdp.policies import ReshardKind

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["GroupDescription", "ModelDescription", "describe", "describe_groups"]

_MOST = 0.5
"""Share of all bytes from which one group is too large: it is in memory in full whenever a module of it computes."""


@dataclass(frozen=True)
class GroupDescription:
    """One group.

    Attributes:
        names: of its modules in the model; ``""`` is the model itself.
        classes: of these, as they were before.
        is_root: no other group's module contains it.
        parameters: elements of all its parameters in full.
        bytes: of the same, in the dtypes in which they rest.
        bytes_per_rank: of this rank's shards, padding included.
        placements: of its parameters, each once.
        meshes: on which these are, each once: device type, and sizes by name where dims have names.
        dtypes: at rest, while modules compute, and while gradients are reduced, for each kind of parameter.
        after_forward: what becomes of the full parameters.
        strategy: by name what mesh and ``reshard_after_forward`` come to.
        tied: for each parameter that has several places, its names, that within the group it belongs to first.
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
    strategy: ShardingStrategy
    tied: tuple[tuple[str, ...], ...]

    @property
    def label(self) -> str:
        named = ", ".join(name or "(model)" for name in self.names)
        return f"{named} [root]" if self.is_root else named


@dataclass(frozen=True)
class ModelDescription:
    """What :func:`describe` found. ``str()`` is a plain table; ``rich.print`` makes a coloured one.

    Attributes:
        groups: in the order of modules.
        unsharded: bytes of the parameters that are in no group, ignored ones among them, by name.
    """

    groups: tuple[GroupDescription, ...]
    unsharded: Mapping[str, int]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a table cannot say, and what looks like a mistake."""
        return tuple(self._notes())

    def _notes(self) -> Iterator[str]:
        total = sum(group.bytes for group in self.groups)
        per_rank = sum(group.bytes_per_rank for group in self.groups)
        yield f"{len(self.groups)} groups, {_size(total)} in full, {_size(per_rank)} on this rank."
        largest = max(self.groups, key=lambda group: group.bytes)
        if largest.bytes > _MOST * total:
            yield (
                f"Warning: {largest.label} holds {largest.bytes / total:.0%} of all bytes, and is in memory in full "
                "whenever any of it computes. Make groups of modules in it, for example with "
                "policy=composable_fsdp.wrap.transformer_blocks()."
            )
        if self.unsharded:
            names = ", ".join(list(self.unsharded)[:5]) + (", ..." if len(self.unsharded) > 5 else "")
            yield (
                f"Not sharded, being ignored or in no group: {len(self.unsharded)} parameters, "
                f"{_size(sum(self.unsharded.values()))}: {names}"
            )

    def __str__(self) -> str:
        text = _Text.of(self.groups)
        widths = [max(map(len, column)) for column in zip(text.titles, *text.rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if title in _NUMBERS else cell.ljust(width)
                for title, cell, width in zip(text.titles, row, widths, strict=True)
            ).rstrip()
            for row in (text.titles, *text.rows)
        ]
        return "\n".join([*lines, *filter(None, [text.common]), *self.notes])

    def __rich__(self) -> Table:
        from rich.markup import escape  # an extra, which only those need who print with it
        from rich.table import Table

        text = _Text.of(self.groups)
        table = Table(caption="\n".join([*filter(None, [text.common]), *self.notes]), caption_justify="left")
        for title in text.titles:
            table.add_column(title, justify="right" if title in _NUMBERS else "left", overflow="fold")
        for row in text.rows:
            table.add_row(*map(escape, row))
        return table


def describe(model: nn.Module) -> ModelDescription:
    """The groups of ``model`` with sizes, meshes, dtypes and strategies. Communicates nothing, and needs no memory.

    It can be called as soon as anything is sharded, also where parameters are on meta.

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


def describe_groups(model: nn.Module) -> list[GroupDescription]:
    """The rows of :func:`describe`."""
    return list(describe(model).groups)


def _describe_group(state: FSDPState, places: Mapping[nn.Module, str]) -> GroupDescription:
    parameters, specs = state.group.parameters, state.group.plan.specs
    used = [p for lender in state.lenders for p in lender.group.parameters if _is_used(p, state)]
    return GroupDescription(
        names=tuple(places[module] for module in state.modules if module in places),
        classes=tuple(type(module).__name__.removeprefix("FSDP") for module in state.modules),
        is_root=iteration_of(state).root is state,
        parameters=sum(prod(p.sharding.shape) for p in parameters),
        bytes=sum(prod(p.sharding.shape) * p.dtype.itemsize for p in parameters),
        bytes_per_rank=state.group.plan.shard_bytes,
        placements=_each_once(" ".join(map(str, p.sharding.placements)) for p in parameters),
        meshes=_each_once(_mesh(m) for m in [p.sharding.mesh for p in parameters] or [state.group.axes.mesh]),
        dtypes=tuple(dict.fromkeys((s.dtype, s.compute_dtype, s.reduce_dtype) for s in specs)),
        after_forward=_after_forward(state),
        strategy=_strategy(state),
        tied=tuple(_names(p, places) for p in (*parameters, *used) if len(p.owners) > 1),
    )


def _is_used(parameter: ShardedParameter, state: FSDPState) -> bool:
    inside = {below for module in state.modules for below in module.modules()}
    return any(owner in inside for owner, _ in parameter.owners)


def _names(parameter: ShardedParameter, places: Mapping[nn.Module, str]) -> tuple[str, ...]:
    named = ((places[owner], attribute) for owner, attribute in parameter.owners if owner in places)
    return tuple(f"{path}.{attribute}" if path else attribute for path, attribute in named)


def _each_once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _mesh(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    return f"{mesh.device_type} " + " x ".join(
        f"{name} {size}".strip() for name, size in zip(names, mesh.shape, strict=True)
    )


def _after_forward(state: FSDPState) -> str:
    kind = state.reshard.kind
    if kind is ReshardKind.AUTO:
        kind = ReshardKind.NEVER if iteration_of(state).root is state else ReshardKind.ALWAYS
    if kind is ReshardKind.SMALLER:
        return f"keep 1/{state.reshard.mesh_size}"
    return "free" if kind is ReshardKind.ALWAYS else "keep"


def _strategy(state: FSDPState) -> ShardingStrategy:
    frees = state.reshard.kind is not ReshardKind.NEVER
    if all(pgs.axes.shard.size == 1 for pgs in state.group.process_groups):
        return ShardingStrategy.NO_SHARD
    if any(pgs.replicate.size > 1 for pgs in state.group.process_groups):
        return ShardingStrategy.HYBRID_SHARD if frees else ShardingStrategy.HYBRID_SHARD_ZERO2
    return ShardingStrategy.FULL_SHARD if frees else ShardingStrategy.SHARD_GRAD_OP


# -- as text

_COLUMNS = (
    "group",
    "class",
    "parameters",
    "bytes",
    "per rank",
    "placement",
    "mesh",
    "dtypes (rest, compute, reduce)",
    "after forward",
    "strategy",
    "tied",
)
_NUMBERS = {"parameters", "bytes", "per rank"}
_OFTEN_THE_SAME = ("placement", "mesh", "dtypes (rest, compute, reduce)", "strategy")


@dataclass(frozen=True)
class _Text:
    """A table without empty columns. What those say that say the same in every row is in ``common`` instead."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    common: str

    @staticmethod
    def of(groups: Sequence[GroupDescription]) -> _Text:
        rows = list(map(_cells, _folded(groups)))
        columns = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))
        said = {title: set(filter(None, column)) for title, column in columns.items()}
        same = {title: text for title in _OFTEN_THE_SAME if len(said[title]) == 1 for text in said[title]}
        shown = {title: column for title, column in columns.items() if said[title] and title not in same}
        common = "; ".join(f"{title}: {text}" for title, text in same.items())
        return _Text(tuple(shown), tuple(zip(*shown.values(), strict=True)), f"All groups: {common}." if common else "")


def _folded(groups: Sequence[GroupDescription]) -> list[GroupDescription]:
    """Neighbours that differ in nothing but their names as one, named by the first and the last."""
    folded = []
    for _, run in groupby(groups, key=lambda group: replace(group, names=())):
        members = list(run)
        first, last = members[0], members[-1]
        if len(members) > 2:
            name = f"{', '.join(first.names)} ... {', '.join(last.names)} (each of {len(members)})"
            members = [replace(first, names=(name,))]
        folded += members
    return folded


def _cells(group: GroupDescription) -> tuple[str, ...]:
    return (
        group.label,
        ", ".join(dict.fromkeys(group.classes)),
        f"{group.parameters:,}",
        _size(group.bytes),
        _size(group.bytes_per_rank),
        "; ".join(group.placements),
        "; ".join(group.meshes),
        "; ".join(", ".join(str(dtype).removeprefix("torch.") for dtype in kind) for kind in group.dtypes),
        group.after_forward,
        group.strategy.name,
        "; ".join(" = ".join(names) for names in group.tied),
    )


def _size(nbytes: float) -> str:
    """With three digits and a decimal prefix."""
    for state in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {state}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
