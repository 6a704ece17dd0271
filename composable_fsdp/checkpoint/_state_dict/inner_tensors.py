"""Checkpoints of tensor subclasses: the plain tensors that are saved instead.

A subclass without ``__torch_dispatch__`` has its own memory, and a plain view of it is saved. For any other subclass
the *inner tensors* that ``__tensor_flatten__`` names are saved, under keys such as ``model.0.weight.scale``. A *record*
under ``classes.model.0.weight`` stores the class, and how each inner tensor is sharded.

An inner tensor can be saved if it is sharded like the outer tensor, or replicated. Calling the class's own ``chunk``
shows which: from shapes alone, a scale per row looks like a scale per column. If one is sharded in any other way, such
as packed blocks across rows, a parameter is refused, and optimizer state is *opaque* (``opaque_state.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch

from composable_fsdp._core.params import is_wrapper
from composable_fsdp._extents import Ranges, ShardExtent
from composable_fsdp.checkpoint._coordination import Mismatch, differ, dtype_name
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard, checksum
from composable_fsdp.errors import CheckpointError

Ratio = tuple[int, int] | None
"""The sharding of an inner tensor when the outer tensor is sharded along one dim.

A pair: the inner dim, and the number of its indices per index of the outer dim. ``REPLICATED``: it is not sharded.
``IRREGULAR``: it is sharded in some other way. ``None``: unknown, since the outer tensor has too few indices.
"""
REPLICATED, IRREGULAR = (-1, 1), (-1, 0)


def refuse_unknown(key: str, part: LocalShard) -> None:
    """Raise ``CheckpointError`` if the class of ``part`` has ``__torch_dispatch__``, but no ``__tensor_flatten__``."""
    local = part.local
    if type(local) is torch.Tensor or is_wrapper(local):
        return
    raise CheckpointError(
        f"{key} cannot be saved: its class {class_name(local)} has __torch_dispatch__ and no __tensor_flatten__, so "
        "nothing says which plain tensors it consists of. Give the class __tensor_flatten__ and __tensor_unflatten__, "
        "or leave the tensor out of the state dict and make it again after load()."
    )


# -- one rank's view


@dataclass(frozen=True)
class _Inner:
    """One inner tensor on one rank: its shape, and a ratio for each dim of the outer tensor.

    ``checksum`` is that of its values, if ranks with other extents of the outer tensor may have the same extent of this
    one; else ``None``.
    """

    shape: tuple[int, ...]
    ratios: tuple[Ratio, ...]
    checksum: int | None


@dataclass(frozen=True)
class InnerContribution:
    """One rank's description of a tensor that is saved as inner tensors. For its attributes see :class:`Record`."""

    kind: str
    dtype: str
    context: Any
    extent: ShardExtent
    inner: Mapping[str, _Inner]


@torch.no_grad()
def inner_contributions_of(parts: Mapping[str, LocalShard]) -> dict[str, InnerContribution]:
    """Describe those of ``parts``, given by key, that are saved as inner tensors."""
    contributions = {}
    for key, part in parts.items():
        refuse_unknown(key, part)
        local, extent, found = part.local, part.extent, {}
        if not is_wrapper(local):
            continue
        inner = inner_of(local)
        ratios_by_dim = [_ratios(local, inner, dim) for dim in range(local.ndim)]
        for name, tensor in inner.items():
            ratios = tuple(by_name[name] for by_name in ratios_by_dim)
            shared = any(
                ratio in (None, REPLICATED) and ranges != (range(size),)
                for ratio, ranges, size in zip(ratios, extent.ranges, extent.shape, strict=True)
            )
            found[name] = _Inner(tuple(tensor.shape), ratios, checksum(tensor) if shared else None)
        kind, dtype = class_name(local), dtype_name(part.value.dtype)
        contributions[key] = InnerContribution(kind, dtype, context_of(local), extent, found)
    return contributions


