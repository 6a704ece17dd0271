"""The properties of FSDP states that schedules depend on, as values for the passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from weakref import ref

from composable_fsdp._runtime.groups.state import Accumulation, FSDPState, alive
from composable_fsdp._runtime.schedule.passes import GroupSpec, ScheduleOptions

__all__ = ["names_of", "options_of", "spec_of"]


def names_of(states: Mapping[str, FSDPState]) -> dict[FSDPState, str]:
    """Return the names of ``states``, and unique ones for the states of other roots that they refer to.

    Those share weights with them, or are prefetched by choice. A state's own name is unique below its root only.
    """
    names = {state: name for name, state in states.items()}
    for state in states.values():
        chosen = (*(state.forward_prefetch or ()), *(state.backward_prefetch or ()))
        for other in (*state.owner_states, *alive(state.user_states), *alive(chosen)):
            names.setdefault(other, f"{other.name} (of another root, {len(names)})")
    return names


def spec_of(state: FSDPState, root: FSDPState, names: Mapping[FSDPState, str]) -> GroupSpec:
    """Return the properties of ``state``, which is in the model of ``root`` or used there.

    ``names`` are those of :func:`names_of`. References to states without a name are left out.
    """
    plan = state.group.plan
    sizes = [size if count else 0 for size, count in zip(plan.grad_bucket_bytes, plan.grad_buckets, strict=True)]
    return GroupSpec(
        name=names[state],
        unsharded_bytes=plan.unsharded_bytes,
        full_bytes=plan.full_bytes,
        gradient_bytes=tuple(sizes) if plan.in_grad_buckets else (sum(sizes),),
        has_parameters=bool(plan.specs),
        is_root=state is root,
        is_small=plan.is_small,
        can_fuse=state.can_be_fused,
        can_fuse_reduction=state.accumulation is Accumulation.REDUCE and not state.keeps_partial,
        reshard=state.reshard,
        reshard_after_backward=state.reshard_after_backward,
        unshard_in_backward=state.unshard_in_backward,
        owners=_named(state.owner_states, names),
        users=_named(alive(state.user_states), names),
        forward_prefetch=_chosen(state.forward_prefetch, names),
        backward_prefetch=_chosen(state.backward_prefetch, names),
        reduces=state.accumulation is not Accumulation.UNSHARDED,
        reduces_grad_buckets=state.reduces_grad_buckets,
        frees_with_last_gradient=state.frees_with_last_gradient,
        has_nested=state.has_nested_states,
        can_delay_prefetch=not state.has_several_modules and plan.num_trainable == len(plan.specs),
    )


def _named(states: Iterable[FSDPState], names: Mapping[FSDPState, str]) -> tuple[str, ...]:
    return tuple(names[state] for state in states if state in names)


def _chosen(chosen: Sequence[ref[FSDPState]] | None, names: Mapping[FSDPState, str]) -> tuple[str, ...] | None:
    return None if chosen is None else _named(alive(chosen), names)


def options_of(
    root: FSDPState,
    states: Iterable[FSDPState],
    *,
    host_waits: bool,
    unequal_use: bool = False,
    leads_to_backward: bool = True,
    is_last_backward: bool = True,
    has_barriers: bool = False,
) -> ScheduleOptions:
    """Return the options of ``root``. The other arguments are fields of the result."""
    limits = [state.reductions_in_flight for state in states]
    return ScheduleOptions(
        prefetch_limit=root.prefetch_limit,
        max_unsharded_bytes=root.max_unsharded_bytes,
        max_fused_bytes=root.max_fused_bytes,
        reductions_in_flight=max(filter(None, limits), default=None),
        host_waits=host_waits,
        unequal_use=unequal_use,
        leads_to_backward=leads_to_backward,
        is_last_backward=is_last_backward,
        has_barriers=has_barriers,
    )
