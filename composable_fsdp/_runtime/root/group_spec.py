"""The properties of FSDP states that schedules depend on, as values for the passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from weakref import ref

from composable_fsdp._layout.plan import SMALL_BYTES, GradientMemory, GroupPlan, MessageSizes
from composable_fsdp._runtime.groups.state import Accumulation, FSDPState, alive
from composable_fsdp._runtime.schedule.passes import GroupSpec, ScheduleOptions, ScheduleSettings
from composable_fsdp._sharding.mesh import DataParallelAxes

__all__ = ["names_of", "options_of", "set_by_user", "settings_of", "spec_of"]


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


def spec_of(
    state: FSDPState,
    root: FSDPState,
    names: Mapping[FSDPState, str],
    axes: Mapping[DataParallelAxes, tuple[str, str]],
    settings: ScheduleSettings,
    *,
    sizes: MessageSizes | None = None,
    synchronized: bool = False,
) -> GroupSpec:
    """Return the properties of ``state``, which is in the model of ``root`` or used there.

    Args:
        state: the state.
        root: the state of the outermost module.
        names: those of :func:`names_of`. References to states without a name are left out.
        axes: the names of all mesh axes.
        settings: the settings of the schedule.
        sizes: assume that the plan has these message sizes; by default it has its own.
        synchronized: assume that the gradients are reduced, also if they are only accumulated now.
    """
    synchronized = synchronized or state.is_synchronized
    tensors, pgs = state.group.tensors, state.group.process_groups[0]
    plan = tensors.plan if sizes is None or sizes == pgs.message_sizes else tensors.plan_with(sizes)
    reduces_grad_buckets = synchronized and state.can_reduce_grad_buckets(plan)
    is_small = plan.is_sent and plan.full_bytes <= max(SMALL_BYTES, settings.max_fused_bytes // 2)
    shard_axis, replicate_axis = axes[pgs.axes]
    buckets = plan.gradient_messages if plan.in_grad_buckets else (sum(plan.gradient_messages),)
    memory = plan.gradient_memory
    bucket_bytes = [size if count else 0 for size, count in zip(plan.grad_bucket_bytes, plan.grad_buckets, strict=True)]
    return GroupSpec(
        name=names[state],
        unsharded_bytes=plan.unsharded_bytes,
        full_bytes=plan.full_bytes,
        gradient_bytes=tuple(bucket_bytes) if plan.in_grad_buckets else (sum(bucket_bytes),),
        has_parameters=bool(plan.specs),
        is_root=state is root,
        is_small=is_small and not reduces_grad_buckets,
        can_fuse=state.can_be_fused,
        can_fuse_reduction=synchronized,
        reshard=state.reshard,
        reshard_after_backward=state.reshard_after_backward,
        unshard_in_backward=state.unshard_in_backward,
        owners=_named(state.owner_states, names),
        users=_named(alive(state.user_states), names),
        forward_prefetch=_chosen(state.forward_prefetch, names),
        backward_prefetch=_chosen(state.backward_prefetch, names),
        reduces=synchronized or state.accumulation is not Accumulation.UNSHARDED,
        reduces_grad_buckets=reduces_grad_buckets,
        frees_with_last_gradient=state.frees_with_last_gradient,
        has_nested=state.has_nested_states,
        axis=shard_axis,
        ranks=pgs.axes.shard.size,
        replicate_axis=replicate_axis,
        replicas=pgs.replicate.size,
        separate_reduce=pgs.has_separate_scatter,
        gather_messages=1 if pgs.gather.traits.coalesces else plan.gather_messages,
        gather_copied_bytes=plan.gather_copied_bytes,
        gather_sent_bytes=plan.gather_sent_bytes,
        late_bytes=plan.packed_only_bytes,
        gradient_messages=tuple(map(bool, buckets)) if pgs.scatter.traits.coalesces else buckets,
        gradient_memory=memory if plan.in_grad_buckets else (GradientMemory.total(memory),),
        gradients=_gradients(plan),
        early_gradients=frozenset(state.params_after_nested),
    )


def _gradients(plan: GroupPlan) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return index and bytes of each unsharded gradient, by bucket."""
    number = len(plan.grad_buckets) if plan.in_grad_buckets else 1
    found: list[list[tuple[int, int]]] = [[] for _ in range(number)]
    for bucket in plan.buckets:
        of_bucket = found[bucket.grad_bucket if plan.in_grad_buckets else 0]
        of_bucket += [(i, plan.specs[i].gradient_bytes) for i in bucket.indices if plan.specs[i].trainable]
    return tuple(map(tuple, found))


def settings_of(root: FSDPState, chosen: ScheduleSettings) -> ScheduleSettings:
    """Return the ``chosen`` settings with those that the user has set for ``root`` in their place."""
    return replace(chosen, **{name: getattr(root.options, name) for name in set_by_user(root)})


def set_by_user(root: FSDPState) -> frozenset[str]:
    """Return the names of the settings that the user has set for ``root``."""
    return frozenset(name for name in ("prefetch_limit", "max_fused_bytes") if getattr(root.options, name) is not None)


def _named(states: Iterable[FSDPState], names: Mapping[FSDPState, str]) -> tuple[str, ...]:
    return tuple(names[state] for state in states if state in names)


def _chosen(chosen: Sequence[ref[FSDPState]] | None, names: Mapping[FSDPState, str]) -> tuple[str, ...] | None:
    return None if chosen is None else _named(alive(chosen), names)


def options_of(
    root: FSDPState, states: Iterable[FSDPState], settings: ScheduleSettings, *, host_waits: bool
) -> ScheduleOptions:
    """Return the options of ``root`` with ``settings``, for an iteration that leads to a backward."""
    limits = [state.reductions_in_flight for state in states]
    return ScheduleOptions(
        prefetch_limit=settings.prefetch_limit,
        max_unsharded_bytes=root.options.max_unsharded_bytes,
        max_fused_bytes=settings.max_fused_bytes,
        reductions_in_flight=max(filter(None, limits), default=None),
        host_waits=host_waits,
    )
