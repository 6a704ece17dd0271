"""Paths in nested state dicts, also those of other libraries, converted to the layout of our checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element

from composable_fsdp.checkpoint._dcp.contents import Path
from composable_fsdp.errors import CheckpointError

__all__ = ["canonical", "flatten", "unflatten"]

_MODEL = ("model", "model_state_dict", "state_dict")
_OPTIMIZER = ("optimizer", "optimizer_state_dict")


def canonical(paths: list[Path]) -> list[Path]:
    """Rename ``paths`` to our layout. If none of them is in a model, values at the top level are the model.

    Example: ``("state_dict", "w")`` becomes ``("model", "w")``. So does ``("w",)`` if there is no model.
    """
    renamed: list[Path] = []
    for first, *rest in paths:
        for known in (_MODEL, _OPTIMIZER):
            first = known[0] if rest and first in known else first
        renamed.append((first, *rest))
    if any(path[0] == _MODEL[0] for path in renamed):
        return renamed
    return [(_MODEL[0], *path) if len(path) == 1 else path for path in renamed]


_OTHERS = {"averages": 3, "classes": 2, "communication": 3, "ranks": 3}
_DEPTHS = {**dict.fromkeys(_MODEL, 2), **dict.fromkeys(_OPTIMIZER, 4), **_OTHERS}


def flatten(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield all values in nested mappings, with their paths below ``path``.

    A mapping at a path that our checkpoints do not have stays one object unless it contains tensors.
    """
    if isinstance(value, Mapping) and path in [(name,) for name in _OPTIMIZER]:
        value = _by_name(value)
    inside = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if path and inside:
        depth = _DEPTHS.get(path[0])
        inside = len(path) < depth if depth else any(isinstance(each, torch.Tensor) for each in value.values())
    if not inside:
        yield path, value
        return
    for key, each in value.items():
        yield from flatten(each, (*path, key))


def _by_name(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's state dict with parameter names in place of numbers, if its groups have names.

    Raises:
        CheckpointError: the groups have no names.
    """
    groups = state.get("param_groups", [])
    numbers = [number for group in groups for number in group["params"]]
    if not any(isinstance(number, int) for number in numbers):
        return state
    if not all("param_names" in group for group in groups):
        raise CheckpointError(
            "the optimizer's state is by number, and only the model says which parameters these are. Leave it out "
            "(model_only), or load the file and save what rekey_optimizer_state_dict makes of it."
        )
    names = dict(zip(numbers, (name for group in groups for name in group["param_names"]), strict=True))
    return {
        **state,
        "state": {names[number]: entry for number, entry in state["state"].items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in groups],
    }


def unflatten(values: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """Return the nested state dict with ``values`` at their paths."""
    tree: dict[str, Any] = {}
    for path, value in values:
        set_element(tree, path, value)
    return tree
