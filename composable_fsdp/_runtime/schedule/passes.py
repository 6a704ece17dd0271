"""Passes: pure functions from schedules to schedules.

:func:`eager` makes the schedule of a first iteration: gather, wait, compute, free, reduce. Each other pass changes one
thing about it, and :func:`build` applies all of them. Every option that decides *when* something happens is a field of
:class:`GroupSpec` or :class:`ScheduleOptions`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from composable_fsdp._layout.plan import GradientMemory, MessageSizes
from composable_fsdp._runtime.schedule.schedule import (
    Action,
    Barrier,
    Event,
    Free,
    Gather,
    GradBucket,
    Hook,
    Keep,
    Reduce,
    Schedule,
    Shrink,
    Step,
    Wait,
    WaitReduce,
)
from composable_fsdp.policies import AUTO_RESHARD, Reshard, ReshardKind

__all__ = [
    "DEFAULT_FUSED_BYTES",
    "PREFETCH_LIMIT",
    "GroupSpec",
    "ScheduleOptions",
    "ScheduleSettings",
    "Specs",
    "bound_in_flight",
    "build",
    "eager",
    "fuse_adjacent",
    "fuse_small",
    "fusions",
    "gathered_with",
    "is_full",
    "keep_last",
    "prefetch",
    "reshard_after_forward",
    "unshard",
]

PREFETCH_LIMIT = 1
"""The default number of prefetched groups.

