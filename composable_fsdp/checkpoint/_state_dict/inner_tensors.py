"""Tensors of classes of their own in checkpoints: which plain tensors stand for them.

A class without ``__torch_dispatch__`` has its values in memory of its own, so a plain view of that is saved. Of any
other class the *inner tensors* are saved, those that ``__tensor_flatten__`` names, under keys such as
``model.0.weight.scale``. A *record* under ``classes.model.0.weight`` says which class it was and how each inner tensor
is cut.

An inner tensor can be loaded on another mesh if it is cut as the outer tensor is, or not at all. ``chunk`` of the class
itself shows which: shapes alone cannot tell a scale per row from a scale per column. An inner tensor that is cut in
another way, such as packed blocks across rows, is saved shard by shard, under keys that end with ``@`` and the part of
the outer tensor that the shard is. Only a rank with the same part can load it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from composable_fsdp._layout.block import Extent, Ranges
from composable_fsdp.checkpoint._coordination.mismatch import Mismatch, differ, dtype_name
from composable_fsdp.checkpoint._state_dict.shard_view import Part, checksum
from composable_fsdp.errors import CheckpointError

__all__ = [
    "Agreed",
    "Offer",
    "Record",
    "Wanted",
    "agreed",
    "class_name",
    "has_inner",
    "offer_of",
    "parts_of",
    "refuse_unknown",
    "wanted_of",
]

Ratio = tuple[int, int] | None
"""How an inner tensor is cut where the outer one is cut along one dim: along which of its own dims, and how many
indices of that belong to one index of the outer dim. ``UNCUT``: not at all. ``OTHERWISE``: in another way. ``None``:
the outer tensor has too few indices to tell.
"""
UNCUT, OTHERWISE = (-1, 1), (-1, 0)


def has_inner(part: Part) -> bool:
    """Whether inner tensors stand for ``part``."""
    return _is_wrapper(part.local)


def refuse_unknown(key: str, part: Part) -> None:
    """Raises if nothing says which plain tensors stand for ``part``.

    Raises:
        CheckpointError: the class has ``__torch_dispatch__``, but no ``__tensor_flatten__``.
    """
    local = part.local
    if type(local) is torch.Tensor or _is_wrapper(local):
        return
    raise CheckpointError(
        f"{key} cannot be saved: its class {class_name(local)} has __torch_dispatch__ and no __tensor_flatten__, so "
        "nothing says which plain tensors it consists of. Give the class __tensor_flatten__ and __tensor_unflatten__, "
        "or leave the tensor out of the state dict and make it again after load()."
    )


def _is_wrapper(tensor: Any) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


# -- what one rank has


@dataclass(frozen=True)
class _Inner:
    """One inner tensor on one rank.

    Attributes:
        shape: of the inner tensor.
        ratios: for each dim of the outer tensor.
        checksum: of its values where ranks with other parts of the outer tensor may have the same part of this one.
    """

    shape: tuple[int, ...]
    ratios: tuple[Ratio, ...]
    checksum: int | None


@dataclass(frozen=True)
class Offer:
    """A tensor with inner tensors on one rank.

    Attributes:
        kind: name of the class.
        context: the plain values in what ``__tensor_flatten__`` returns besides names.
        extent: this rank's part of the outer tensor.
        inner: by name.
    """

    kind: str
    context: Any
    extent: Extent
    inner: Mapping[str, _Inner]


@torch.no_grad()
def offer_of(part: Part) -> Offer:
    """What this rank has of ``part``, which has inner tensors."""
    local, extent = part.local, part.extent
    inner = _inner_of(local)
    along = [_ratios(local, inner, dim) for dim in range(local.ndim)]
    found = {}
    for name, tensor in inner.items():
        ratios = tuple(by_name[name] for by_name in along)
        shared = any(
            ratio in (None, UNCUT) and ranges != (range(size),)
            for ratio, ranges, size in zip(ratios, extent.ranges, extent.shape, strict=True)
        )
        found[name] = _Inner(tuple(tensor.shape), ratios, checksum(tensor) if shared else None)
    return Offer(class_name(local), _context_of(local), extent, found)


def _inner_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors of which ``tensor`` consists, by their attributes, joined by dots where classes are nested.

    Raises:
        CheckpointError: one is of a class that has no inner tensors, nor memory of its own.
    """
    found = {}
    for name in _flattened(tensor)[0]:
        inner = Part(getattr(tensor, name)).local
        if _is_wrapper(inner):
            found.update({f"{name}.{deeper}": each for deeper, each in _inner_of(inner).items()})
        elif type(inner) is torch.Tensor:
            found[name] = inner
        else:
            raise CheckpointError(
                f"the inner tensor {name!r} of a {class_name(tensor)} is a {class_name(inner)}, which has "
                "__torch_dispatch__ and no __tensor_flatten__. Give that class __tensor_flatten__ and "
                "__tensor_unflatten__."
            )
    return found