def inner_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain inner tensors of ``tensor`` by attribute. Nested attributes are joined by dots."""
    found = {}
    for name in cast(Any, tensor).__tensor_flatten__()[0]:
        inner = LocalShard(getattr(tensor, name)).local
        if is_wrapper(inner):
            found.update({f"{name}.{deeper}": each for deeper, each in inner_of(inner).items()})
        elif type(inner) is torch.Tensor:
            found[name] = inner
        else:
            raise CheckpointError(
                f"the inner tensor {name!r} of a {class_name(tensor)} is a {class_name(inner)}, which has "
                "__torch_dispatch__ and no __tensor_flatten__. Give that class __tensor_flatten__ and "
                "__tensor_unflatten__."
            )
    return found


def _ratios(tensor: torch.Tensor, inner: Mapping[str, torch.Tensor], dim: int) -> dict[str, Ratio]:
    """Find how each of the ``inner`` tensors is cut when ``tensor`` is cut in two along ``dim``."""
    size = tensor.shape[dim]
    if size < 2:
        return dict.fromkeys(inner)
    try:
        halves = tensor.chunk(2, dim)
        pieces = [dict(inner_of(half)) if is_wrapper(half) else {} for half in halves]
    except Exception:  # the class's own code: any error means that it cannot be cut along this dim
        return dict.fromkeys(inner, IRREGULAR)
    sizes = [half.shape[dim] for half in halves]
    return {name: _ratio(each, [piece.get(name) for piece in pieces], sizes) for name, each in inner.items()}


def can_be_cut(tensor: torch.Tensor) -> bool:
    """Return whether all inner tensors of a wrapper can be cut along any dim of it, or are replicated."""
    inner = inner_of(tensor)
    return not any(IRREGULAR in _ratios(tensor, inner, dim).values() for dim in range(tensor.ndim))


def _ratio(full: torch.Tensor, pieces: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> Ratio:
    """Find how ``full`` was cut into ``pieces``, where the outer tensor was cut into pieces of ``sizes``."""
    if all(piece is not None and _same(piece, full) for piece in pieces):
        return REPLICATED
    for dim, length in enumerate(full.shape):
        count, rest = divmod(length, sum(sizes))
        if count and not rest:
            expected = full.split([size * count for size in sizes], dim)
            if all(piece is not None and _same(piece, e) for piece, e in zip(pieces, expected, strict=True)):
                return dim, count
    return IRREGULAR


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both tensors have the same bytes. Tensors that share memory are not read."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def class_name(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def context_of(tensor: torch.Tensor) -> Any:
    names, context = cast(Any, tensor).__tensor_flatten__()
    deeper = {n: context_of(inner) for n in names if is_wrapper(inner := getattr(tensor, n))}
    return [_to_json(context), deeper] if deeper else _to_json(context)


def _to_json(value: Any) -> Any:
    """Convert ``value`` to JSON values. Objects become their class's name: their ``repr`` may differ between runs."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, (torch.dtype, torch.device, Enum)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_json(each) for each in value]
    return type(value).__qualname__


# -- the view of all ranks together


InnerLayout = tuple[tuple[int, ...], tuple[Ratio, ...]]
"""The layout of an inner tensor that is saved as one tensor: its global shape, and a ratio for each outer dim."""


def _extent_at(layout: InnerLayout, outer: ShardExtent) -> ShardExtent:
    """Return the extent of an inner tensor that belongs to ``outer``. Raise ``ValueError`` if there is none."""
    shape, ratios = layout
    ranges: list[Ranges] = [(range(size),) if size else () for size in shape]
    for dim, ratio in enumerate(ratios):
        if ratio is None or ratio == IRREGULAR:
            if outer.local_shape[dim] != outer.shape[dim]:
                raise ValueError(f"it cannot be cut along dim {dim}")
        elif ratio != REPLICATED:
            own, count = ratio
            ranges[own] = tuple(range(r.start * count, r.stop * count) for r in outer.ranges[dim])
    return ShardExtent(shape, tuple(ranges))