Each further one costs its unsharded size. It pays where reductions take longer than the computation of the modules.
"""

DEFAULT_FUSED_BYTES = 1 << 20
"""The default maximum size of the full parameters in one fusion, in bytes."""

_MIN_BYTES_IN_FLIGHT = 1 << 20
"""On streams, the bytes of gradients that may always be in flight: small messages cost latency, not bandwidth."""

_SLACK_DIVISOR = 8
"""On streams, ``1 / _SLACK_DIVISOR`` of the largest group's bytes may be in flight beyond them."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The properties of one parameter group that a schedule depends on.

    Args:
        name: the group.
        unsharded_bytes: the memory that unsharding takes, in bytes.
        full_bytes: the size of the full parameters in bytes, in whatever memory.
        gradient_bytes: the bytes of each bucket of gradients; 0 for a bucket without trainable parameters.
        has_parameters: False for a module whose parameters all belong to nested groups.
        is_root: True for the group of the outermost module.
        is_foreign: True if it belongs to another root, which frees it at the ends of its passes.
        is_small: True if latency, not bandwidth, dominates its collectives.
        can_fuse: True if its all-gathers may be fused with those of other groups.
        can_fuse_reduction: True if its reductions may be fused with those of other groups.
        reshard: what to do after forward.
        reshard_after_backward: free it after backward.
        unshard_in_backward: backward needs its parameters.
        owners: groups whose parameters its modules use too (tied weights).
        users: groups whose modules use parameters of this one.
        forward_prefetch: the groups that the user chose to prefetch in its forward, or ``None``.
        backward_prefetch: the same for its backward.
        reduces: False while gradients are accumulated without communication.
        reduces_grad_buckets: each bucket is reduced as soon as its gradients are ready.
        frees_with_last_gradient: no module needs its parameters once all of its gradients are ready.
        has_nested: its modules contain other groups.
        axis: the name of the mesh axis that shards it, and ``ranks`` the number of its ranks.
        replicate_axis: the same of the axis over which it is replicated, with ``replicas`` ranks.
        separate_reduce: its reduce-scatters have a process group of their own, and run beside all-gathers.
        gather_messages: the number of messages of its all-gather.
        gather_copied_bytes: the bytes of its all-gather that are copied out of messages.
        gather_sent_bytes: the bytes of this rank's part that are cast beside the messages.
        late_bytes: the part of ``unsharded_bytes`` that is allocated by the wait for the all-gather.
        gradient_messages: the number of messages of the reduction of each bucket; one each by default.
        gradient_memory: the memory of the gradients of each bucket.
        gradients: index and bytes of each unsharded gradient, by bucket.
        early_gradients: the indices of the gradients that precede the backward of nested groups.
    """

    name: str
    unsharded_bytes: int = 0
    full_bytes: int = 0
    gradient_bytes: tuple[int, ...] = ()
    has_parameters: bool = True
    is_root: bool = False
    is_foreign: bool = False
    is_small: bool = False
    can_fuse: bool = True
    can_fuse_reduction: bool = True
    reshard: Reshard = AUTO_RESHARD
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    owners: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    forward_prefetch: tuple[str, ...] | None = None
    backward_prefetch: tuple[str, ...] | None = None
    reduces: bool = True
    reduces_grad_buckets: bool = False
    frees_with_last_gradient: bool = True
    has_nested: bool = False
    axis: str = ""
    ranks: int = 1
    replicate_axis: str = ""
    replicas: int = 1
    separate_reduce: bool = False
    gather_messages: int = 1
    gather_copied_bytes: int = 0
    gather_sent_bytes: int = 0
    late_bytes: int = 0
    gradient_messages: tuple[int, ...] = ()
    gradient_memory: tuple[GradientMemory, ...] = ()
    gradients: tuple[tuple[tuple[int, int], ...], ...] = ()
    early_gradients: frozenset[int] = frozenset()

    @property
    def is_ready_before_nested(self) -> bool:
        """True if all of its gradients are ready before the backward of nested groups."""
        indices = {index for bucket in self.gradients for index, _ in bucket}
        return bool(indices) and indices <= self.early_gradients

    @property
    def frees_before_reduction(self) -> bool:
        """True if the end of its modules' backward frees it, so that streams reduce it as a whole only then."""
        shares = self.has_nested or self.owners or self.users
        return self.reshard_after_backward and not shares


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """The settings of a schedule that may be chosen by costs.

    Args:
        zero_copy: large parameters have messages of their own (:class:`MessageSizes`).
        grad_buckets: the maximum number of gradient buckets of a group.
        prefetch_limit: the number of groups to prefetch.
        max_fused_bytes: the maximum size of the full parameters in one fusion, in bytes.
    """

    zero_copy: bool = True
    grad_buckets: int = MessageSizes().grad_buckets
    prefetch_limit: int = PREFETCH_LIMIT
    max_fused_bytes: int = DEFAULT_FUSED_BYTES

    @property
    def message_sizes(self) -> MessageSizes:
        return MessageSizes(self.zero_copy, self.grad_buckets)


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """The options of a root that a schedule depends on.

    Args:
        prefetch_limit: the number of groups to prefetch.
        max_unsharded_bytes: the bound on unsharded parameters for prefetching, in bytes.
        max_fused_bytes: the maximum size of the full parameters in one fusion, in bytes.
        reductions_in_flight: the number of reductions in flight, or ``None`` for the default of the device.
        host_waits: the device has no streams, so waits block the host.
        unequal_use: ranks may run different modules. Nothing is fused, and with a bound nothing is prefetched.
        leads_to_backward: False for a forward without gradients.
        is_last_backward: backward ends with a wait for all reductions.
        has_barriers: ranks share memory, so passes end with a barrier.
    """

    prefetch_limit: int = PREFETCH_LIMIT
    max_unsharded_bytes: int | None = None
    max_fused_bytes: int = DEFAULT_FUSED_BYTES
    reductions_in_flight: int | None = None
    host_waits: bool = False
    unequal_use: bool = False
    leads_to_backward: bool = True
    is_last_backward: bool = True
    has_barriers: bool = False

    @property
    def max_reductions(self) -> int | None:
        """The number of reductions in flight, or ``None`` to limit their bytes instead."""
        return self.reductions_in_flight or (1 if self.host_waits else None)


Specs: TypeAlias = Mapping[str, GroupSpec]
"""The properties of all groups of a root, by name."""


