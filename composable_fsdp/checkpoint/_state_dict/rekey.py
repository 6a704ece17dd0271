"""New keys for optimizers: sharded parameters for the original ones, and names for parameter numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from composable_fsdp._layout.block import Cut, ShardExtent
from composable_fsdp._runtime.params.sharded_param import ShardedParameter, find_replaced, local_part
from composable_fsdp._runtime.shard_extent import like
from composable_fsdp.checkpoint._state_dict.names import parameter_names, plain_name, prepare_for_access
from composable_fsdp.errors import CheckpointError, ParameterError

__all__ = ["rekey_optimizer", "rekey_optimizer_state_dict"]


# -- optimizers made before fully_shard


@torch.no_grad()
def rekey_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Replace the original parameters of an optimizer made before ``fully_shard`` with the sharded ones, in place.

    Groups and their options are kept. State tensors of a parameter's shape are sharded like the parameter. Without this
    the optimizer would step parameters that nothing uses. Parameters that are still the model's are unchanged.

    Raises:
        ParameterError: some parameters are neither the model's nor its original ones. Nothing has changed then.
    """
    prepare_for_access(model)
    names = parameter_names(model)
    replaced: dict[torch.Tensor, ShardedParameter] = {}
    unmanaged = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) not in names):
        sharded = _sharded_for(parameter)
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
            optimizer.state[sharded.sharded] = {k: _shard_state(v, original, sharded) for k, v in entry.items()}


def _sharded_for(original: torch.Tensor) -> ShardedParameter | None:
    """Return the parameter that ``fully_shard`` made of ``original``, if it did and the parameter still exists."""
    replaced = find_replaced(original)
    return None if replaced is None else replaced.parameter()


def _shard_state(value: Any, original: torch.Tensor, parameter: ShardedParameter) -> Any:
    """Return a copy of this rank's shard of a tensor of the parameter's shape; return anything else unchanged."""
    if not isinstance(value, torch.Tensor) or value.shape != original.shape or not value.ndim:
        return value
    shard, full = parameter.sharding.axes.shard, local_part(value)
    piece = ShardExtent.after(tuple(full.shape), [Cut(parameter.dim, shard.size, shard.rank)]).take(full)
    own = torch.empty_like(piece, device=parameter.local.device, memory_format=torch.contiguous_format).copy_(piece)
    return like(parameter.sharded, own)


# -- an optimizer's own state dict


def rekey_optimizer_state_dict(
    state: Mapping[str, Any],
    model: nn.Module,
    to: Literal["names", "ids"] = "names",
    *,
    optimizer: Optimizer | None = None,
) -> dict[str, Any]:
    """Convert an optimizer's state dict from parameter numbers to names, or from names to numbers.

    ``"names"`` converts a plain ``optimizer.state_dict()`` to what :func:`load_optimizer_state_dict` takes; ``"ids"``
    does the reverse. Tensors are unchanged. In torch's FSDP1 this is ``rekey_optim_state_dict``.

    Args:
        state: a dict with ``"state"`` and ``"param_groups"``, of an optimizer over parameters of ``model``.
        model: a module, sharded or not.
        to: ``"names"`` or ``"ids"``.
        optimizer: the optimizer whose parameters the numbers count. The default is all of ``model.parameters()`` in one
            group, or the names in the groups if the optimizer was made with ``named_parameters()``.

    Raises:
        CheckpointError: the number of parameters differs, or some are not the model's; or there are several groups and
            no ``optimizer`` to tell the order of their parameters.
    """
    prepare_for_access(model)
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
    """Return the names of parameters in the order in which the optimizer counts them."""
    names = parameter_names(model)
    if optimizer is None:
        return list(names.values())
    parameters = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        sharded = None if id(parameter) in names else _sharded_for(parameter)
        parameters.append(parameter if sharded is None else sharded.sharded)
    if any(id(parameter) not in names for parameter in parameters):
        raise CheckpointError(f"this {type(optimizer).__name__} holds parameters that are not the model's.")
    return [names[id(parameter)] for parameter in parameters]


def _numbered(state: Mapping[str, Any], order: Sequence[str], is_known: bool) -> Iterator[tuple[Any, str]]:
    """Return the number and the name of each parameter in ``state``."""
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
