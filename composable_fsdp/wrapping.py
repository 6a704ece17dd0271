"""``fully_shard(model, policy=...)``: carries out a plan, group by group from the bottom up.

The plan is made and checked before anything changes. Each group gets the options of the call, so mesh, dtypes and
offload reach all of them, with what its own overrides say in place of these. Groups are materialised and synchronised
one after the other, so that no more than one is in memory in full.

Parameters that are used in several groups belong to the first of these; the others borrow them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.acceptance import as_mesh_dims, as_strategy
from composable_fsdp.grouping import Group, Policy, Scope, plan_groups
from composable_fsdp.initialize import InitFunction, Left, materialise
from composable_fsdp.registered import registered_parameters
from composable_fsdp.runtime.unit import find_unit
from composable_fsdp.strategy import resolve_strategy
from composable_fsdp.tied import holders

__all__ = ["OVERRIDABLE", "shard_by_policy"]

OVERRIDABLE = frozenset(
    {
        "comm_policy",
        "dp_mesh_dims",
        "mesh",
        "mp_policy",
        "offload_policy",
        "reshard_after_forward",
        "shard_placement_fn",
        "strategy",
    }
)
"""Keywords that a group may have of its own. The others say something about the whole model."""


def shard_by_policy(
    model: nn.Module,
    policy: Policy,
    shard: Callable[..., object],
    options: Mapping[str, object],
    left: Left,
    init: InitFunction | None,
    mesh: DeviceMesh | None,
) -> None:
    """Calls ``shard`` on every group.

    Args:
        model: the outermost module.
        policy: decides.
        shard: ``fully_shard``, called with a module or a list of them, and keywords.
        options: keywords for all groups.
        left: what is ignored.
        init: ``param_init_fn``.
        mesh: that of the call, as it was given. A group with a strategy of its own starts from this one, not from what
            the strategy of the call has made of it.

    Raises:
        ConfigurationError: the plan is none; nothing has changed then.
    """
    groups = plan_groups(policy, Scope(model, left.modules, left.parameters), OVERRIDABLE)
    options_of = [_options_of(group, options, mesh) for group in groups]
    registered = [entry for entry in registered_parameters(model) if len(entry.places) > 1]
    for group, chosen in zip(groups, options_of, strict=True):
        if init is not None:
            for module in group.modules:
                materialise(module, init, left, registered)
        here = {unit for module in model.modules() if (unit := find_unit(module)) is not None}
        lenders = [unit.modules[0] for unit in holders(group.modules) if unit in here]
        target = group.modules[0] if len(group.modules) == 1 else list(group.modules)
        shard(target, **chosen, shared_from=lenders)


def _options_of(group: Group, options: Mapping[str, object], mesh: DeviceMesh | None) -> dict[str, object]:
    """With the strategy of the group itself resolved, so that no error comes when some groups have been made."""
    chosen = {**options, **group.overrides}
    strategy = chosen.pop("strategy", None)
    if strategy is None:
        return chosen
    own: dict[str, Any] = {"mesh": mesh, "dp_mesh_dims": options.get("dp_mesh_dims"), **group.overrides}
    resolved = resolve_strategy(
        as_strategy(strategy), own["mesh"], as_mesh_dims(own["dp_mesh_dims"]), own.get("reshard_after_forward")
    )
    return {**chosen, "mesh": resolved.mesh, "reshard_after_forward": resolved.reshard_after_forward}
