"""Saved settings of an optimizer's groups of parameters: whether they are all there, and putting them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["lacking", "restored"]

_MEMBERS = ("params", "param_names")


def lacking(optimizer: Optimizer, index: int, saved: Mapping[str, Any]) -> list[str]:
    """A sentence about what the group of that ``index`` needs and ``saved`` has not, if there is anything.

    An optimizer needs what it has defaults for. What else is in a group, schedulers have put there.
    """
    absent = [key for key in optimizer.param_groups[index] if key in optimizer.defaults and key not in saved]
    return [f"param_group {index} has settings that the saved one lacks: {', '.join(absent)}"] if absent else []


def restored(group: Mapping[str, Any], saved: Mapping[str, Any], numbers: Iterable[int]) -> dict[str, Any]:
    """``group`` as ``optimizer.load_state_dict`` takes it, with the settings of ``saved`` as far as there are any.

    Tensors are on the devices where they are in ``group``.
    """
    settings = {key: _moved(value, group.get(key)) for key, value in saved.items() if key not in _MEMBERS}
    return {**group, **settings, "params": list(numbers)}


def _moved(value: Any, own: object) -> Any:
    return value.to(own.device) if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) else value
