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

from composable_fsdp._api.materialize import InitFunction, left_alone, materialise
from composable_fsdp._runtime.groups.state import find_state, state_of
from composable_fsdp._runtime.params.param_places import registered_parameters
from composable_fsdp._sharding.strategy import resolve_strategy
from composable_fsdp._torch_compat.torch_types import as_mesh_dims, as_strategy
from composable_fsdp.wrap._plan import Group, Policy, Scope, plan_groups
from composable_fsdp.wrap.tied_weights import holders

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


def shard_by_policy(model: nn.Module, policy: Policy, shard: Callable[..., object], options: Mapping[str, Any]) -> None:
    """Calls ``shard`` on every group.

    Args:
        model: the outermost module.
        policy: decides.
        shard: ``fully_shard``, called with a module or a list of them, and keywords.
        options: all keywords of the call but ``policy``.

    Raises:
        ConfigurationError: the plan is none, or options contradict each other. Nothing has changed then.
        MeshError: a mesh cannot serve the strategy of a group. Nothing has changed then either.
    """
    left = left_alone([model], options["ignored_params"], options["ignored_modules"])
    groups = plan_groups(policy, Scope(model, left.modules, left.parameters), OVERRIDABLE)
    options_of = [_options_of(group, options) for group in groups]
    init: InitFunction | None = options["param_init_fn"]
    there = {state for module in model.modules() if (state := find_state(module)) is not None}
    lenders = there | {state_of(owner) for owner in options["shared_from"]}
    registered = [entry for entry in registered_parameters(model) if len(entry.places) > 1]
    for group, chosen in zip(groups, options_of, strict=True):
        if init is not None:
            for module in group.modules:
                materialise(module, init, left, registered)
        owners = [state.modules[0] for state in holders(group.modules) if state in lenders]
        target = group.modules[0] if len(group.modules) == 1 else list(group.modules)
        shard(target, **{**chosen, "shared_from": owners, "param_init_fn": None})
        lenders.add(state_of(group.modules[0]))


def _options_of(group: Group, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the call with what the group has of its own, and the strategy as what it comes to.

    A strategy of its own counts instead of what the call says about resharding, and its own resharding instead of what
    the strategy of the call comes to.
    """
    own, chosen = group.overrides, {**options, **group.overrides}
    strategy, reshard = chosen.pop("strategy"), chosen["reshard_after_forward"]
    if "strategy" in own:
        reshard = own.get("reshard_after_forward")
    keeps_own = "strategy" not in own and "reshard_after_forward" in own
    if strategy is None:
        return {**chosen, "reshard_after_forward": reshard}
    dims = as_mesh_dims(chosen["dp_mesh_dims"])
    resolved = resolve_strategy(as_strategy(strategy), chosen["mesh"], dims, None if keeps_own else reshard)
    if not keeps_own:
        reshard = resolved.reshard_after_forward
    return {**chosen, "mesh": resolved.mesh, "reshard_after_forward": reshard}
