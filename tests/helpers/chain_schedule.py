"""The schedule of a step of groups of free sizes, made from a plan: in tests it stands in for a dry run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from composable_fsdp.policies import ReshardKind
from tests._internals import (
    PARAMETER_TRANSITIONS,
    UNSHARD_STARTED,
    DryLauncher,
    ForwardRecord,
    ParameterState,
    ReductionQueue,
    Specs,
    advance,
)
from tests._internals import events as s
from tests._internals import schedule as g

HOST, STREAMS = g.Limits(), g.Limits(has_streams=True)


@dataclass
class Group:
    """The state of a group, for a dry launcher."""

    name: str
    state: ParameterState = ParameterState.SHARDED
    plan: Any = field(default_factory=lambda: SimpleNamespace(in_grad_buckets=True))

    def change(self, operation: Any) -> ParameterState | None:
        before, self.state = self.state, advance(PARAMETER_TRANSITIONS, self.state, operation, self.name)
        return None if self.state is before else before


def chain_schedule(specs: Specs, limits: g.Limits, order: Sequence[str] = ()) -> s.Schedule:
    """Return the schedule of a step in which the first of ``specs`` runs around the others, in ``order``.

    Others of up to half of ``limits.fused_bytes`` are small. The rest reduces each gradient bucket when it is ready.
    ``tests/unit/test_dry_run.py`` compares it with dry runs of real groups.
    """
    root, *inside = specs
    order, small = order or inside, {n for n in inside if specs[n].full_bytes <= limits.fused_bytes // 2}
    record, rest = ForwardRecord(), (ReshardKind.AUTO, True, None, None)
    record.events = [s.Event(s.Hook.PRE_FORWARD, name) for name in (root, *order)]
    record.ended = [*order, *[root] * specs[root].has_parameters]
    facts = {
        n: g.GroupFacts(n, spec.unsharded_bytes, spec.full_bytes, spec.has_parameters, n in small, True, *rest)
        for n, spec in specs.items()
    }
    plan = g.make_plan(record, facts, limits)
    left, groups, ready = [run.group for run in plan.backward], {n: Group(n) for n in specs}, set[str]()
    steps: list[tuple[s.Event, list[s.Action]]] = []
    launcher = DryLauncher(lambda action: steps[-1][1].append(action), has_streams=limits.has_streams)
    plans: Any = SimpleNamespace(max_reductions=None if limits.has_streams else 1, fused_for=())
    queue = ReductionQueue(launcher, plans)
    queue.begin_backward()

    def begin(hook: s.Hook, name: str = "", bucket: int = -1) -> None:
        steps.append((s.Event(hook, name, bucket), []))

    def unshard(hook: s.Hook, run: g.PlannedRun) -> None:
        begin(hook, run.group)
        if not run.before_wait and groups[run.group].state in UNSHARD_STARTED:
            launcher.wait(groups[run.group])
        for names in (run.own, *run.ahead):
            if groups[names[0]].state not in UNSHARD_STARTED:
                launcher.gather([groups[name] for name in names], "")
        launcher.wait(groups[run.group])

    def launch(*buckets: s.GradBucket) -> None:
        sizes = {name: specs[name].gradient_bytes for name, _ in buckets}
        launched: Any = SimpleNamespace(is_last=False, partial=False, round_bytes=sum(map(sum, sizes.values())))
        launched.nbytes = sum(sizes[name][number] for name, number in buckets)
        launched.by_group = [(groups[name], [number]) for name, number in buckets]
        queue._launch(launched)

    def reduce(name: str) -> None:
        """Reduce the gradients of ``name`` bucket by bucket, or all of its fusion once these are ready."""
        fusion = plan.fused.get(name, ())
        ready.add(name)
        buckets = [s.GradBucket(n, i) for n in fusion or (name,) for i in range(len(specs[n].gradient_bytes))]
        if ready.issuperset(fusion):
            for together in [buckets] if fusion else [[bucket] for bucket in buckets]:
                launch(*together)

    def end_run(name: str) -> None:
        """End a run in backward. Gradients are complete after the last one."""
        left.remove(name)
        numbers = range(len(specs[name].gradient_bytes)) if name not in left else range(0)
        in_units = len(numbers) > 1 and name not in (root, *small) and order.count(name) == 1
        is_freed_first = limits.has_streams and name != root
        for number in numbers if in_units else numbers[-1:]:
            begin(s.Hook.GRAD_READY, name, number)
            if in_units:
                launch(s.GradBucket(name, number))
            elif not is_freed_first:
                reduce(name)
        begin(s.Hook.POST_BACKWARD, name)
        launcher.free(groups[name])
        if numbers and is_freed_first and not in_units:
            reduce(name)

    for run in plan.forward:
        unshard(s.Hook.PRE_FORWARD, run)
        if run.group != root:
            begin(s.Hook.POST_FORWARD, run.group)
            if run.group not in run.keep:
                launcher.free(groups[run.group])
    begin(s.Hook.POST_FORWARD, root)
    begin(s.Hook.END_FORWARD)
    for run in plan.backward:
        unshard(s.Hook.PRE_BACKWARD, run)
        if run.group != root:
            end_run(run.group)
    if root in left:
        end_run(root)
    begin(s.Hook.END_BACKWARD)
    launcher.free(groups[root])
    queue.drain()
    return s.Schedule(tuple(s.Step(event, tuple(actions)) for event, actions in steps))