def build(
    order: Sequence[Event],
    specs: Specs,
    options: ScheduleOptions,
    unsharded: Collection[str] = (),
    fused: Mapping[str, tuple[str, ...]] | None = None,
    unseen: Collection[int] = (),
) -> Schedule:
    """Return the schedule of an iteration whose forward has the events ``order``.

    Args:
        order: the pre-forward and post-forward events of a forward, in order.
        specs: the properties of all groups, by name.
        options: the options of the root.
        unsharded: the groups that are unsharded before the forward.
        fused: the fusions, by group; by default those of ``order``.
        unseen: the positions of runs whose inputs need no gradient, so that no hook shows the end of their backward. A
            position counts the post-forward events of groups with parameters.
    """
    if fused is None:
        fused = fusions(order, specs, options.max_fused_bytes)
    schedule = eager(order, specs, options, unsharded, unseen)
    if not options.unequal_use:
        schedule = fuse_small(schedule, specs, fused)
    schedule = keep_last(schedule, specs, options)
    schedule = prefetch(schedule, specs, options)
    return bound_in_flight(schedule, specs, options)


# -- the eager schedule


def eager(
    order: Sequence[Event],
    specs: Specs,
    options: ScheduleOptions,
    unsharded: Collection[str] = (),
    unseen: Collection[int] = (),
) -> Schedule:
    """Return the schedule that gathers each group when it is needed and frees it when it is not."""
    held, steps, running = set(unsharded), list[Step](), list[str]()
    for event in order:
        spec = specs[event.group]
        if event.hook is Hook.PRE_FORWARD:
            running.append(spec.name)
            actions = unshard(spec, held)
        else:
            running.remove(spec.name)
            actions = reshard_after_forward(spec, specs, running, leads_to_backward=options.leads_to_backward)
            actions = tuple(action for action in actions if not isinstance(action, Free) or action.group in held)
        steps.append(_step(held, event, actions))
    end: tuple[Action, ...] = (Barrier(),) if options.has_barriers else ()
    steps.append(_step(held, Event(Hook.END_FORWARD), end))
    if options.leads_to_backward:
        steps += _eager_backward(order, specs, options, held, unseen)
    return Schedule(tuple(steps), frozenset(unsharded))


def unshard(spec: GroupSpec, held: Collection[str] = ()) -> tuple[Action, ...]:
    """Return the actions that unshard ``spec`` and the owners of its tied weights, without gathers of ``held`` ones."""
    needed = (spec.name, *spec.owners)
    return (*(Gather((name,)) for name in needed if name not in held), *map(Wait, needed))


def reshard_after_forward(
    spec: GroupSpec, specs: Specs, running: Collection[str], *, leads_to_backward: bool
) -> tuple[Action, ...]:
    """Return the actions after a forward of ``spec`` while the groups ``running`` still run."""
    actions: list[Action] = []
    for done in (spec, *(specs[name] for name in spec.owners if name in specs)):
        if done.name in running or any(user in running for user in done.users):
            continue
        kind = done.reshard.kind
        if kind is ReshardKind.NEVER or (kind is ReshardKind.AUTO and done.is_root and leads_to_backward):
            actions.append(Keep(done.name))
        elif kind is ReshardKind.SMALLER and leads_to_backward:
            actions.append(Shrink(done.name, done.reshard.mesh_size))
        else:
            actions.append(Free(done.name))
    return tuple(actions)