@dataclass(frozen=True)
class Record:
    """The checkpoint's description of a tensor that is saved as inner tensors.

    ``kind``, ``shape`` and ``dtype`` are the outer tensor's class, global shape and dtype.

    Attributes:
        local_shape: the shape of every rank's shard, if they are equal; else ``None``, and there is no context.
        context: the plain values that belong to a shard of this shape.
        inner: the layout of each inner tensor; empty if it is opaque, and saved under the key itself.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    local_shape: tuple[int, ...] | None
    context: Any
    inner: Mapping[str, InnerLayout]

    @property
    def is_opaque(self) -> bool:
        return not self.inner

    def encoded(self) -> str:
        return json.dumps(vars(self))

    @staticmethod
    def decoded(text: str) -> Record:
        values = json.loads(text)
        values.pop("path", None)  # of checkpoints of version 2
        tuples = {name: _tuples(values[name]) for name in ("shape", "local_shape")}
        return Record(**values | tuples | {"inner": {name: _tuples(each) for name, each in values["inner"].items()}})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def agreed(contributions: Sequence[Mapping[str, InnerContribution]]) -> dict[str, Record]:
    """Combine the descriptions of all ranks, by key of the outer tensor."""
    by_key: dict[str, list[InnerContribution]] = {}
    for of_rank in contributions:
        for key, contribution in of_rank.items():
            by_key.setdefault(key, []).append(contribution)
    return {key: _agreed(key, of_ranks) for key, of_ranks in by_key.items()}


def _agreed(key: str, contributions: Sequence[InnerContribution]) -> Record:
    kinds = sorted({contribution.kind for contribution in contributions})
    if len(kinds) > 1:
        raise CheckpointError(f"{key} is of another class on each rank: {', '.join(kinds)}.")
    filled = [contribution for contribution in contributions if not contribution.extent.is_empty] or list(contributions)
    layouts: dict[str, InnerLayout] = {}
    is_state = key.startswith("optimizer.")
    for name in dict.fromkeys(name for contribution in filled for name in contribution.inner):
        layout = _layout_of(name, filled, can_be_irregular=not is_state)
        if layout is None and is_state:
            layouts = {}
            break
        if layout is None:
            raise CheckpointError(
                f"{key} cannot be saved: what ranks hold of the inner tensor {name!r} of its class {kinds[0]} is no "
                "cut along one dim, nor all of it. Shard the tensor along another dim (shard_placement_fn), or leave "
                "it out of the state dict and make it again after load()."
            )
        layouts[name] = layout
    first = filled[0]
    own = first.extent.local_shape, first.context
    local_shape, context = own if all((e.extent.local_shape, e.context) == own for e in filled) else (None, None)
    return Record(kinds[0], first.extent.shape, first.dtype, local_shape, context, layouts)


def _layout_of(name: str, contributions: Sequence[InnerContribution], *, can_be_irregular: bool) -> InnerLayout | None:
    """Return how the inner tensor ``name`` is sharded, or ``None`` if it cannot be saved as one tensor.

    One that no rank has to cut can be, but not on other meshes.
    """
    if any(name not in contribution.inner for contribution in contributions):
        return None
    own = [(contribution.extent, contribution.inner[name]) for contribution in contributions]
    outer, first = own[0]
    ratios = tuple(_common_ratio([inner.ratios[dim] for _, inner in own]) for dim in range(len(outer.shape)))
    if IRREGULAR in ratios and not can_be_irregular:
        return None
    pairs = zip(outer.shape, ratios, strict=True)
    sizes = [(ratio[0], size * ratio[1]) for size, ratio in pairs if ratio is not None and ratio[0] >= 0]
    shape = dict(enumerate(first.shape)) | dict(sizes)
    if len({dim for dim, _ in sizes}) < len(sizes):  # two dims of the outer tensor are in one dim
        return None
    layout = tuple(shape.values()), ratios
    values: dict[tuple[Ranges, ...], int | None] = {}
    for extent, inner in own:
        try:
            found = _extent_at(layout, extent)
        except ValueError:
            return None
        if found.local_shape != inner.shape or values.setdefault(found.ranges, inner.checksum) != inner.checksum:
            return None
    return layout


def _common_ratio(ratios: Sequence[Ratio]) -> Ratio:
    known = {ratio for ratio in ratios if ratio is not None}
    return None if not known else known.pop() if len(known) == 1 else IRREGULAR


# -- the tensors that are saved and loaded


def parts_of(part: LocalShard, record: Record) -> dict[str, LocalShard]:
    """Return the inner tensors that this rank saves for ``part``, by the suffix that follows the outer tensor's key.

    A rank without any element of the outer tensor saves nothing: its replicated inner tensors may be stale.
    """
    if part.extent.is_empty:
        return {}
    return {
        f".{name}": LocalShard(tensor, extent=_extent_at(record.inner[name], part.extent))
        for name, tensor in inner_of(part.local).items()
    }


Spec = tuple[tuple[int, ...], torch.dtype]
"""The global shape and the dtype of what is saved under a key."""


def wanted_of(
    part: LocalShard, record: Record, name: str, saved: Callable[[str], Spec | None], mismatch: Mismatch
) -> dict[str, LocalShard]:
    """Match the inner tensors of ``part``, called ``name`` in ``mismatch``, with those of the checkpoint.

    ``saved`` returns the spec of what is saved under a suffix of the outer tensor's key. The result is the inner
    tensors to fill, by suffix.
    """
    parts: dict[str, LocalShard] = {}
    local = part.local
    if record.kind != class_name(local):
        mismatch.classes[name] = differ(f"a {record.kind}", f"a {class_name(local)}")
        return parts
    if record.shape != part.shape:
        mismatch.shapes[name] = differ(record.shape, part.shape)
        return parts
    if record.local_shape == tuple(local.shape) and record.context != context_of(local):
        mismatch.classes[name] = differ(f"a {record.kind} with {record.context}", f"one with {context_of(local)}")
        return parts
    inner = inner_of(local)
    for attribute in inner.keys() - record.inner.keys():
        mismatch.classes[f"{name}.{attribute}"] = f"not saved, but this {record.kind} has it"
    for attribute, layout in record.inner.items():
        label = f"{name}.{attribute}"
        try:
            extent = _extent_at(layout, part.extent)
        except ValueError as error:
            if not part.extent.is_empty:
                mismatch.classes[label] = f"{error}. {_SAME_MESH}"
            continue
        spec = saved(f".{attribute}")
        if spec is None or spec[0] != layout[0]:
            mismatch.classes[label] = f"the checkpoint lacks this part of a {record.kind}, of shape {layout[0]}"
            continue
        shape, dtype = extent.local_shape, spec[1]
        tensor = inner.get(attribute)
        if tensor is None:
            mismatch.classes[label] = f"saved, but this {record.kind} does not have it"
            continue
        if tuple(tensor.shape) != shape:
            mismatch.shapes[label] = differ(shape, tuple(tensor.shape))
        elif tensor.dtype != dtype:
            mismatch.dtypes[label] = differ(dtype_name(dtype), dtype_name(tensor.dtype))
        parts[f".{attribute}"] = LocalShard(tensor, extent=extent)
    return parts


_SAME_MESH = "Load it on the mesh, and as many ranks, that saved it"
