"""Plans of randomly drawn forwards, the tests of each pass, and the plans that a root keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from composable_fsdp.policies import ReshardKind
from tests._internals import ForwardRecord
from tests._internals import group_plan as s
from tests._internals import schedule as g

Drawn: TypeAlias = tuple[ForwardRecord, dict[str, g.GroupFacts], g.Limits]
Tree: TypeAlias = Sequence[tuple[str, "Tree"]]

NAMES = st.sampled_from("abcdefgh")
TREES = st.lists(st.tuples(NAMES, st.lists(st.tuples(NAMES, st.just(())), max_size=2)), max_size=10)
PLAIN: dict[str, Any] = {"can_fuse": True, "reshard": ReshardKind.AUTO, "unshard_in_backward": True}
CHOSEN = st.none() | st.lists(st.sampled_from(["a", "b", "c", "of another root"]), max_size=3).map(tuple)


def facts_of(name: str, nbytes: int = 1, *, is_small: bool = False, **changes: Any) -> g.GroupFacts:
    values = PLAIN | {"forward_prefetch": None, "backward_prefetch": None, "has_parameters": True} | changes
    return g.GroupFacts(name=name, nbytes=nbytes, full_bytes=nbytes, is_small=is_small, **values)


def record_of(tree: Tree, facts: Mapping[str, g.GroupFacts]) -> ForwardRecord:
    """Return the record of nested modules, given as names and children. The outermost is called root."""
    record = ForwardRecord()

    def run(name: str, inside: Tree) -> None:
        record.events.append(s.Event(s.Hook.PRE_FORWARD, name))
        for child in inside:
            run(*child)
        record.end(s.Event(s.Hook.POST_FORWARD, name), leads_to_backward=facts[name].has_parameters)

    run("root", tree)
    return record


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    facts = {
        name: facts_of(
            name,
            draw(st.integers(0, 4)),
            is_small=name != "root" and draw(st.booleans()),
            can_fuse=draw(st.integers(0, 3)) > 0,
            reshard=draw(st.sampled_from(ReshardKind)),
            unshard_in_backward=draw(st.integers(0, 3)) > 0,
            has_parameters=draw(st.integers(0, 4)) > 0,
            forward_prefetch=draw(CHOSEN),
            backward_prefetch=draw(CHOSEN),
        )
        for name in ("root", *"abcdefgh")
    }
    limits = g.Limits(draw(st.integers(0, 3)), draw(st.integers(0, 8)), draw(st.booleans()))
    return record_of(draw(TREES), facts), facts, limits


def begun(record: ForwardRecord) -> list[str]:
    return [event.group for event in record.events if event.hook is s.Hook.PRE_FORWARD]


def both(plan: g.Plan) -> Iterator[tuple[Sequence[g.PlannedRun], bool]]:
    """Yield the runs of each pass, and True for those of backward."""
    yield plan.forward, False
    yield plan.backward, True


@given(drawn())
def test_a_plan_has_each_run_of_forward_and_those_of_backward_in_reverse(model: Drawn) -> None:
    record, facts, limits = model
    plan = g.make_plan(record, facts, limits)
    assert [run.group for run in plan.forward] == begun(record)
    ended = [event.group for event in record.events if event.hook is s.Hook.POST_FORWARD]
    assert [run.group for run in plan.backward] == [name for name in reversed(ended) if facts[name].has_parameters]
    for run in (*plan.forward, *plan.backward):
        assert run.own[0] == run.group, "gathered by its own run at the latest"
        assert len(set(run.own)) == len(run.own)


@given(drawn())
def test_a_group_is_gathered_only_with_those_of_its_fusion_that_still_run(model: Drawn) -> None:
    record, facts, limits = model
    plan = g.make_plan(record, facts, limits)
    for runs, in_backward in both(plan):
        for at, run in enumerate(runs):
            fusion, later = plan.fused.get(run.group, (run.group,)), {each.group for each in runs[at + 1 :]}
            fusion = fusion[::-1] if in_backward else fusion
            rest = fusion[fusion.index(run.group) + 1 :]
            can = [n for n in (run.group, *rest) if facts[n].can_fuse]
            if in_backward:
                can = [n for n in can if facts[n].unshard_in_backward]
            expected = [n for n in can[1:] if n in later] if can[:1] == [run.group] else []
            assert list(run.own[1:]) == expected


def next_groups(runs: Sequence[g.PlannedRun], at: int, facts: Mapping[str, g.GroupFacts], limit: int) -> list[str]:
    later = dict.fromkeys(run.group for run in runs[at + 1 :] if facts[run.group].has_parameters)
    later.pop(runs[at].group, None)
    return list(later)[:limit]


@given(drawn())
def test_the_next_groups_are_prefetched_up_to_the_limit_or_those_that_the_user_chose(model: Drawn) -> None:
    record, facts, limits = model
    for runs, in_backward in both(g.make_plan(record, facts, limits)):
        for at, run in enumerate(runs):
            own = facts[run.group]
            chosen = own.backward_prefetch if in_backward else own.forward_prefetch
            if chosen is None:
                chosen = tuple(next_groups(runs, at, facts, limits.prefetch)) if own.has_parameters else ()
                assert len(run.ahead) <= limits.prefetch
            names = [n for n in chosen if n in facts and (facts[n].unshard_in_backward or not in_backward)]
            assert [gather[0] for gather in run.ahead] == names


@given(drawn())
def test_a_prefetch_gathers_what_the_run_itself_would_gather(model: Drawn) -> None:
    record, facts, limits = model
    plan = g.make_plan(record, facts, limits)
    for runs, in_backward in both(plan):
        for at, run in enumerate(runs):
            for gather in run.ahead:
                own = next((each.own for each in runs[at + 1 :] if each.group == gather[0]), None)
                assert gather == (own or g.gathered_with(gather[0], facts, plan.fused, in_backward=in_backward))


@given(drawn())
def test_a_forward_on_streams_gathers_ahead_before_waits_and_keeps_the_groups_that_backward_needs_first(
    model: Drawn,
) -> None:
    record, facts, limits = model
    plan = g.make_plan(record, facts, limits)
    assert {run.before_wait for run in plan.forward} == {limits.has_streams}
    assert {run.before_wait for run in plan.backward} <= {False}
    with_parameters = [name for name in begun(record) if facts[name].has_parameters]
    last = with_parameters[len(with_parameters) - min(len(with_parameters), 1 + limits.prefetch) :]
    kept = {n for n in last if facts[n].reshard is ReshardKind.AUTO and facts[n].unshard_in_backward}
    for run in plan.forward:
        assert set(run.keep) == (kept if limits.has_streams and limits.prefetch else set())
        for name, together in run.keep.items():
            assert together[0] == name
            assert list(together) == last[-len(together) :], "those that come after it are in memory with it"
            assert len(together) <= 1 + limits.prefetch, "as many as backward would prefetch"
    assert not any(run.keep for run in plan.backward)


@given(drawn(), st.booleans())
def test_given_fusions_are_used_instead_of_those_of_the_order(model: Drawn, alone: bool) -> None:
    record, facts, limits = model
    given_fusions: dict[str, tuple[str, ...]] = {} if alone else dict.fromkeys("ab", ("a", "b"))
    plan = g.make_plan(record, facts, limits, given_fusions)
    assert plan.fused == given_fusions
    gathers = [gather for runs, _ in both(plan) for run in runs for gather in (run.own, *run.ahead)]
    assert all(len(gather) == 1 or set(gather) == {"a", "b"} for gather in gathers)


SIZES = st.dictionaries(NAMES, st.integers(0, 100))


@given(st.lists(NAMES, max_size=20), SIZES, st.sets(NAMES), st.integers(0, 150))
def test_fusions_are_as_many_small_adjacent_groups_as_the_limit_allows(order, sizes, without, limit: int) -> None:
    facts = {
        n: facts_of(n, sizes.get(n, limit + 1), is_small=n in sizes, has_parameters=n not in without)
        for n in "abcdefgh"
    }
    first_runs = [name for name in dict.fromkeys(order) if name not in without]
    fused = g.fusions(dict.fromkeys(order), facts, limit)
    for group, fusion in fused.items():
        assert group in fusion
        assert len(fusion) > 1
        assert all(name in sizes for name in fusion), "each is small"
        assert sum(sizes[name] for name in fusion) <= limit
        start = first_runs.index(fusion[0])
        assert tuple(first_runs[start : start + len(fusion)]) == fusion, (
            "a group without parameters separates no others"
        )
        assert all(fused[name] == fusion for name in fusion), "each group is in at most one"
    for left, right in pairwise(dict.fromkeys(fused.get(name, (name,)) for name in first_runs)):
        joined = (*left, right[0])
        assert not (all(name in sizes for name in joined) and sum(sizes[name] for name in joined) <= limit)


def test_a_limit_of_zero_bytes_fuses_no_group_that_has_bytes() -> None:
    assert g.fusions("abc", {name: facts_of(name, is_small=True) for name in "abc"}, 0) == {}


def test_a_group_that_cannot_be_fused_is_gathered_alone() -> None:
    facts = {name: facts_of(name) for name in "abc"}
    fused = dict.fromkeys("abc", tuple("abc"))

    def together(name: str, *, in_backward: bool = False) -> str:
        return "".join(g.gathered_with(name, facts, fused, in_backward=in_backward))

    assert [together(name) for name in "abc"] == ["abc", "bc", "c"]
    assert [together(name, in_backward=True) for name in "cba"] == ["cba", "ba", "a"]
    facts["b"] = facts_of("b", can_fuse=False)
    assert [together(name) for name in "abc"] == ["ac", "b", "c"]
    facts["b"] = facts_of("b", unshard_in_backward=False)
    assert [together(name) for name in "abc"] == ["abc", "bc", "c"]
    assert [together(name, in_backward=True) for name in "cba"] == ["ca", "b", "a"]
    assert g.gathered_with("a", facts, {}, in_backward=False) == ("a",)
    assert g.gathered_with("a", facts, {"b": ("b", "c")}, in_backward=False) == ("a",)