def _eager_backward(
    order: Sequence[Event], specs: Specs, options: ScheduleOptions, held: set[str], unseen: Collection[int]
) -> Iterator[Step]:
    runs = Counter(event.group for event in order if event.hook is Hook.PRE_FORWARD)
    runs_left = runs.copy()
    unreached = {spec.name for spec in specs.values() if spec.has_parameters and not spec.is_foreign}
    position = sum(event.hook is Hook.POST_FORWARD and specs[event.group].has_parameters for event in order)
    positions: dict[str, int] = {}
    for event in reversed(order):
        spec = specs[event.group]
        if not spec.has_parameters:
            continue
        if event.hook is Hook.POST_FORWARD:
            unreached.discard(spec.name)
            position -= 1
            positions[spec.name] = position
            actions = unshard(spec, held) if spec.unshard_in_backward else ()
            yield _step(held, Event(Hook.PRE_BACKWARD, spec.name), actions)
            if spec.is_ready_before_nested and runs[spec.name] == 1:
                yield from _reduce_steps(spec, held, frees=False, in_buckets=False)
            continue
        is_unseen = positions.get(spec.name) in unseen
        runs_left[spec.name] -= 1
        is_reduced = spec.is_ready_before_nested and runs[spec.name] == 1
        reductions: list[Action] = []
        if not runs_left[spec.name] and not is_reduced:  # the gradients of all runs are complete
            others = unreached or any(specs[name].has_parameters for name in held if name != spec.name)
            frees = is_unseen and not (spec.has_nested and others)
            # In a second run, collectives of other groups come between its buckets.
            in_buckets = spec.reduces_grad_buckets and runs[spec.name] == 1
            ready = list(_reduce_steps(spec, held, frees=frees, in_buckets=in_buckets))
            if spec.frees_before_reduction and not (options.host_waits or is_unseen or in_buckets):
                reductions = [action for _, actions in ready for action in actions]
                ready = [Step(event, ()) for event, _ in ready]
            yield from ready
        if is_unseen:
            continue
        done = (specs[name] for name in (spec.name, *spec.owners) if name in held)
        freed = [each.name for each in done if each.reshard_after_backward and not each.users]
        yield _step(held, Event(Hook.POST_BACKWARD, spec.name), (*map(Free, freed), *reductions))
    left = [n for n, spec in specs.items() if n in held and spec.reshard_after_backward and not spec.is_foreign]
    end: tuple[Action, ...] = (Barrier(),) if options.has_barriers else ()
    yield _step(held, Event(Hook.END_BACKWARD), (*map(Free, left), *end))


def _reduce_steps(spec: GroupSpec, held: set[str], *, frees: bool, in_buckets: bool) -> Iterator[Step]:
    """Yield the events of the buckets of ``spec``.

    With ``in_buckets``, each bucket is reduced as soon as its gradients are ready, otherwise all of them at the end.
    With ``frees``, the last one frees the parameters: before the reduction, which takes memory.
    """
    trainable = [index for index, nbytes in enumerate(spec.gradient_bytes) if nbytes]
    frees = frees and spec.frees_with_last_gradient and spec.reshard_after_backward
    for index in trainable:
        is_last = index == trainable[-1]
        if not in_buckets and not is_last:
            continue
        buckets = [index] if in_buckets else trainable
        is_free = frees and is_last and spec.name in held
        actions: list[Action] = [Free(spec.name)] if is_free else []
        actions += [Reduce((GradBucket(spec.name, each),)) for each in buckets if spec.reduces]
        yield _step(held, Event(Hook.GRAD_READY, spec.name, index), tuple(actions))


def _step(held: set[str], event: Event, actions: tuple[Action, ...]) -> Step:
    """Return a step, after ``held`` has been updated by its actions."""
    for action in actions:
        if isinstance(action, Gather):
            held.update(action.groups)
        elif isinstance(action, Free | Shrink):
            held.discard(action.group)
    return Step(event, actions)


# -- fusion


def fusions(order: Iterable[Event], specs: Specs, max_bytes: int) -> dict[str, tuple[str, ...]]:
    """Return, for each group that is fused with its neighbours in ``order``, the groups of its fusion."""
    names = dict.fromkeys(event.group for event in order if event.hook is Hook.PRE_FORWARD)
    small = {n: specs[n].full_bytes for n in names if specs[n].is_small and not specs[n].is_root}
    return fuse_adjacent([name for name in names if specs[name].has_parameters], small, max_bytes)


