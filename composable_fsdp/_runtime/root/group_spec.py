"""The properties of FSDP states that schedules depend on, as values for the passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import ref

from composable_fsdp._runtime.groups.state import Accumulation, FSDPState, alive
from composable_fsdp._runtime.schedule.passes import GroupSpec, ScheduleOptions

__all__ = ["options_of", "spec_of"]


def spec_of(state: FSDPState, root: FSDPState) -> GroupSpec:
    """Return the properties of ``state``, which is in the model of ``root``."""
    plan = state.group.plan
    sizes = [size if count else 0 for size, count in zip(plan.batch_bytes, plan.batches, strict=True)]
    return GroupSpec(
        name=state.name,
        unsharded_bytes=plan.unsharded_bytes,
        full_bytes=plan.full_bytes,
        gradient_bytes=tuple(sizes) if plan.in_batches else (sum(sizes),),
        has_parameters=bool(plan.specs),
        is_root=state is root,
        is_small=plan.is_small,
        can_fuse=state.can_be_fused,
        can_fuse_reduction=state.accumulation is Accumulation.REDUCE and not state.keeps_partial,
        reshard=state.reshard,
        reshard_after_backward=state.reshard_after_backward,
        unshard_in_backward=state.unshard_in_backward,
        owners=tuple(owner.name for owner in state.lenders),
        users=tuple(user.name for user in alive(state.borrowing)),
        forward_prefetch=_names(state.forward_prefetch),
        backward_prefetch=_names(state.backward_prefetch),
        reduces=state.accumulation is not Accumulation.UNSHARDED,
        reduces_buckets=state.sends_batches,
        frees_with_last_gradient=state.frees_with_last_gradient,
        has_nested=state.has_nested_states,
        can_delay_prefetch=not state.has_several_modules and plan.num_trainable == len(plan.specs),
    )


def _names(chosen: Sequence[ref[FSDPState]] | None) -> tuple[str, ...] | None:
    return None if chosen is None else tuple(state.name for state in alive(chosen))


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
        max_fused_bytes=root.max_merged_bytes,
        reductions_in_flight=max(filter(None, limits), default=None),
        host_waits=host_waits,
        unequal_use=unequal_use,
        leads_to_backward=leads_to_backward,
        is_last_backward=is_last_backward,
        has_barriers=has_barriers,
    )
