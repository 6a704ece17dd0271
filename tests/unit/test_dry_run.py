"""Schedules are dry runs of an ordinary step, and steady steps of drawn models perform what they say."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

from composable_fsdp import FSDPModule, fully_shard
from composable_fsdp.trace import Operation, Recorder
from tests._internals import Hook, Root, dry_run, root_of, state_of
from tests.helpers.sharding import fake_ranks, sharded

RANKS, WIDTH = 4, 8


@dataclass(frozen=True)
class Drawn:
    """A drawn model with leaves, blocks around leaves, and sharding options."""

    leaves: tuple[tuple[int, bool, bool | int | None], ...]
    """For each leaf: its hidden size, a flag to shard it by itself, and ``reshard_after_forward``."""
    around: tuple[int, ...]
    """The leaves that have their own block, which is also sharded."""
    own_last: bool
    """The parameters of a block are used after the group inside it, not before it."""
    order: tuple[int, ...]
    limit: int
    max_unsharded: int | None
    max_fused: int
    keeps_after_backward: bool
    frozen: int | None
    is_synced: bool
    input_needs_gradient: bool
    reduces_unused: bool
    """Ranks may run different modules, so all go through the groups in the order in which they are registered."""


LEAF = st.tuples(
    st.sampled_from([1, 8, 4096, 70_000]), st.integers(0, 3).map(bool), st.sampled_from([None, True, False, 2])
)


@st.composite
def models(draw: st.DrawFn) -> Drawn:
    leaves = tuple(draw(st.lists(LEAF, min_size=1, max_size=6)))
    places = st.integers(0, len(leaves) - 1)
    repeats = draw(st.lists(places, max_size=2))
    return Drawn(
        leaves,
        tuple(sorted(draw(st.sets(places, max_size=2)))),
        draw(st.booleans()),
        (*range(len(leaves)), *repeats),
        draw(st.integers(0, 3)),
        draw(st.none() | st.sampled_from([0, 200_000, 5_000_000])),
        draw(st.sampled_from([0, 100_000, 1 << 20])),
        draw(st.booleans()),
        draw(st.none() | places),
        draw(st.integers(0, 3)) > 0,
        draw(st.booleans()),
        not repeats and draw(st.booleans()),
    )


class Leaf(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, size), nn.Linear(size, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Sequence(nn.Module):
    def __init__(self, parts: list[nn.Module], order: tuple[int, ...]) -> None:
        super().__init__()
        self.parts, self.order = nn.ModuleList(parts), order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.parts[index](x)
        return 2 * x  # so that backward reaches this module before its last child


def build(drawn: Drawn) -> FSDPModule:
    leaves: list[nn.Module] = [Leaf(size) for size, _, _ in drawn.leaves]
    if drawn.frozen is not None:
        leaves[drawn.frozen].requires_grad_(False)
    mesh = init_device_mesh("cpu", (RANKS,))
    for leaf, (_, is_sharded, reshard) in zip(leaves, drawn.leaves, strict=True):
        if is_sharded:
            fully_shard(leaf, mesh=mesh, reshard_after_forward=reshard)
    parts = leaves
    for index in drawn.around:
        inner = [nn.Linear(WIDTH, WIDTH), parts[index]]
        parts[index] = Sequence(inner[::-1] if drawn.own_last else inner, (0, 1))
        fully_shard(parts[index], mesh=mesh)
    model = Sequence([nn.Linear(WIDTH, WIDTH), *parts], (0, *(1 + index for index in drawn.order)))
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    model.set_schedule(
        prefetch_limit=drawn.limit, max_unsharded_bytes=drawn.max_unsharded, max_fused_bytes=drawn.max_fused
    )
    model.set_reshard_after_backward(not drawn.keeps_after_backward)
    model.set_requires_gradient_sync(drawn.is_synced)
    model.set_reduce_scatter_unused_params(drawn.reduces_unused)
    return model


def play(model: FSDPModule, drawn: Drawn) -> Recorder:
    with Recorder() as recorder:
        assert isinstance(model, nn.Module)
        model(torch.ones(1, WIDTH, requires_grad=drawn.input_needs_gradient)).sum().backward()
    return recorder


SHOWN = (Operation.UNSHARD, Operation.WAIT, Operation.RESHARD, Operation.REDUCE, Operation.REDUCED)


def performed(steps: Any) -> Iterator[str]:
    """Yield the lines of the trace that the actions of a dry run would have."""
    in_flight: list[dry_run.Action] = []
    for _, actions in steps:
        for action in actions:
            match action.verb:
                case "gather":
                    yield from (f"unshard {group}" for group in action.groups)
                case "wait":
                    yield f"wait {action.groups[0]}"
                case "free" | "shrink":
                    yield f"reshard {action.groups[0]}"
                case "reduce":
                    in_flight.append(action)
                    yield from (f"reduce {group}" for group in action.groups)
                case "wait for":
                    for done in [in_flight.pop(0) for _ in range(action.number)]:
                        yield from (f"reduced {name}" for name in done.groups if not done.is_partial)


def root_below(model: FSDPModule) -> Root:
    assert isinstance(model, nn.Module)
    return root_of(state_of(model))


def check(plan: dry_run.Schedule, model: FSDPModule, drawn: Drawn) -> None:
    """Check that groups are in memory when they compute, within the bound, and that each gradient is reduced once."""
    states = root_below(model).states
    held = set[str]()
    unused, in_flight, reduced = set[str](), 0, Counter[str]()
    for event, actions in plan:
        for action in actions:
            groups = action.groups
            match action.verb:
                case "gather":
                    assert not held.intersection(groups), f"{event}: gathered twice"
                    held.update(groups)
                    unused.update(groups)
                    nbytes = sum(states[name].group.plan.unsharded_bytes for name in held)
                    is_ahead = event.group not in groups
                    assert not is_ahead or drawn.max_unsharded is None or nbytes <= drawn.max_unsharded, event
                case "wait":
                    assert held.issuperset(groups), f"{event}: waits for a group that is not gathered"
                    unused.difference_update(groups)
                case "free" | "shrink":
                    assert held.issuperset(groups), f"{event}: frees a group that is not unsharded"
                    held.difference_update(groups)
                    unused.difference_update(groups)
                case "reduce":
                    in_flight += 1
                    reduced.update(groups)
                case "wait for":
                    in_flight -= action.number
        if event.hook in (Hook.PRE_FORWARD, Hook.PRE_BACKWARD):
            assert event.group in held
        if event.hook in (Hook.END_FORWARD, Hook.END_BACKWARD):
            assert not unused, "a group is gathered but not used"
    assert in_flight == 0
    assert not held or drawn.keeps_after_backward
    expected = [name for name, state in states.items() if state.group.plan.num_trainable] if drawn.is_synced else []
    assert reduced == Counter(expected)


def step_of(model: FSDPModule, drawn: Drawn, optimizer: SGD) -> None:
    if not drawn.is_synced:  # a step without any reduced gradient is refused
        first = optimizer.param_groups[0]["params"][0]
        first.grad = first.new_zeros(first.shape)
    optimizer.step()


MODELS = int(os.environ.get("DRY_RUN_MODELS", "30"))
"""The number of drawn models. Those of CI are the same in every run."""


@settings(
    max_examples=MODELS,
    suppress_health_check=[HealthCheck.too_slow],
    deadline=None,
    derandomize=MODELS <= 40,
    database=None,
)
@given(models())
def test_steady_iterations_perform_what_their_dry_runs_say(drawn: Drawn) -> None:
    """Forwards in the same order; backwards may reduce a group at another event: no order of gradients is known."""
    with fake_ranks(RANKS):
        model = build(drawn)
        optimizer = SGD(model.parameters(), 0.1)  # type: ignore[attr-defined]
        plan, found = dry_run.Schedule(), list[str]()
        for _ in range(3):
            for state in root_below(model).states.values():
                sharded(state.modules[0]).reshard()
            plan = model.schedule()
            found = [str(event) for event in play(model, drawn) if event.operation in SHOWN]
            step_of(model, drawn, optimizer)
            optimizer.zero_grad()
        check(plan, model, drawn)
        expected = list(performed(plan))
        assert Counter(expected) == Counter(found), plan
        end = [event.hook for event, _ in plan].index(Hook.END_FORWARD)
        forward = list(performed(plan[: end + 1]))
        assert found[: len(forward)] == forward, plan


SIDE = 512
MIB = 4 * SIDE * SIDE
"""The bytes of one group."""


class Chain(nn.Sequential):
    """Layers with names, each a group of the same size."""

    def __init__(self, names: str = "abc", *, own_bias: str = "") -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(SIDE, SIDE, bias=name in own_bias))


def schedule_of(
    model: nn.Module, *, has_streams: bool, change: Callable[[Any], object] | None = None
) -> dry_run.Schedule:
    """Return the schedule of ``model`` after two steps, on the host or as it would be on streams. The layers of a model
    without groups are made groups, and ``change`` is called on it afterwards."""
    if not isinstance(model, FSDPModule):
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    if change is not None:
        change(model)
    for _ in range(2):
        model(torch.ones(1, SIDE, requires_grad=True)).sum().backward()
    with mock.patch.object(root_below(sharded(model)).launcher, "has_streams", has_streams):
        return sharded(model).schedule()


def line_of(plan: dry_run.Schedule, event: str) -> str:
    (line,) = ["; ".join(map(str, step.actions)) for step in plan if str(step.event) == event]
    return line


def chosen(**options: int | None) -> Callable[[Any], object]:
    """Return the function that sets ``options`` of the schedule of a root."""
    return lambda model: model.set_schedule(**options)


@pytest.fixture
def ranks() -> Iterator[None]:
    with fake_ranks(RANKS):
        yield


@pytest.mark.usefixtures("ranks")
def test_a_schedule_prints_as_a_table() -> None:
    plan = schedule_of(Chain(), has_streams=False)
    lines = str(plan).splitlines()
    assert lines[1] == "pre-forward a     | gather a; gather b; wait a"
    assert lines[-1] == "end of backward   | free root; wait for 1 reduction"
    assert len({line.index("|") for line in lines if "|" in line}) == 1


@pytest.mark.parametrize(
    ("has_streams", "options", "after", "back"),
    [
        (True, {}, "", ""),
        (True, {"max_unsharded_bytes": MIB}, "", ""),
        (True, {"prefetch_limit": 0}, "free c", "gather c; wait c"),
        (False, {}, "free c", "gather c; gather b; wait c"),
        (True, {"max_unsharded_bytes": 0}, "free c", "gather c; wait c"),
    ],
)
@pytest.mark.usefixtures("ranks")
def test_the_last_groups_of_forward_are_kept_if_the_device_would_wait_for_them(
    has_streams: bool, options: dict[str, int], after: str, back: str
) -> None:
    plan = schedule_of(Chain(), has_streams=has_streams, change=chosen(**options))
    assert (line_of(plan, "post-forward c"), line_of(plan, "pre-backward c")) == (after, back)


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.usefixtures("ranks")
def test_groups_kept_for_backward_take_no_more_memory_than_a_prefetch_of_them(limit: int) -> None:
    plan = schedule_of(Chain("abcde"), has_streams=True, change=chosen(prefetch_limit=limit))
    held, kept = set[str](), set[str]()
    for event, actions in plan:
        for action in actions:
            if action.verb == "gather":
                held.update(action.groups)
            elif action.verb == "free":
                held.difference_update(action.groups)
        assert len(held - {"root"}) <= 1 + limit, event
        if event.hook is Hook.END_FORWARD:
            kept = held - {"root"}
    assert kept == set("abcde"[-1 - limit :])


@pytest.mark.parametrize("has_streams", [False, True])
@pytest.mark.usefixtures("ranks")
def test_a_fused_gather_is_not_moved_if_one_of_its_groups_does_not_fit(has_streams: bool) -> None:
    model = Chain()
    model.a = nn.Sequential(nn.Linear(SIDE, 3 * SIDE, bias=False), nn.Linear(3 * SIDE, SIDE, bias=False))
    options = chosen(max_unsharded_bytes=7 * MIB, max_fused_bytes=2 * MIB)
    plan = schedule_of(model, has_streams=has_streams, change=options)
    assert line_of(plan, "pre-forward a") == "gather a; wait a"
    assert line_of(plan, "pre-forward b") == "gather b, c; wait b"


def tied() -> nn.Module:
    """Return a chain of groups, of which c uses the weight of a."""
    a, b, c = model = Chain(own_bias="c")
    c.weight = a.weight
    fully_shard(a)
    fully_shard(b)
    fully_shard(c, shared_from=[a])
    return fully_shard(model)


@pytest.mark.usefixtures("ranks")
def test_tied_weights_are_gathered_with_their_user_and_freed_after_the_last_one() -> None:
    plan = schedule_of(tied(), has_streams=False, change=chosen(prefetch_limit=0))
    assert line_of(plan, "pre-forward c") == "gather c; gather a; wait c; wait a"
    assert line_of(plan, "post-forward c") == "free c; free a"


@pytest.mark.usefixtures("ranks")
def test_tied_weights_inside_of_their_user_are_freed_with_it() -> None:
    owner, own = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
    own.weight = owner.weight
    user = fully_shard(nn.Sequential(fully_shard(owner), own), shared_from=[owner])
    plan = schedule_of(fully_shard(nn.Sequential(user, nn.Linear(SIDE, SIDE))), has_streams=False)
    assert line_of(plan, "post-forward 0.0") == ""
    assert line_of(plan, "post-forward 0") == "free 0; free 0.0"


@pytest.mark.usefixtures("ranks")
def test_streams_reduce_a_whole_group_once_its_parameters_are_freed() -> None:
    def lines(model: nn.Module, name: str, *, has_streams: bool = True, keeps: bool = False) -> tuple[str, str]:
        change = (lambda m: m.c.set_reshard_after_backward(False)) if keeps else None
        plan = schedule_of(model, has_streams=has_streams, change=change)
        ready, after = line_of(plan, f"gradients ready {name}"), line_of(plan, f"post-backward {name}")
        return ready.split("; ")[-1], after

    assert lines(Chain(), "c") == ("", "free c; reduce c")
    assert lines(Chain(), "c", has_streams=False) == ("reduce c", "free c")
    assert lines(Chain(), "c", keeps=True) == ("reduce c", ""), "nothing is freed first"
    assert lines(tied(), "a") == ("reduce a", ""), "its user may still need it"
    around = nn.Sequential(nn.Linear(SIDE, SIDE), fully_shard(nn.Linear(SIDE, SIDE)))
    assert lines(nn.Sequential(around), "0") == ("reduce 0", "free 0"), "groups inside it come first"


def calls_per_group(groups: int) -> float:
    """Return the number of Python calls of a steady step per group. All groups except the root are fused."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(groups)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    inputs, calls = torch.ones(1, 4), 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    for step in range(3):
        if step == 2:
            sys.setprofile(count)
        try:
            model(inputs).sum().backward()
        finally:
            sys.setprofile(None)
    return calls / groups


def test_host_work_is_linear_in_the_number_of_fused_groups() -> None:
    with fake_ranks(RANKS):
        assert calls_per_group(64) < 1.2 * calls_per_group(16)
