"""The state of an optimizer as trees, and what each tensor of it is on the mesh of its parameter.

A tree is a dict, list, tuple or deque of trees; everything else is a leaf. So are lists and tuples without tensors and
dicts, such as ``betas``, as ``torch.distributed.checkpoint`` has it. The path of a leaf has the keys and indices that
lead to it. Its *kind* says what a fresh optimizer needs in its place: shapes do not, since a preconditioner may have
its parameter's shape. A *layout* is the tree with kinds in place of leaves, of plain values that can be pickled.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from composable_fsdp._core.mesh import as_dtensor
from composable_fsdp._core.params import local_part
from composable_fsdp._extents import extent_of, like
from composable_fsdp.checkpoint._state_dict.tensors import LocalShard
from composable_fsdp.errors import CheckpointError

TreePath = tuple[Any, ...]
Layout = Any
"""A kind, or a tuple: the name of the container's type, a deque's ``maxlen``, and pairs of a key and a layout."""

OBJECT = "object"
AS_PARAMETER = "sharded"
"""A DTensor with the shape and the placements of its parameter."""
PLAIN = "plain"
"""A plain tensor, equal on all ranks, beside a parameter that is a DTensor."""
OPAQUE = "opaque"
"""In state dicts: one sharded like its parameter, whose class cannot be cut (``pickled_shards.py``)."""
UNKNOWN = "unknown"
"""A tensor of another program, or the state of a plain parameter. All others are placements, such as "S1,R"."""

_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "deque": deque}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict}


def items_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and values of a container, or ``None`` for a leaf."""
    if type(value) in _MAPPINGS.values():
        return list(value.items()) or None
    is_opened = type(value) in _SEQUENCES.values() and any(_is_opened(each) for each in value)
    return list(enumerate(value)) if is_opened else None


def _is_opened(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, Mapping)) or items_of(value) is not None


