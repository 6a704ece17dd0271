"""Tensors in the arguments and outputs of modules: pytrees, dataclasses and unregistered mappings."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from operator import is_
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["map_tensors", "tensors_in"]

Map = Callable[[torch.Tensor], torch.Tensor]

_ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
"""Types without tensors, checked first because a pytree traversal costs more than the rest of a hook."""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return every tensor in ``tree``, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if type(tree) in _ATOMS:
        return []
    return [tensor for child in _children(tree) for tensor in tensors_in(child)]


def map_tensors(function: Map, tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to every tensor, or the same object if no tensor changed."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    kind = type(tree)
    if kind in _ATOMS:
        return tree
    if kind is tuple or kind is list:
        mapped = [
            function(child) if isinstance(child, torch.Tensor) else map_tensors(function, child) for child in tree
        ]
        return tree if all(map(is_, mapped, tree)) else kind(mapped)
    if kind is dict:
        return tree | changed if tree and (changed := _changed(function, tree)) else tree
    if _is_dataclass_value(tree):
        return _with_fields(tree, _changed(function, _fields(tree)))
    leaves, spec = tree_flatten(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return _with_items(tree, _changed(function, dict(tree))) if isinstance(tree, MutableMapping) else tree
    mapped = [map_tensors(function, leaf) for leaf in leaves]
    return tree if all(map(is_, mapped, leaves)) else tree_unflatten(mapped, spec)


def _children(tree: Any) -> Any:
    if type(tree) is tuple or type(tree) is list:
        return tree
    if type(tree) is dict:
        return tree.values()
    if _is_dataclass_value(tree):
        return _fields(tree).values()
    leaves = tree_flatten(tree)[0]
    if len(leaves) == 1 and leaves[0] is tree:
        return tree.values() if isinstance(tree, Mapping) else ()
    return leaves


def _changed(function: Map, items: dict[Any, Any]) -> dict[Any, Any]:
    mapped = {key: map_tensors(function, value) for key, value in items.items()}
    return {key: value for key, value in mapped.items() if value is not items[key]}


def _is_dataclass_value(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    new = copy.copy(value) if changed else value
    for name, item in changed.items():
        object.__setattr__(new, name, item)  # frozen dataclasses too
        if isinstance(new, MutableMapping) and name in new:  # fields are items too, as in outputs of transformers
            new[name] = item
    return new


def _with_items(mapping: Any, changed: dict[Any, Any]) -> Any:
    new = copy.copy(mapping) if changed else mapping
    for key, item in changed.items():
        new[key] = item
    return new
