"""State dicts of optimizers, by the names of parameters.

A tensor of the state that has its parameter's shape lies like the parameter: as a DTensor, or, with optimizers that
work on local tensors, as a plain tensor of the local shard's shape. Everything else is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_fsdp._runtime.shard_extent import like
from composable_fsdp.checkpoint._state_dict.local_state import has_shards_shape, is_plain
from composable_fsdp.checkpoint._state_dict.model import SHARDED, comes_from_rank0
from composable_fsdp.checkpoint._state_dict.options import Form
from composable_fsdp.checkpoint._state_dict.owners import OwnerRanks, digest
from composable_fsdp.checkpoint._state_dict.rekey import Member, members_of
from composable_fsdp.checkpoint._state_dict.tensor import shown
from composable_fsdp.errors import CheckpointError

__all__ = ["optimizer_state_dict"]


def optimizer_state_dict(model: nn.Module, optimizer: Optimizer, form: Form = SHARDED) -> dict[str, Any]:
    """``{"state": {name: {key: value}}, "param_groups": [{..., "params": [name]}]}``, with the names of the model.

    Parameters without state are absent from ``"state"``. Tensors that lie like a parameter are in ``form``; the others,
    such as counts of steps, are as they are. All ranks must call it together.

    Args:
        model: sharded or not.
        optimizer: of any class, over parameters of ``model``.
        form: as for :func:`~composable_fsdp.checkpoint.state_dict`. With ``rank0_only`` the others get an empty dict.

    Raises:
        CheckpointError: the optimizer has parameters that are not the model's, or ranks have state of different ones.
    """
    groups = members_of(model, optimizer)
    members = [member for group in groups for member in group]
    tensors = ((member.parameter, member.sharding) for member in members)
    holders = OwnerRanks.of(tensors, all_ranks=comes_from_rank0(form))
    packed = optimizer.state_dict()
    ids = [i for group in packed["param_groups"] for i in group["params"]]
    entries = {m.name: packed["state"][i] for i, m in zip(ids, members, strict=True) if i in packed["state"]}
    distributed = _distributed(members, entries, holders)
    state: dict[Any, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        for member in members:
            shows = not comes_from_rank0(form) or holders.is_source_of(member.parameter)
            for key, value in distributed.get(member.name, {}).items():
                name = f"the state {key} of {member.name}"
                found = shown(name, value, member.sharding, form) if isinstance(value, torch.Tensor) else value
                if shows:
                    state.setdefault(member.name, {})[key] = found
                del found
    if comes_from_rank0(form) and not holders.is_source_of():
        return {"state": state} if state else {}
    state |= {key: value for key, value in packed["state"].items() if key not in set(ids)}
    named = [
        {**{k: v for k, v in group.items() if k != "param_names"}, "params": [member.name for member in of_group]}
        for group, of_group in zip(packed["param_groups"], groups, strict=True)
    ]
    return {**packed, "state": state, "param_groups": named}


def _distributed(
    members: Sequence[Member], entries: Mapping[str, Mapping[str, Any]], holders: OwnerRanks
) -> dict[str, dict[str, Any]]:
    """``entries`` with DTensors for local tensors: those that on every rank have the shape of the rank's shard.

    Raises:
        CheckpointError: ranks have state of different parameters, so that they would wait for each other.
    """
    places = [(m, key, value) for m in members for key, value in entries.get(m.name, {}).items()]
    plain = [i for i, (member, _, value) in enumerate(places) if is_plain(value, member)]
    fitting = [has_shards_shape(places[i][2], places[i][0]) for i in plain]
    found = holders.exchange((digest([(m.name, str(key)) for m, key, _ in places] + [("", str(plain))]), fitting))
    if len({which for which, _ in found.values()}) > 1:
        keys = holders.exchange([f"{member.name!r}, {key!r}" for member, key, _ in places])
        some = {rank: [k for k in has if any(k not in other for other in keys.values())] for rank, has in keys.items()}
        raise CheckpointError(f"ranks have different state, by rank: {some}. Have all of them make the same steps.")
    everywhere = [all(flags) for flags in zip(*(flags for _, flags in found.values()), strict=True)]
    local = {i for i, is_local in zip(plain, everywhere, strict=True) if is_local}
    distributed: dict[str, dict[str, Any]] = {}
    for i, (member, key, value) in enumerate(places):
        shard = like(cast(DTensor, member.parameter), value) if i in local else value
        distributed.setdefault(member.name, {})[key] = shard
    return distributed
