"""Saved settings of an optimizer's parameter groups: a check for missing ones, and their restoration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["lacking", "restored"]

_MEMBERS = ("params", "param_names")


def lacking(optimizer: Optimizer, index: int, saved: Mapping[str, Any]) -> list[str]:
    """Return an error text if ``saved`` lacks settings that the optimizer's group ``index`` needs, or an empty list.

    An optimizer needs the settings that it has defaults for. Schedulers have added the others.
    """
    absent = [key for key in optimizer.param_groups[index] if key in optimizer.defaults and key not in saved]
    return [f"param_group {index} has settings that the saved one lacks: {', '.join(absent)}"] if absent else []


def restored(group: Mapping[str, Any], saved: Mapping[str, Any], numbers: Iterable[int]) -> dict[str, Any]:
    """Return ``group`` with the settings of ``saved``, as ``optimizer.load_state_dict`` takes it.

    Tensors are moved to the devices that they have in ``group``.
    """
    settings = {key: _moved(value, group.get(key)) for key, value in saved.items() if key not in _MEMBERS}
    return {**group, **settings, "params": list(numbers)}


def _moved(value: Any, own: object) -> Any:
    return value.to(own.device) if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) else value
