"""Which parameter is which: between an optimizer's numbers, its parameter objects, and names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_fsdp._layout.block import Cut, Extent
from composable_fsdp._runtime.params.sharded_param import ShardedParameter, find_taken, local_part
from composable_fsdp._runtime.shard_extent import like
from composable_fsdp._sharding.param_sharding import ParameterSharding
from composable_fsdp.checkpoint._state_dict.names import at_rest, parameter_names, plain_name
from composable_fsdp.errors import CheckpointError, ParameterError

__all__ = ["Member", "members_of", "rekey_optimizer", "rekey_optimizer_state_dict"]


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of an optimizer, its first name in the model, and how ``fully_shard`` cut it, if it did."""

    name: str
    parameter: torch.Tensor
    sharding: ParameterSharding | None


def members_of(model: nn.Module, optimizer: Optimizer) -> list[list[Member]]:
    """The members of each group of ``optimizer``.

    Raises:
        CheckpointError: some are not parameters of ``model``, or not any more. The text says which, and what to do.
    """
    shardings, names = at_rest(model), parameter_names(model)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    unmanaged = [parameter for group in groups for parameter in group if id(parameter) not in names]
    taken = [found.description for parameter in unmanaged if (found := find_taken(parameter)) is not None]
    if taken:
        raise CheckpointError(
            f"this {type(optimizer).__name__} was made before fully_shard, and holds what these parameters were then: "
            f"{taken}. Call rekey_optimizer(optimizer, model), or make the optimizer after fully_shard."
        )
    if unmanaged:
        raise CheckpointError(
            f"this {type(optimizer).__name__} holds parameters that are not the model's, of shapes "
            f"{[tuple(parameter.shape) for parameter in unmanaged]}. Pass the model whose parameters() it was made of."
        )
    return [[Member(names[id(p)], p, shardings.get(id(p))) for p in group] for group in groups]


# -- optimizers that were made before fully_shard


@torch.no_grad()
def rekey_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Gives an optimizer that was made before ``fully_shard`` the sharded parameters in place of the original ones.

    In place, with its groups, their options, and state: tensors of a parameter's shape are cut as the parameter was.
    Without this it would step parameters that nothing uses. Parameters that the model still has stay.

    Raises:
        ParameterError: some parameters are neither the model's nor what its parameters were; nothing has changed then.
    """
    at_rest(model)
    names = parameter_names(model)
    replaced: dict[torch.Tensor, ShardedParameter] = {}
    unmanaged = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) not in names):
        taken = find_taken(parameter)
        sharded = None if taken is None else taken.parameter()
        if sharded is None or id(sharded.sharded) not in names:
            unmanaged.append(tuple(parameter.shape))
        else:
            replaced[parameter] = sharded
    if unmanaged:
        raise ParameterError(
            f"this {type(optimizer).__name__} holds parameters of shapes {unmanaged} that are neither the model's nor "
            "were before fully_shard. Pass the model whose parameters() the optimizer was made of."
        )
    for group in optimizer.param_groups:
        group["params"] = [replaced[p].sharded if p in replaced else p for p in group["params"]]
    for original, sharded in replaced.items():
        if original in optimizer.state:
            entry = optimizer.state.pop(original)
            optimizer.state[sharded.sharded] = {k: _cut(v, original, sharded) for k, v in entry.items()}


def _cut(value: Any, original: torch.Tensor, parameter: ShardedParameter) -> Any:
    """This rank's part of a tensor of the parameter's shape, in memory of its own; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != original.shape or not value.ndim:
        return value
    shard, whole = parameter.sharding.axes.shard, local_part(value)
    part = Extent.after(tuple(whole.shape), [Cut(parameter.dim, shard.size, shard.rank)]).take(whole)
    own = torch.empty_like(part, device=parameter.local.device, memory_format=torch.contiguous_format).copy_(part)
    return like(cast(DTensor, parameter.sharded), own)


# -- state dicts of optimizers themselves


def rekey_optimizer_state_dict(
    state: Mapping[str, Any],
    model: nn.Module,
    to: Literal["names", "ids"] = "names",
    *,
    optimizer: Optimizer | None = None,
) -> dict[str, Any]:
    """A state dict of an optimizer with names for the numbers of parameters, or numbers for their names.

    ``"names"`` makes of ``optimizer.state_dict()`` of a plain optimizer what :func:`load_optimizer_state_dict` takes;
    ``"ids"`` the reverse. Tensors are not touched. Torch's FSDP1 has it as ``rekey_optim_state_dict``.

    Args:
        state: with ``"state"`` and ``"param_groups"``, of an optimizer over parameters of ``model``.
        model: sharded or not.
        to: ``"names"`` or ``"ids"``.
        optimizer: whose parameters the numbers count. By default all of ``model.parameters()``, in one group, unless
            the optimizer was made of ``named_parameters()``, so that its groups have the names.

    Raises:
        CheckpointError: the state dict has another number of parameters, or some that the model has not; or more than
            one group, so that the order of parameters is not known without ``optimizer``.
    """
    at_rest(model)
    order = _order_of(model, optimizer)
    if to == "names":
        new_keys: dict[Any, Any] = dict(_numbered(state, order, optimizer is not None))
        groups = [dict(group) for group in state["param_groups"]]
    else:
        position = {name: i for i, name in enumerate(order)}
        groups = [{**g, "params": [plain_name(n) for n in g["params"]]} for g in state["param_groups"]]
        unknown = [name for group in groups for name in group["params"] if name not in position]
        if unknown:
            raise CheckpointError(f"the state dict has parameters that the model or optimizer has not: {unknown}.")
        groups = [{**g, "params": sorted(g["params"], key=position.__getitem__)} for g in groups]
        groups.sort(key=lambda group: min((position[name] for name in group["params"]), default=len(position)))
        new_keys = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    for group in groups:
        group["params"] = [new_keys[each] for each in group["params"]]
    entries = {plain_name(k) if isinstance(k, str) else k: entry for k, entry in state["state"].items()}
    return {**state, "state": {new_keys.get(k, k): v for k, v in entries.items()}, "param_groups": groups}


def _order_of(model: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """Names of parameters in the order in which the optimizer counts them."""
    names = parameter_names(model)
    if optimizer is None:
        return list(names.values())
    parameters = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        taken = None if id(parameter) in names else find_taken(parameter)
        sharded = None if taken is None else taken.parameter()
        parameters.append(parameter if sharded is None else sharded.sharded)
    if any(id(parameter) not in names for parameter in parameters):
        raise CheckpointError(f"this {type(optimizer).__name__} holds parameters that are not the model's.")
    return [names[id(parameter)] for parameter in parameters]


def _numbered(state: Mapping[str, Any], order: Sequence[str], is_known: bool) -> Iterator[tuple[Any, str]]:
    """The number of each parameter in ``state``, and its name."""
    groups = state["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if all("param_names" in group for group in groups):
        order = [plain_name(name) for group in groups for name in group["param_names"]]
    elif len(groups) > 1 and not is_known:
        raise CheckpointError(
            f"the state dict has {len(groups)} parameter groups, so its numbers do not follow model.parameters(). Pass "
            "optimizer=, one with parameters of the model in the same groups."
        )
    if len(numbers) != len(order):
        raise CheckpointError(
            f"the state dict has {len(numbers)} parameters, expected {len(order)}: {list(order)}. If the optimizer "
            "that it is of has some of them only, pass optimizer=, one with these of the model."
        )
    return zip(numbers, order, strict=True)
