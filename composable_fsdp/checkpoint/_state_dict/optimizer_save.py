"""State dicts of optimizers, keyed by parameter names.

A state tensor with its parameter's shape is sharded like the parameter: as a DTensor, or, for optimizers that work on
local tensors, as a plain tensor of the local shard's shape. Everything else is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from composable_fsdp._runtime.shard_extent import like
from composable_fsdp.checkpoint._state_dict.model import SHARDED, comes_from_rank0
from composable_fsdp.checkpoint._state_dict.names import prepare_for_access
from composable_fsdp.checkpoint._state_dict.optimizer_params import (
    OptimizerParam,
    OptimizerParams,
    has_shards_shape,
    is_plain,
)
from composable_fsdp.checkpoint._state_dict.options import Form
from composable_fsdp.checkpoint._state_dict.owners import OwnerRanks, digest
from composable_fsdp.checkpoint._state_dict.tensor import to_form
from composable_fsdp.errors import CheckpointError

__all__ = ["optimizer_state_dict"]


def optimizer_state_dict(model: nn.Module, optimizer: Optimizer, form: Form = SHARDED) -> dict[str, Any]:
    """Return the optimizer's state and settings, keyed by the model's parameter names.

    Parameters without state are absent from ``"state"``. Tensors that are sharded like a parameter are in ``form``.
    Others, such as step counts, are unchanged. All ranks must call it together.

    Args:
        model: a module, sharded or not.
        optimizer: an optimizer of any class, over parameters of ``model``.
        form: as for :func:`~composable_fsdp.checkpoint.state_dict`. With ``rank0_only`` other ranks get an empty dict.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [name]}]}``

    Raises:
        CheckpointError: the optimizer has parameters that are not the model's, or ranks have state of different ones.
    """
    prepare_for_access(model)
    params = OptimizerParams(model, optimizer)
    members = list(params.members.values())
    tensors = ((member.parameter, member.sharding) for member in members)
    owners = OwnerRanks.of(tensors, only_sources=comes_from_rank0(form))
    packed = optimizer.state_dict()
    ids = [i for group in packed["param_groups"] for i in group["params"]]
    entries = {m.name: packed["state"][i] for i, m in zip(ids, members, strict=True) if i in packed["state"]}
    distributed = _distributed(members, entries, owners)
    state: dict[Any, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        for member in members:
            receives = owners.provides(member.parameter)
            for key, value in distributed.get(member.name, {}).items():
                name = f"the state {key} of {member.name}"
                found = to_form(name, value, member.sharding, form) if isinstance(value, torch.Tensor) else value
                if receives:
                    state.setdefault(member.name, {})[key] = found
                del found
    if not owners.provides():
        return {"state": state} if state else {}
    state |= {key: value for key, value in packed["state"].items() if key not in set(ids)}
    named = [
        {**{k: v for k, v in group.items() if k != "param_names"}, "params": [member.name for member in of_group]}
        for group, of_group in zip(packed["param_groups"], params.groups, strict=True)
    ]
    return {**packed, "state": state, "param_groups": named}


def _distributed(
    members: Sequence[OptimizerParam], entries: Mapping[str, Mapping[str, Any]], owners: OwnerRanks
) -> dict[str, dict[str, Any]]:
    """Wrap local shards in DTensors: plain tensors that have the local shard's shape on every rank.

    Raises:
        CheckpointError: ranks have state of different parameters, so their collectives would hang.
    """
    items = [(m, key, value) for m in members for key, value in entries.get(m.name, {}).items()]
    plain = [i for i, (member, _, value) in enumerate(items) if is_plain(value, member)]
    fitting = [has_shards_shape(items[i][2], items[i][0]) for i in plain]
    found = owners.exchange((digest([(m.name, str(key)) for m, key, _ in items] + [("", str(plain))]), fitting))
    if len({which for which, _ in found.values()}) > 1:
        keys = owners.exchange([f"{member.name!r}, {key!r}" for member, key, _ in items])
        some = {rank: [k for k in has if any(k not in other for other in keys.values())] for rank, has in keys.items()}
        raise CheckpointError(f"ranks have different state, by rank: {some}. Have all of them make the same steps.")
    everywhere = [all(flags) for flags in zip(*(flags for _, flags in found.values()), strict=True)]
    local = {i for i, is_local in zip(plain, everywhere, strict=True) if is_local}
    distributed: dict[str, dict[str, Any]] = {}
    for i, (member, key, value) in enumerate(items):
        shard = like(member.parameter, value) if i in local else value
        distributed.setdefault(member.name, {})[key] = shard
    return distributed
