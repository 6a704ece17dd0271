"""Tensors inside what modules take and return: pytrees, dataclasses, mappings that nobody registered."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """Every tensor in ``tree``, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        else:
            for child in _children(leaf):
                yield from tensors_in(child)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with ``function`` applied to every tensor; the same object where no tensor changed."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    leaves, spec = tree_flatten(tree)
    mapped = [_map_leaf(function, leaf) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return tree
    return mapped[0] if leaves[0] is tree else tree_unflatten(mapped, spec)


def _map_leaf(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return function(leaf)
    if _is_dataclass_value(leaf):
        names = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
        changed = _changed(function, {name: getattr(leaf, name) for name in names})
        new = copy.copy(leaf) if changed else leaf
        for name, value in changed.items():
            object.__setattr__(new, name, value)  # frozen dataclasses too
        return new
    if isinstance(leaf, MutableMapping):
        changed = _changed(function, dict(leaf))
        new = copy.copy(leaf) if changed else leaf
        for key, value in changed.items():
            new[key] = value
        return new
    return leaf


def _changed(function: Callable[[torch.Tensor], torch.Tensor], items: dict[Any, Any]) -> dict[Any, Any]:
    mapped = {key: map_tensors(function, value) for key, value in items.items()}
    return {key: value for key, value in mapped.items() if value is not items[key]}


def _children(leaf: Any) -> list[Any]:
    if _is_dataclass_value(leaf):
        return [getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
    if isinstance(leaf, MutableMapping):
        return list(leaf.values())
    return []


def _is_dataclass_value(leaf: object) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
