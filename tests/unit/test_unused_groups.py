"""A rank acts for groups that it skips, so that all ranks have the same sequence of begins and ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests._internals import ForwardRecord, UnusedGroups, group_plan, newly_reached

Tree = list[tuple[str, int]]


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> Tree:
    """Draw groups in pre-order, each with the number of groups inside it."""

    def grow(name: str, depth: int) -> Tree:
        children = draw(st.integers(0, 3)) if depth else 0
        inside = [group for i in range(children) for group in grow(f"{name}.{i}", depth - 1)]
        return [(name, len(inside)), *inside]

    return grow("root", depth)


def run(tree: Tree, runs: set[str]) -> list[str]:
    """Return the begins and ends on a rank that runs the groups ``runs``, including those for skipped groups."""
    groups = UnusedGroups(tree)
    events: list[str] = []

    def walk(place: int) -> None:
        name, inside = tree[place]
        if name in runs:
            events.extend(f"{'begin' if begins else 'end'} {group}" for group, begins in groups.up_to(name, True))
            events.append(f"begin {name}")
        child = place + 1
        while child <= place + inside:
            walk(child)
            child += 1 + tree[child][1]
        if name in runs:
            events.extend(f"{'begin' if begins else 'end'} {group}" for group, begins in groups.up_to(name, False))
            events.append(f"end {name}")

    walk(0)
    events.extend(f"{'begin' if begins else 'end'} {group}" for group, begins in groups.rest())
    return events


@given(trees(), st.data())
def test_ranks_that_run_different_groups_perform_the_same_actions(tree: Tree, data: st.DataObject) -> None:
    """Check any choice of groups: a program may call a module of a group without a call of the one around it."""
    names = [name for name, _ in tree]
    skipped = data.draw(st.sets(st.sampled_from(names[1:]))) if len(names) > 1 else set()
    assert run(tree, set(names) - skipped) == run(tree, set(names))


def test_a_group_passed_without_running_is_late() -> None:
    groups = UnusedGroups([("root", 2), ("a", 0), ("b", 0)])
    groups.up_to("root", True)
    assert [group for group, _ in groups.up_to("b", True)] == ["a", "a"]
    assert groups.is_late("a")
    assert groups.is_late("b")
    assert not UnusedGroups([("root", 0)]).is_late("elsewhere")


@given(st.integers(1, 8), st.lists(st.integers(0, 7), max_size=8))
def test_backward_visits_every_position_once_in_reverse_order(length: int, entered: list[int]) -> None:
    record = ForwardRecord()
    for _ in range(length):
        record.end(group_plan.Event(group_plan.Hook.POST_FORWARD, "group"), leads_to_backward=True)
    lowest: dict[ForwardRecord, int] = {}
    reached = [p for position in entered if position < length for p in newly_reached(lowest, record, position)]
    reached += newly_reached(lowest, record, 0)
    assert reached == list(range(length - 1, -1, -1))