def _flattened(tensor: Any) -> tuple[list[str], Any]:
    names, context = tensor.__tensor_flatten__()
    return list(names), context


_NO_INNER: dict[str, torch.Tensor] = {}


def _ratios(tensor: torch.Tensor, inner: Mapping[str, torch.Tensor], dim: int) -> dict[str, Ratio]:
    """How each of the ``inner`` tensors is cut where ``tensor`` is cut in two along ``dim``."""
    size = tensor.shape[dim]
    if size < 2:
        return dict.fromkeys(inner)
    try:
        halves = tensor.chunk(2, dim)
        pieces = [_inner_of(half) if _is_wrapper(half) else _NO_INNER for half in halves]
    except Exception:  # code of the class: whatever it raises says that it cannot be cut along this dim
        return dict.fromkeys(inner, OTHERWISE)
    sizes = [half.shape[dim] for half in halves]
    return {name: _ratio(each, [piece.get(name) for piece in pieces], sizes) for name, each in inner.items()}


def _ratio(whole: torch.Tensor, pieces: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> Ratio:
    """How ``whole`` is cut into ``pieces``, where the outer tensor is cut into pieces of ``sizes``."""
    if all(piece is not None and _same(piece, whole) for piece in pieces):
        return UNCUT
    for dim, length in enumerate(whole.shape):
        count, rest = divmod(length, sum(sizes))
        if count and not rest:
            expected = whole.split([size * count for size in sizes], dim)
            if all(piece is not None and _same(piece, e) for piece, e in zip(pieces, expected, strict=True)):
                return dim, count
    return OTHERWISE


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same bytes; the same memory without a look at it."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def class_name(tensor: torch.Tensor) -> str:
    """Of the class of ``tensor``, with its module."""
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def _context_of(tensor: torch.Tensor) -> Any:
    names, context = _flattened(tensor)
    deeper = {n: _context_of(inner) for n in names if _is_wrapper(inner := getattr(tensor, n))}
    return [_described(context), deeper] if deeper else _described(context)


def _described(value: Any) -> Any:
    """``value`` as JSON has it. Of objects only the class: what their texts say may change from run to run."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, (torch.dtype, torch.device, Enum)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _described(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_described(each) for each in value]
    return type(value).__qualname__


# -- what all ranks have


@dataclass(frozen=True)
class _Cut:
    """How an inner tensor is saved as one tensor: its whole shape, and a ratio for each dim of the outer one."""

    shape: tuple[int, ...]
    ratios: tuple[Ratio, ...]

    @staticmethod
    def decoded(shape: Sequence[int], ratios: Sequence[Sequence[int] | None]) -> _Cut:
        """As JSON has its attributes."""
        return _Cut(tuple(shape), tuple(None if ratio is None else (ratio[0], ratio[1]) for ratio in ratios))

    def extent_at(self, outer: Extent) -> Extent:
        """The part that belongs to the part ``outer``.

        Raises:
            ValueError: the outer tensor is cut along a dim along which this one cannot be.
        """
        ranges: list[Ranges] = [(range(size),) if size else () for size in self.shape]
        for dim, ratio in enumerate(self.ratios):
            if ratio is None or ratio == OTHERWISE:
                if outer.ranges[dim] != _whole(outer, dim):
                    raise ValueError(f"it cannot be cut along dim {dim}")
            elif ratio != UNCUT:
                own, count = ratio
                ranges[own] = tuple(range(r.start * count, r.stop * count) for r in outer.ranges[dim])
        return Extent(self.shape, tuple(ranges))


@dataclass(frozen=True)
class Record:
    """What a checkpoint says about a tensor that is saved as inner tensors.

    Attributes:
        path: of the outer tensor in the nested state dict.
        kind: name of its class.
        shape: of the whole outer tensor.
        dtype: of the outer tensor, without ``torch.``.
        local_shape: of the part of each rank, if that is the same; else ``None``, and there is no context.
        context: plain values that belong to such a part.
        inner: how each one is cut; ``None`` for one that is saved shard by shard.
    """

    path: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    dtype: str
    local_shape: tuple[int, ...] | None
    context: Any
    inner: Mapping[str, _Cut | None]

    def encoded(self) -> str:
        inner = {name: None if cut is None else [cut.shape, cut.ratios] for name, cut in self.inner.items()}
        return json.dumps({**vars(self), "inner": inner})

    @staticmethod
    def decoded(text: str) -> Record:
        values = json.loads(text)
        for name in ("path", "shape"):
            values[name] = tuple(values[name])
        local = values["local_shape"]
        values["local_shape"] = None if local is None else tuple(local)
        cuts = {name: None if cut is None else _Cut.decoded(*cut) for name, cut in values["inner"].items()}
        return Record(**values | {"inner": cuts})


@dataclass(frozen=True)
class Agreed:
    """Of a tensor with inner tensors, on all ranks together. Attributes are those of :class:`Record`."""

    local_shape: tuple[int, ...] | None
    context: Any
    inner: Mapping[str, _Cut | None]

    def record(self, path: tuple[str, ...], part: Part) -> Record:
        kind, dtype = class_name(part.local), dtype_name(part.value.dtype)
        return Record(path, kind, part.shape, dtype, self.local_shape, self.context, self.inner)


def agreed(offers: Sequence[Mapping[str, Offer]]) -> dict[str, Agreed]:
    """Out of the offers of all ranks, by key of the outer tensor.

    Raises:
        CheckpointError: ranks have another class under one key.
    """
    by_key: dict[str, list[Offer]] = {}
    for of_rank in offers:
        for key, offer in of_rank.items():
            by_key.setdefault(key, []).append(offer)
    return {key: _agreed(key, of_ranks) for key, of_ranks in by_key.items()}


def _agreed(key: str, offers: Sequence[Offer]) -> Agreed:
    kinds = sorted({offer.kind for offer in offers})
    if len(kinds) > 1:
        raise CheckpointError(f"{key} is of another class on each rank: {', '.join(kinds)}.")
    filled = [offer for offer in offers if not offer.extent.is_empty] or list(offers)
    names = dict.fromkeys(name for offer in filled for name in offer.inner)
    cuts = {name: _cut_of(name, filled) for name in names}
    first, shape = filled[0], filled[0].extent.local_shape
    if any(offer.extent.local_shape != shape or offer.context != first.context for offer in filled):
        return Agreed(None, None, cuts)
    return Agreed(shape, first.context, cuts)


def _cut_of(name: str, offers: Sequence[Offer]) -> _Cut | None:
    """How the inner tensor ``name`` is cut, if it can be saved as one tensor."""
    if any(name not in offer.inner for offer in offers):
        return None
    own = [(offer.extent, offer.inner[name]) for offer in offers]
    outer, first = own[0]
    ratios = tuple(_common([inner.ratios[dim] for _, inner in own]) for dim in range(len(outer.shape)))
    sizes = list(first.shape)
    cut_dims = [ratio[0] for ratio in ratios if ratio is not None and ratio[0] >= 0]
    if len(set(cut_dims)) < len(cut_dims):
        return None
    for dim, ratio in enumerate(ratios):
        if ratio is not None and ratio[0] >= 0:
            sizes[ratio[0]] = outer.shape[dim] * ratio[1]
    cut = _Cut(tuple(sizes), ratios)
    values: dict[tuple[Ranges, ...], int | None] = {}
    for extent, inner in own:
        try:
            found = cut.extent_at(extent)
        except ValueError:
            return None
        if found.local_shape != inner.shape or values.setdefault(found.ranges, inner.checksum) != inner.checksum:
            return None
    return cut


def _common(ratios: Sequence[Ratio]) -> Ratio:
    known = {ratio for ratio in ratios if ratio is not None}
    return None if not known else known.pop() if len(known) == 1 else OTHERWISE


def _whole(extent: Extent, dim: int) -> Ranges:
    size = extent.shape[dim]
    return (range(size),) if size else ()


# -- the parts that are saved and loaded


def parts_of(part: Part, inner: Mapping[str, _Cut | None]) -> dict[str, Part]:
    """What this rank saves of ``part``: its inner tensors, by what follows the key of the outer one.

    A rank without an element of the outer tensor saves nothing. What it has of tensors that are not cut may be stale.
    """
    if part.extent.is_empty:
        return {}
    found = {}
    for name, tensor in _inner_of(part.local).items():
        cut = inner[name]
        if cut is not None:
            found[f".{name}"] = Part(tensor, extent=cut.extent_at(part.extent))
        else:
            found[f".{name}{_at(part.extent)}"] = Part(tensor)
    return found


def _at(extent: Extent) -> str:
    """Which part of the outer tensor a shard is."""
    return "@" + ",".join("+".join(f"{r.start}:{r.stop}" for r in ranges) for ranges in extent.ranges)


@dataclass(frozen=True)
class Wanted:
    """What is to be loaded into a tensor with inner tensors.

    Attributes:
        parts: by what follows the key of the outer tensor.
        absent: inner tensors of the checkpoint that are ``None`` here, by attribute, with memory for them.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    absent: dict[str, torch.Tensor] = field(default_factory=dict)


Spec = tuple[tuple[int, ...], torch.dtype]
"""Whole shape and dtype of what is saved under a key."""


def wanted_of(part: Part, record: Record, name: str, saved: Callable[[str], Spec | None], mismatch: Mismatch) -> Wanted:
    """What of the checkpoint goes to ``part``.

    Args:
        part: of the model.
        record: of the checkpoint.
        name: of the tensor, for ``mismatch``.
        saved: gives what is under a key, by what follows the key of the outer tensor.
        mismatch: is told all differences.
    """
    wanted = Wanted()
    if not _fits(part, record, name, mismatch):
        return wanted
    inner = _inner_of(part.local)
    for attribute in inner.keys() - record.inner.keys():
        mismatch.classes[f"{name}.{attribute}"] = f"not saved, but this {record.kind} has it"
    for attribute, cut in record.inner.items():
        label = f"{name}.{attribute}"
        try:
            extent = None if cut is None else cut.extent_at(part.extent)
        except ValueError as error:
            if not part.extent.is_empty:
                mismatch.classes[label] = f"{error}. {_SAME_MESH}"
            continue
        suffix = f".{attribute}{_at(part.extent) if extent is None else ''}"
        spec = saved(suffix)
        if spec is None:
            if not part.extent.is_empty:
                mismatch.classes[label] = f"saved as other shards than that of {_at(part.extent)[1:]}. {_SAME_MESH}"
            continue
        shape, dtype = spec[0] if extent is None else extent.local_shape, spec[1]
        tensor = inner.get(attribute)
        if tensor is None:
            if "." in attribute or getattr(part.local, attribute, part.local) is not None:
                mismatch.classes[label] = f"saved, but this {record.kind} does not have it"
                continue
            tensor = wanted.absent[attribute] = torch.empty(shape, dtype=dtype, device=part.local.device)
        if tuple(tensor.shape) != shape:
            mismatch.shapes[label] = differ(shape, tuple(tensor.shape))
        elif tensor.dtype != dtype:
            mismatch.dtypes[label] = differ(dtype_name(dtype), dtype_name(tensor.dtype))
        wanted.parts[suffix] = Part(tensor, extent=extent)
    return wanted


_SAME_MESH = "Load it on the mesh, and as many ranks, that saved it"


def _fits(part: Part, record: Record, name: str, mismatch: Mismatch) -> bool:
    """Whether the outer tensors are alike."""
    local = part.local
    if record.kind != class_name(local):
        mismatch.classes[name] = differ(f"a {record.kind}", f"a {class_name(local)}")
    elif record.shape != part.shape:
        mismatch.shapes[name] = differ(record.shape, part.shape)
    elif record.local_shape == tuple(local.shape) and record.context != _context_of(local):
        mismatch.classes[name] = differ(f"a {record.kind} with {record.context}", f"one with {_context_of(local)}")
    else:
        return True
    return False
