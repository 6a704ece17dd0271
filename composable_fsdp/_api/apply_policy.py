"""``fully_shard(model, policy=...)``: plan the groups of a model, then shard them bottom-up.

The plan is made and checked before anything changes. Each group gets the options of the call, overridden by its own.
Groups are materialized and synchronized one after the other, so that at most one is in memory in full.

A parameter that several groups use belongs to the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from composable_fsdp._api.param_discovery import holders, offloads_of
from composable_fsdp._api.strategy import resolve_strategy
from composable_fsdp._api.torch_types import as_mesh_dims, as_offload_policies, as_strategy
from composable_fsdp._core.params import find_replaced
from composable_fsdp._core.registration import registered_parameters
from composable_fsdp._core.state import find_ignored, state_of, state_of_parameter, states_below
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.init.materialize import InitFunction, materialize_meta
from composable_fsdp.wrap._plan import Group, Scope, plan_groups
from composable_fsdp.wrap.torch_policies import as_wrap_policy

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
"""The keywords that a policy may set per group. The others apply to the model."""


def shard_by_policy(model: nn.Module, policy: object, shard: Callable[..., object], options: Mapping[str, Any]) -> None:
    """Call ``shard`` on every group that ``policy`` selects.

    Args:
        model: the outermost module.
        policy: selects the groups; ours or torch's.
        shard: ``fully_shard``, called with a module and keywords.
        options: all keywords of the call except ``policy``.

    Raises:
        ConfigurationError: the plan is invalid, or options contradict each other. Raised before anything changes.
        MeshError: a mesh does not fit the strategy of a group. Raised before anything changes.
    """
    ignored = find_ignored([model], options["ignored_params"], options["ignored_modules"])
    groups = plan_groups(as_wrap_policy(policy), Scope(model, ignored.modules, ignored.parameters), OVERRIDABLE)
    options_of = [_options_of(group, options) for group in groups]
    _choose_offload(model, groups, options_of, options["offload_policy"], ignored.parameters)
    init: InitFunction | None = options["param_init_fn"]
    sharded = set(states_below(model))
    owner_states = sharded | {state_of(owner) for owner in options["shared_from"]}
    registered = [entry for entry in registered_parameters(model) if len(entry.places) > 1]
    for group, chosen in zip(groups, options_of, strict=True):
        if init is not None:
            materialize_meta(group.module, init, ignored, registered)
        owners = [state.modules[0] for state in holders([group.module]) if state in owner_states]
        shard(group.module, **{**chosen, "shared_from": owners, "param_init_fn": None})
        owner_states.add(state_of(group.module))


def _choose_offload(
    model: nn.Module,
    groups: Sequence[Group],
    options_of: Sequence[dict[str, Any]],
    offload: object,
    ignored: Collection[int],
) -> None:
    """Give each group its part of ``offload``, if that is a mapping. Raise if a mapping has a name of no parameter."""
    parameters, taken = dict(model.named_parameters(remove_duplicate=False)), set(ignored)
    ids = {name: id(parameters.get(name)) for name in offload} if isinstance(offload, Mapping) else {}
    left = set(ids)
    for group, chosen in zip(groups, options_of, strict=True):
        names = _names_of(group, taken)
        if "offload_policy" in group.overrides:
            offloads_of(as_offload_policies(chosen["offload_policy"]), list(names.values()))
        elif isinstance(offload, Mapping):
            own = {name: known for name, known in ids.items() if known in names}
            chosen["offload_policy"] = {names[known]: offload[name] for name, known in own.items()}
            left -= own.keys()
        taken.update(names)
    if left:
        raise ConfigurationError(
            f"offload_policy has {sorted(left)}, which are not among the names of model.named_parameters(), or which "
            "are ignored, sharded already, or in a group with an offload_policy of its own."
        )


def _names_of(group: Group, taken: Collection[int]) -> dict[int, str]:
    """Return the names that the parameters of ``group`` have in its call, by id, without those ``taken``."""
    names: dict[int, str] = {}
    for name, parameter in group.module.named_parameters():
        is_sharded = state_of_parameter(parameter) is not None or find_replaced(parameter) is not None
        if id(parameter) not in taken and not is_sharded:
            names.setdefault(id(parameter), name)
    return names


def _options_of(group: Group, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call's options with the overrides of ``group``; the strategy becomes a mesh and a reshard option.

    A strategy of the group replaces the reshard option of the call. A reshard option of the group replaces that of the
    call's strategy.
    """
    own, chosen = group.overrides, {**options, **group.overrides}
    strategy, reshard = chosen.pop("strategy"), chosen["reshard_after_forward"]
    if "strategy" in own:
        reshard = own.get("reshard_after_forward")
    if strategy is not None:
        keeps_own = "strategy" not in own and "reshard_after_forward" in own
        dims, given = as_mesh_dims(chosen["dp_mesh_dims"]), None if keeps_own else reshard
        chosen["mesh"], resolved = resolve_strategy(as_strategy(strategy), chosen["mesh"], dims, given)
        reshard = reshard if keeps_own else resolved
    return {**chosen, "reshard_after_forward": reshard}
