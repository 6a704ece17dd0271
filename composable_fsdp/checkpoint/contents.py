"""What is in a checkpoint, and under which keys.

========================================  =============================================================
``model.<name>``                          parameters, buffers, extra states of modules
``optimizer.state.<name>.<key>``          state for the parameter of that name
``optimizer.param_groups``                list of dicts, with names in ``params``
``communication.<name>.residual``         what codecs with error feedback keep; ``.rounds`` beside it
``ranks.<rank>.extra``, ``….random``      what each rank gave as ``extra``; its random number generators
========================================  =============================================================

Names are those of the model before anything wrapped it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_fsdp.checkpoint.names import entries_of, parameter_names
from composable_fsdp.checkpoint.plan import Contents, Part
from composable_fsdp.communication_state import CommunicationState
from composable_fsdp.errors import CheckpointError
from composable_fsdp.placed import extent_of, shardings_of, units_below
from composable_fsdp.sharding import ParameterSharding

__all__ = [
    "communication_of",
    "contents_of",
    "get_random_state",
    "is_extra_state",
    "named_parameters",
    "names_of",
    "part_of",
    "set_random_state",
]


def contents_of(model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any], rank: int) -> Contents:
    """All that this rank has to save. Tensors are not copied."""
    contents = Contents()
    _add_model(contents, model)
    if optimizer is not None:
        _add_optimizer(contents, model, optimizer)
    for name, kept in communication_of(model).items():
        contents.add_tensor(("communication", name, "residual"), part_of(kept["residual"], None, name))
        contents.add_object(("communication", name, "rounds"), kept["rounds"])
    contents.add_object(("ranks", str(rank), "extra"), dict(extra))
    contents.add_object(("ranks", str(rank), "random"), get_random_state())
    return contents


def part_of(tensor: torch.Tensor, sharding: ParameterSharding | None, name: str) -> Part:
    """What this rank holds of ``tensor``, in its own memory."""
    if tensor.is_meta:
        raise CheckpointError(
            f"{name} is on the meta device, where nothing can be saved or loaded. Call composable_fsdp.to_empty(model, "
            'device="cpu" or the accelerator) first.'
        )
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return Part(extent_of(tensor, sharding), local.detach())


def is_extra_state(name: str) -> bool:
    """Whether what has this name in a state dict came from ``get_extra_state``."""
    return name.rpartition(".")[2] == "_extra_state"


def _add_model(contents: Contents, model: nn.Module) -> None:
    first: dict[int, str] = {}
    for name, entry in entries_of(model).items():
        if not entry.is_tensor or is_extra_state(name):
            contents.add_object(("model", name), entry.value)
        elif id(entry.value) in first:
            contents.add_alias(("model", name), ("model", first[id(entry.value)]))
        else:
            first[id(entry.value)] = name
            contents.add_tensor(("model", name), part_of(entry.value, entry.sharding, name))


def names_of(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters of ``optimizer``, by group.

    Raises:
        CheckpointError: it has parameters that the model does not have.
    """
    names = parameter_names(model)
    found = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    unknown = [f"{i}.{j}" for i, group in enumerate(found) for j, name in enumerate(group) if not name]
    if unknown:
        raise CheckpointError(
            f"{type(optimizer).__name__} has parameters that the model does not have (group.index: "
            f"{', '.join(unknown[:10])}{', …' if len(unknown) > 10 else ''}). Make it of model.parameters(), after "
            "fully_shard."
        )
    return found


def _add_optimizer(contents: Contents, model: nn.Module, optimizer: Optimizer) -> None:
    names, shardings = names_of(model, optimizer), shardings_of(units_below(model))
    for name, parameter in named_parameters(names, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            path = ("optimizer", "state", name, str(key))
            if isinstance(value, torch.Tensor):
                contents.add_tensor(path, part_of(value, shardings.get(id(parameter)), f"{name}.{key}"))
            else:
                contents.add_object(path, value)
    groups = [{**group, "params": own} for own, group in zip(names, optimizer.param_groups, strict=True)]
    contents.add_object(("optimizer", "param_groups"), groups)


def named_parameters(names: list[list[str]], optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters of ``optimizer``, group after group."""
    for own, group in zip(names, optimizer.param_groups, strict=True):
        yield from zip(own, group["params"], strict=True)


def communication_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What codecs keep from step to step: ``residual`` and ``rounds`` by name; nothing in a model without shards."""
    return CommunicationState(model).state_dict() if units_below(model) else {}


def get_random_state() -> dict[str, Any]:
    """Of Python, torch on CPU and on the current accelerator, and numpy where it is imported."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    accelerator = _accelerator()
    if accelerator is not None:
        state[accelerator] = torch.get_device_module(accelerator).get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Goes on from what :func:`get_random_state` gave, for what there is here."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    accelerator = _accelerator()
    if accelerator is not None and accelerator in state:
        torch.get_device_module(accelerator).set_rng_state(state[accelerator])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else device.type