def fuse_adjacent(order: Sequence[str], nbytes: Mapping[str, int], limit: int) -> dict[str, tuple[str, ...]]:
    """Return, for each group that is fused with others, the groups of its fusion, as they are adjacent in ``order``.

    Args:
        order: the groups; the first occurrence of each counts.
        nbytes: the sizes of the groups that may be fused. Any other group separates its neighbours.
        limit: the maximum number of bytes in one fusion.
    """
    runs: list[list[str]] = [[]]
    filled = 0
    for group in dict.fromkeys(order):
        size = nbytes.get(group, limit + 1)
        if filled + size > limit:
            runs.append([])
            filled = 0
        if size <= limit:
            runs[-1].append(group)
            filled += size
    return {group: tuple(run) for run in runs if len(run) > 1 for group in run}


def gathered_with(
    spec: GroupSpec, specs: Specs, fused: Mapping[str, tuple[str, ...]], *, in_backward: bool
) -> tuple[str, ...]:
    """Return ``spec`` and the groups of its fusion that come after it in a pass."""
    members = fused.get(spec.name)
    if members is None or not spec.can_fuse or (in_backward and not spec.unshard_in_backward):
        return (spec.name,)
    index = members.index(spec.name)
    later = members[index::-1] if in_backward else members[index:]
    return tuple(n for n in later if specs[n].can_fuse and (specs[n].unshard_in_backward or not in_backward))


def fuse_small(schedule: Schedule, specs: Specs, fused: Mapping[str, tuple[str, ...]]) -> Schedule:
    """Fuse the all-gathers, and the reductions, of small groups that are adjacent in the order of forward."""
    held, steps, ready = set(schedule.initially_unsharded), list[Step](), dict[str, Reduce]()
    last_use = {(event.hook, event.group): at for at, (event, _) in enumerate(schedule)}
    for at, (event, actions) in enumerate(schedule):
        in_backward = event.hook is Hook.PRE_BACKWARD
        changed: list[Action] = []
        for action in actions:
            if isinstance(action, Gather):
                spec = specs[action.groups[0]]
                together = gathered_with(spec, specs, fused, in_backward=in_backward)
                missing = tuple(
                    name
                    for name in together
                    if name not in held and (name == spec.name or last_use.get((event.hook, name), -1) > at)
                )
                changed += [Gather(missing)] if spec.name in missing else []
                held.update(missing)
            elif isinstance(action, Reduce):
                changed += _fuse_reduction(action, specs, fused, ready)
            else:
                changed.append(action)
        if event.hook is Hook.END_BACKWARD and ready:
            changed[:0] = ready.values()
        steps.append(_step(held, event, tuple(changed)))
    return replace(schedule, steps=tuple(steps))


def _fuse_reduction(
    action: Reduce, specs: Specs, fused: Mapping[str, tuple[str, ...]], ready: dict[str, Reduce]
) -> list[Action]:
    """Return the reductions to launch when the gradients of ``action`` are ready.

    ``ready`` has those whose fusion is not complete yet.
    """
    name = action.buckets[0].group
    members = [n for n in fused.get(name, ()) if specs[n].can_fuse and specs[n].can_fuse_reduction and specs[n].reduces]
    if name not in members:
        return [action]
    before = ready.get(name)
    ready[name] = action if before is None else Reduce(before.buckets + action.buckets)
    trainable = [n for n in members if any(specs[n].gradient_bytes)]
    if not all(n in ready and len(ready[n].buckets) == sum(map(bool, specs[n].gradient_bytes)) for n in trainable):
        return []
    return [Reduce(tuple(bucket for n in trainable for bucket in ready.pop(n).buckets))]


# -- unsharding ahead of use