def leaves(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    items = items_of(tree)
    if items is None:
        yield path, tree
        return
    for key, value in items:
        yield from leaves(value, (*path, key))


def layout_of(tree: Any, kind: Callable[[Any], str]) -> Layout:
    items = items_of(tree)
    if items is None:
        return kind(tree)
    return type(tree).__name__, getattr(tree, "maxlen", None), [(key, layout_of(v, kind)) for key, v in items]


def built(layout: Layout, leaf: Callable[[TreePath, str], Any], path: TreePath = ()) -> Any:
    """Return the tree of ``layout`` with what ``leaf`` returns for each path and kind."""
    if isinstance(layout, str):
        return leaf(path, layout)
    name, maxlen, items = layout
    values = [built(each, leaf, (*path, key)) for key, each in items]
    if name in _MAPPINGS:
        return _MAPPINGS[name](zip((key for key, _ in items), values, strict=True))
    return deque(values, maxlen) if name == "deque" else _SEQUENCES[name](values)


def kinds_of(layout: Layout) -> dict[TreePath, str]:
    found: dict[TreePath, str] = {}
    built(layout, found.setdefault)
    return found


def mapped(leaf: Callable[[TreePath, Any], Any], tree: Any) -> Any:
    return built(layout_of(tree, lambda _: OBJECT), lambda path, _: leaf(path, at(tree, path)))


def at(tree: Any, path: TreePath) -> Any:
    """Return what ``tree`` has at ``path``, or ``None``."""
    for key in path:
        items = items_of(tree)
        tree = None if items is None else dict(items).get(key)
    return tree


def layout_of_paths(kinds: Mapping[TreePath, str], existing: Any) -> Layout:
    """Return the layout of a tree that ``torch.distributed.checkpoint`` saved, which records the paths of leaves only.

    There an int is an index, and a key of a dict a string. Tuples, deques and other keys are those of ``existing``.
    """
    if () in kinds:
        return kinds[()]
    below: dict[Any, dict[TreePath, str]] = {}
    for (key, *path), kind in kinds.items():
        below.setdefault(key, {})[tuple(path)] = kind
    is_sequence = all(isinstance(key, int) for key in below)
    name = type(existing).__name__
    if name not in (_SEQUENCES if is_sequence else _MAPPINGS):
        name = "list" if is_sequence else "dict"
    keys = {str(key): key for key in existing} if not is_sequence and isinstance(existing, Mapping) else {}
    order = sorted(below) if is_sequence else list(below)
    items = [(keys.get(key, key), layout_of_paths(below[key], at(existing, (keys.get(key, key),)))) for key in order]
    return name, getattr(existing, "maxlen", None) if name == "deque" else None, items


# -- kinds


def kind_of(value: Any, parameter: torch.Tensor, name: str) -> str:
    """Return the kind of a leaf in the state of ``parameter``.

    Raises:
        CheckpointError: one rank's part of it would be saved as all of it. The text calls it ``name``.
    """
    if not isinstance(value, torch.Tensor):
        if holds_dtensor(value):
            raise CheckpointError(
                f"{name} is a {type(value).__name__} that holds a DTensor, of which only this rank's shard would be "
                "saved. Keep it in a dict, list, tuple or deque."
            )
        return OBJECT
    if not isinstance(value, DTensor):
        return PLAIN if isinstance(parameter, DTensor) else UNKNOWN
    if not isinstance(parameter, DTensor):
        raise CheckpointError(f"{name} is a DTensor of no sharded parameter. Keep it in the state of a parameter.")
    is_alike = value.shape == parameter.shape and value.placements == parameter.placements
    if is_alike and value.device_mesh == parameter.device_mesh:
        return AS_PARAMETER
    if any(placement.is_partial() for placement in value.placements):
        raise CheckpointError(
            f"{name} is a DTensor of partial sums, {tuple(value.placements)}. Keep it reduced: redistribute it."
        )
    return ",".join(_text_of(placement) for placement in value.placements)


def _text_of(placement: Placement) -> str:
    if placement.is_replicate():
        return "R"
    shard = cast(Any, placement)
    return f"S{shard.dim}" if type(placement) is Shard else f"S{shard.dim}x{shard.split_factor}"


def _placement_of(text: str) -> Placement:
    dim, _, blocks = text[1:].partition("x")
    if text == "R":
        return Replicate()
    return _StridedShard(int(dim), split_factor=int(blocks)) if blocks else Shard(int(dim))


class _Finder(pickle.Pickler):
    """Looks for DTensors in a value as far as it would be pickled, and copies no tensor."""

    found = False

    def reducer_override(self, value: Any) -> Any:
        self.found |= isinstance(value, DTensor)
        return (int, ()) if isinstance(value, torch.Tensor) else NotImplemented


def holds_dtensor(value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return False
    finder = _Finder(BytesIO())
    try:
        finder.dump(value)
    except Exception:  # what cannot be pickled is refused by name when it is
        return finder.found
    return finder.found


def new_state(kind: str, key: Any, shape: tuple[int, ...], dtype: torch.dtype, parameter: torch.Tensor) -> torch.Tensor:
    """Return memory for a tensor of ``kind`` and of global ``shape`` that is ``key`` in the state of ``parameter``.

    One of which nothing is known is sharded like the parameter if it has its shape, and else replicated; a scalar is
    plain. Plain scalars are on the CPU.
    """
    local = local_part(parameter)
    is_sharded = kind == AS_PARAMETER or (kind == UNKNOWN and (shape != () or key != "step"))
    if is_sharded and shape == tuple(parameter.shape):
        plain = LocalShard(local).local
        if type(plain) is torch.Tensor:
            return like(parameter, torch.empty_like(plain, dtype=dtype, requires_grad=False))
        return like(parameter, torch.empty(local.shape, dtype=dtype, device=local.device))  # of inner tensors
    if kind == PLAIN or (kind == UNKNOWN and not shape) or not isinstance(parameter, DTensor):
        return torch.empty(shape, dtype=dtype, device=local.device if shape else "cpu")
    mesh = parameter.device_mesh
    texts = [] if kind in (AS_PARAMETER, UNKNOWN) else kind.split(",")
    if len(texts) != mesh.ndim:
        texts = ["R"] * mesh.ndim
    empty = torch.empty(0, dtype=dtype, device=local.device)
    found = as_dtensor(empty, mesh, [_placement_of(text) for text in texts], shape)
    return like(found, torch.empty(extent_of(found).local_shape, dtype=dtype, device=local.device))
