"""Schedules of randomly drawn models, and tests of each pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp.policies import Reshard, ReshardKind
from tests._internals import GroupSpec, ScheduleOptions, passes, schedule
from tests._internals import schedule as s

KINDS = [
    Reshard(ReshardKind.AUTO),
    Reshard(ReshardKind.ALWAYS),
    Reshard(ReshardKind.NEVER),
    Reshard(ReshardKind.SMALLER, 2),
]
MIB = 1 << 20


def events_of(tree: object, name: str = "root") -> list[schedule.Event]:
    """Return the forward events of nested modules, given as a dict or pairs of names and children."""
    inside = [event for child, below in tree for event in events_of(below, child)]  # type: ignore[attr-defined]
    return [s.Event(s.Hook.PRE_FORWARD, name), *inside, s.Event(s.Hook.POST_FORWARD, name)]


NAMES = st.sampled_from("abcdefgh")
TREES = st.lists(st.tuples(NAMES, st.just(())), max_size=12)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[schedule.Event], dict[str, GroupSpec], ScheduleOptions]:
    order = events_of(draw(TREES))
    specs = {}
    for name in dict.fromkeys(event.group for event in order):
        buckets = draw(st.integers(1, 4))
        specs[name] = GroupSpec(
            name,
            unsharded_bytes=(size := draw(st.integers(0, 4)) * MIB),
            full_bytes=size,
            gradient_bytes=(size // buckets + 1,) * buckets,
            is_root=name == "root",
            is_small=draw(st.booleans()),
            can_fuse=draw(st.booleans()),
            reshard=draw(st.sampled_from(KINDS)),
            reshard_after_backward=draw(st.booleans()),
            unshard_in_backward=draw(st.integers(0, 4)) > 0,
            reduces=draw(st.booleans()),
            reduces_grad_buckets=draw(st.booleans()),
            frees_with_last_gradient=draw(st.booleans()),
            has_nested=name == "root",
        )
    options = ScheduleOptions(
        prefetch_limit=draw(st.integers(0, 3)),
        max_unsharded_bytes=draw(st.none() | st.integers(0, 12).map(lambda n: n * MIB)),
        max_fused_bytes=draw(st.integers(0, 8)) * MIB,
        reductions_in_flight=draw(st.none() | st.integers(1, 3)),
        host_waits=draw(st.booleans()),
        unequal_use=draw(st.booleans()),
    )
    return order, specs, options


def buckets_reduced(plan: schedule.Schedule) -> Counter[object]:
    return Counter(
        b for step in plan for action in step.actions if isinstance(action, s.Reduce) for b in action.buckets
    )


@given(models())
def test_every_group_is_gathered_before_it_computes_and_every_bucket_is_reduced_once(
    model: tuple[list[schedule.Event], dict[str, GroupSpec], ScheduleOptions],
) -> None:
    order, specs, options = model
    plan = passes.build(order, specs, options)
    held: set[str] = set()
    unused: set[str] = set()
    in_flight = 0
    for event, actions in plan:
        assert event.hook not in (s.Hook.END_FORWARD, s.Hook.END_BACKWARD) or not unused, (
            "a group is gathered but not used"
        )
        for action in actions:
            if isinstance(action, s.Gather):
                assert not held.intersection(action.groups), f"{event}: gathered twice"
                held.update(action.groups)
                unused.update(action.groups)
            elif isinstance(action, s.Wait):
                assert action.group in held, f"{event}: waits for a group that is not gathered"
                unused.discard(action.group)
            elif isinstance(action, s.Free | s.Shrink):
                assert action.group in held, f"{event}: frees a group that is not unsharded"
                held.remove(action.group)
            elif isinstance(action, s.Reduce):
                in_flight += 1
            elif isinstance(action, s.WaitReduce):
                in_flight -= action.count
        if event.hook is s.Hook.PRE_FORWARD or (
            event.hook is s.Hook.PRE_BACKWARD and specs[event.group].unshard_in_backward
        ):
            assert event.group in held
    assert in_flight == 0
    assert all(not specs[name].reshard_after_backward for name in held)
    expected = {
        s.GradBucket(name, number)
        for name, spec in specs.items()
        for number in range(len(spec.gradient_bytes))
        if spec.reduces
    }
    assert buckets_reduced(plan) == Counter(expected)


@given(models())
def test_passes_change_when_things_happen_and_not_what_happens(
    model: tuple[list[schedule.Event], dict[str, GroupSpec], ScheduleOptions],
) -> None:
    order, specs, options = model
    plan, eager = passes.build(order, specs, options), passes.eager(order, specs, options)
    assert [step.event for step in plan] == [step.event for step in eager]
    assert buckets_reduced(plan) == buckets_reduced(eager)


@given(models())
def test_prefetching_stays_within_the_bound(
    model: tuple[list[schedule.Event], dict[str, GroupSpec], ScheduleOptions],
) -> None:
    order, specs, options = model
    if options.max_unsharded_bytes is None:
        return
    plan, held = passes.build(order, specs, options), set[str]()
    for event, actions in plan:
        for action in actions:
            if isinstance(action, s.Gather):
                held.update(action.groups)
                if event.group not in action.groups:
                    assert sum(specs[n].unsharded_bytes for n in held) <= options.max_unsharded_bytes
            elif isinstance(action, s.Free | s.Shrink):
                held.discard(action.group)


def line_of(plan: schedule.Schedule, event: schedule.Event) -> list[str]:
    (actions,) = [step.actions for step in plan if step.event == event]
    return list(map(str, actions))


CHAIN = events_of([(name, ()) for name in "abc"])


def chain(**changes: object) -> dict[str, GroupSpec]:
    specs = {n: GroupSpec(n, MIB, MIB, (MIB,), **changes) for n in "abc"}  # type: ignore[arg-type]
    return {"root": GroupSpec("root", has_parameters=False, is_root=True, has_nested=True), **specs}


def test_the_next_group_is_gathered_before_the_wait_or_on_the_host_after_that_for_a_prefetched_one() -> None:
    for options, second in (
        (ScheduleOptions(), ["gather c", "wait b"]),
        (ScheduleOptions(host_waits=True), ["wait b", "gather c"]),
    ):
        plan = passes.build(CHAIN, chain(), options)
        assert line_of(plan, s.Event(s.Hook.PRE_FORWARD, "a")) == ["gather a", "gather b", "wait a"]
        assert line_of(plan, s.Event(s.Hook.PRE_FORWARD, "b")) == second
        assert line_of(plan, s.Event(s.Hook.PRE_FORWARD, "c")) == ["wait c"]


def test_the_last_groups_of_forward_are_kept_if_the_device_would_wait_for_them() -> None:
    def after(options: ScheduleOptions) -> list[str]:
        plan = passes.build(CHAIN, chain(), options)
        return line_of(plan, s.Event(s.Hook.POST_FORWARD, "c")) + line_of(plan, s.Event(s.Hook.PRE_BACKWARD, "c"))

    assert after(ScheduleOptions()) == ["keep c", "wait c"], "the group to prefetch is kept too"
    assert after(ScheduleOptions(max_unsharded_bytes=MIB)) == ["keep c", "wait c"]
    assert after(ScheduleOptions(prefetch_limit=0)) == ["free c", "gather c", "wait c"]
    assert after(ScheduleOptions(host_waits=True)) == ["free c", "gather c", "gather b", "wait c"]
    assert after(ScheduleOptions(max_unsharded_bytes=0)) == ["free c", "gather c", "wait c"]


@given(st.integers(1, 3))
def test_groups_kept_for_backward_take_no_more_memory_than_a_prefetch_of_them(limit: int) -> None:
    options = ScheduleOptions(prefetch_limit=limit)
    kept, held = set[str](), set[str]()
    for event, actions in passes.build(CHAIN, chain(), options):
        for action in actions:
            if isinstance(action, s.Gather):
                held.update(action.groups)
            elif isinstance(action, s.Keep):
                kept.add(action.group)
            elif isinstance(action, s.Free):
                held.discard(action.group)
        assert len(held - {"root"}) <= 1 + limit, event
    assert kept - {"root"} == set("abc"[-1 - limit :])


def test_a_prefetch_in_backward_follows_the_wait_for_a_prefetched_group() -> None:
    specs = chain(reduces_grad_buckets=True)
    specs["c"] = replace(specs["c"], gradient_bytes=(1, 1, 1, 1))
    plan = passes.build(CHAIN, specs, ScheduleOptions(host_waits=True))
    assert line_of(plan, s.Event(s.Hook.PRE_BACKWARD, "c")) == ["gather c", "gather b", "wait c"]
    assert line_of(plan, s.Event(s.Hook.PRE_BACKWARD, "b")) == ["wait b", "gather a"]


def test_the_user_chooses_the_prefetched_groups() -> None:
    specs = chain()
    specs["a"] = replace(specs["a"], forward_prefetch=("c",))
    specs["c"] = replace(specs["c"], backward_prefetch=())
    plan = passes.build(CHAIN, specs, ScheduleOptions(host_waits=True))
    assert line_of(plan, s.Event(s.Hook.PRE_FORWARD, "a")) == ["gather a", "gather c", "wait a"]
    assert line_of(plan, s.Event(s.Hook.PRE_BACKWARD, "c")) == ["gather c", "wait c"]


def test_small_adjacent_groups_share_a_gather_and_a_reduction() -> None:
    plan = passes.build(CHAIN, chain(is_small=True), ScheduleOptions(max_fused_bytes=2 * MIB, host_waits=True))
    assert line_of(plan, s.Event(s.Hook.PRE_FORWARD, "a")) == ["gather a, b", "wait a"]
    assert line_of(plan, s.Event(s.Hook.GRAD_READY, "b", 0)) == []
    assert "reduce a[0], b[0]" in line_of(plan, s.Event(s.Hook.GRAD_READY, "a", 0))


def test_a_fused_gather_is_not_moved_if_one_of_its_groups_does_not_fit() -> None:
    specs = chain(is_small=True)
    specs["a"] = replace(specs["a"], is_small=False)
    specs["b"] = replace(specs["b"], unsharded_bytes=3 * MIB)
    options = ScheduleOptions(prefetch_limit=2, max_unsharded_bytes=3 * MIB, max_fused_bytes=4 * MIB)
    plan = passes.build(CHAIN, specs, options)
    assert line_of(plan, s.Event(s.Hook.PRE_FORWARD, "a")) == ["gather a", "wait a"]
    assert line_of(plan, s.Event(s.Hook.PRE_FORWARD, "b")) == ["gather b, c", "wait b"]


def test_tied_weights_are_gathered_with_their_user_and_freed_after_the_last_one() -> None:
    specs = chain()
    specs["c"] = replace(specs["c"], owners=("a",))
    specs["a"] = replace(specs["a"], users=("c",))
    plan = passes.build(CHAIN, specs, ScheduleOptions(prefetch_limit=0, host_waits=True))
    assert line_of(plan, s.Event(s.Hook.PRE_FORWARD, "c")) == ["gather c", "gather a", "wait c", "wait a"]
    assert line_of(plan, s.Event(s.Hook.POST_FORWARD, "c")) == ["free c", "free a"]


def test_a_schedule_prints_as_a_table() -> None:
    lines = str(passes.build(CHAIN, chain(), ScheduleOptions(host_waits=True))).splitlines()
    assert lines[1] == "pre-forward a              | gather a; gather b; wait a"
    assert lines[-1] == "end of backward            | free root; wait for 1 reduction"
    assert len({line.index("|") for line in lines if "|" in line}) == 1


HOST = ScheduleOptions(host_waits=True)


def test_streams_reduce_a_whole_group_once_its_parameters_are_freed() -> None:
    ready, end = s.Event(s.Hook.GRAD_READY, "c", 0), s.Event(s.Hook.POST_BACKWARD, "c")
    on_streams, on_host = passes.build(CHAIN, chain(), ScheduleOptions()), passes.build(CHAIN, chain(), HOST)
    assert (line_of(on_streams, ready), line_of(on_streams, end)) == ([], ["free c", "reduce c[0]"])
    assert "reduce c[0]" in line_of(on_host, ready)
    for change in ({"has_nested": True}, {"reshard_after_backward": False}, {"users": ("b",)}):
        kept = passes.build(CHAIN, chain() | {"c": replace(chain()["c"], **change)}, ScheduleOptions())
        assert line_of(kept, ready) == ["reduce c[0]"], f"nothing is freed first: {change}"


ORDERS = st.lists(NAMES, max_size=20)
SIZES = st.dictionaries(NAMES, st.integers(0, 100))


@given(ORDERS, SIZES, st.integers(0, 150))
def test_fused_groups_are_small_enough_and_adjacent(order: list[str], sizes: dict[str, int], limit: int) -> None:
    fused = passes.fuse_adjacent(order, sizes, limit)
    first_runs = list(dict.fromkeys(order))
    for group, run in fused.items():
        assert group in run
        assert len(run) > 1
        assert sum(sizes[name] for name in run) <= limit
        start = first_runs.index(run[0])
        assert tuple(first_runs[start : start + len(run)]) == run
        assert all(fused[name] == run for name in run)


@given(ORDERS, SIZES, st.integers(0, 150))
def test_adjacent_groups_within_the_limit_are_fused(order: list[str], sizes: dict[str, int], limit: int) -> None:
    fused = passes.fuse_adjacent(order, sizes, limit)
    runs = list(dict.fromkeys(fused.get(name, (name,)) for name in order))
    for left, right in pairwise(runs):
        joined = (*left, right[0])
        assert not (all(name in sizes for name in joined) and sum(sizes[name] for name in joined) <= limit)


def test_a_limit_of_zero_bytes_fuses_no_group_that_has_bytes() -> None:
    assert passes.fuse_adjacent("abc", {"a": 1, "b": 1, "c": 1}, 0) == {}