def keep_last(schedule: Schedule, specs: Specs, options: ScheduleOptions) -> Schedule:
    """Keep the last groups of forward, which backward needs first.

    On streams the device would be idle while the last one is gathered again, and the network while it computes. The
    others are those that backward would prefetch at once, so they take no more memory when backward begins. Where the
    host waits, all are freed: the memory peak often comes with the loss.
    """
    if options.host_waits or not options.leads_to_backward or not options.prefetch_limit:
        return schedule
    begun = [e.group for e, _ in schedule.at(Hook.PRE_FORWARD) if specs[e.group].has_parameters]
    last = begun[max(0, len(begun) - options.prefetch_limit - 1) :]
    steps, held = [], set(schedule.initially_unsharded)
    kept: set[str] = set()
    for event, actions in schedule:
        changed: list[Action] = []
        for action in actions:
            if isinstance(action, Free) and event.hook is Hook.POST_FORWARD and action.group in last:
                staying = {*last[last.index(action.group) :]}
                fits = _fits(held | staying, specs, options)
                spec = specs[action.group]
                if spec.reshard.kind is ReshardKind.AUTO and spec.unshard_in_backward and fits:
                    action = Keep(action.group)
            if isinstance(action, Gather) and kept.intersection(action.groups):
                missing = tuple(name for name in action.groups if name not in held)
                if not missing:
                    continue
                action = Gather(missing)
            if isinstance(action, Keep):
                kept.add(action.group)
            changed.append(action)
            _step(held, event, (action,))
        steps.append(Step(event, tuple(changed)))
    return replace(schedule, steps=tuple(steps))


def _fits(groups: Iterable[str], specs: Specs, options: ScheduleOptions) -> bool:
    """Return whether ``groups`` may be in memory together."""
    if options.max_unsharded_bytes is None:
        return True
    if options.unequal_use:  # ranks hold different groups at this point
        return False
    return sum(specs[name].unsharded_bytes for name in groups if name in specs) <= options.max_unsharded_bytes


def prefetch(schedule: Schedule, specs: Specs, options: ScheduleOptions) -> Schedule:
    """Move all-gathers to the earlier events of other groups: by default one group ahead, or as the user chose.

    A prefetch precedes the wait for the group that is needed, so that in forward on streams the network does not idle
    while that is copied out of its message. Otherwise it follows the wait, if the group was itself prefetched: a group
    that is copied is in memory twice for a moment, as message and as parameters, and should not add to the next one.
    An all-gather that does not fit in ``max_unsharded_bytes`` is not moved. A group that forward does not use is freed
    at its end.
    """
    steps = [(event, list(actions)) for event, actions in schedule]
    held = set(schedule.initially_unsharded)
    unused = set[str]()
    for at, (event, own) in enumerate(steps):
        if event.hook is Hook.END_FORWARD:
            own[:0] = [Free(name) for name in sorted(unused)]
        for action in own:
            _step(held, event, (action,))
            unused.discard(action.group if isinstance(action, Wait) else "")
        if event.hook not in (Hook.PRE_FORWARD, Hook.PRE_BACKWARD):
            continue
        in_backward = event.hook is Hook.PRE_BACKWARD
        place = next((i for i, action in enumerate(own) if isinstance(action, Wait)), len(own))
        if (in_backward or options.host_waits) and not any(isinstance(action, Gather) for action in own):
            place = len(own)
        if in_backward and not specs[event.group].unshard_in_backward:
            continue
        for name in _prefetch_targets(schedule, at, specs, options):
            if name in held:
                continue
            found = _find_gather(steps, at, name)
            moved = Gather(tuple(group for group in found.groups if group not in held))
            if not _fits({*held, *moved.groups}, specs, options):
                continue
            _take_gather(steps, at, found, moved)
            own.insert(place, moved)
            place += 1
            held.update(moved.groups)
            unused.update(n for n in moved.groups if not specs[n].is_foreign)
    return replace(schedule, steps=tuple(Step(event, tuple(actions)) for event, actions in steps))


def _prefetch_targets(schedule: Schedule, at: int, specs: Specs, options: ScheduleOptions) -> list[str]:
    """Return the groups to prefetch at step ``at``: the chosen ones, or the next distinct ones of the pass.

    Groups that are in memory already count against the limit too, so the unsharded memory stays bounded.
    """
    event = schedule.steps[at].event
    in_backward = event.hook is Hook.PRE_BACKWARD
    spec = specs[event.group]
    chosen = spec.backward_prefetch if in_backward else spec.forward_prefetch
    if chosen is None:
        found: dict[str, None] = {}
        for later in range(at + 1, len(schedule) if spec.has_parameters else 0):
            hook, name, _ = schedule.steps[later].event
            if len(found) >= options.prefetch_limit or hook is Hook.END_FORWARD:
                break
            if hook is event.hook and name != spec.name and specs[name].has_parameters:
                found[name] = None
        chosen = tuple(found)
    return [name for name in chosen if name in specs and (not in_backward or specs[name].unshard_in_backward)]


def _find_gather(steps: Sequence[tuple[Event, list[Action]]], at: int, name: str) -> Gather:
    """Return the next all-gather of ``name`` after step ``at`` of its pass, or one of ``name`` alone."""
    for event, actions in steps[at + 1 :]:
        if event.hook is Hook.END_FORWARD:
            break
        for action in actions:
            if isinstance(action, Gather) and name in action.groups:
                return action
    return Gather((name,))


def _take_gather(steps: Sequence[tuple[Event, list[Action]]], at: int, found: Gather, moved: Gather) -> None:
    """Remove the groups of ``moved`` from ``found``, which is after step ``at``.

    The others are in memory now and are freed before that all-gather, so it stays for them.
    """
    left = tuple(group for group in found.groups if group not in moved.groups)
    for _, actions in steps[at + 1 :]:
        for index, action in enumerate(actions):
            if action is found:
                actions[index : index + 1] = [Gather(left)] if left else []
                return


# -- reductions in flight


def bound_in_flight(schedule: Schedule, specs: Specs, options: ScheduleOptions) -> Schedule:
    """Insert the waits that keep the memory of reductions in flight bounded, and the wait at the end of backward."""
    in_flight: deque[tuple[int, int]] = deque()
    steps = []
    for event, actions in schedule:
        changed: list[Action] = []
        for action in actions:
            if isinstance(action, Reduce):
                launched = _reduction_bytes(action, specs)
                _make_room(in_flight, launched, options.max_reductions, changed)
                in_flight.append(launched)
            changed.append(action)
        if event.hook is Hook.END_BACKWARD and in_flight and options.is_last_backward:
            changed.append(WaitReduce(len(in_flight)))
        steps.append(Step(event, tuple(changed)))
    return replace(schedule, steps=tuple(steps))


def _reduction_bytes(action: Reduce, specs: Specs) -> tuple[int, int]:
    """Return the gradient bytes of ``action``, and those of all buckets of its groups."""
    groups = dict.fromkeys(bucket.group for bucket in action.buckets)
    return (
        sum(specs[bucket.group].gradient_bytes[bucket.number] for bucket in action.buckets),
        sum(sum(specs[name].gradient_bytes) for name in groups),
    )


def _make_room(
    in_flight: deque[tuple[int, int]], launched: tuple[int, int], limit: int | None, actions: list[Action]
) -> None:
    count = 0
    while in_flight and is_full(in_flight, launched, limit):
        in_flight.popleft()
        count += 1
    if count:
        actions.append(WaitReduce(count))


def is_full(in_flight: Collection[tuple[int, int]], launched: tuple[int, int], limit: int | None) -> bool:
    """Return whether the reductions ``in_flight`` leave no room for ``launched``.

    Each reduction in flight holds memory for its message. Without a ``limit`` on their number, as on streams, the limit
    is in bytes: hardly more than those of the largest group in flight. So groups of equal size wait for each other,
    while the buckets of one group, or a small group after a large one, follow without waiting.

    Args:
        in_flight: of each reduction, its gradient bytes, and those of all buckets of its groups.
        launched: the same of the next reduction.
        limit: ``max_reductions`` of the options.
    """
    if limit is not None:
        return len(in_flight) >= limit
    together = [*in_flight, launched]
    largest = max(_MIN_BYTES_IN_FLIGHT, *(of_groups for _, of_groups in together))
    return sum(nbytes for nbytes, _ in together) > largest + largest // _SLACK_DIVISOR
