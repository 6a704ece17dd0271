"""The transition tables of a group's parameters and gradients, and the passes of a root."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable_fsdp import fully_shard
from composable_fsdp.errors import FSDPError, LifecycleError
from composable_fsdp.plugins import Observer
from tests._internals import (
    GRADIENT_TRANSITIONS,
    LOCAL_GRADIENTS,
    PARAMETER_TRANSITIONS,
    GradientOperation,
    GradientState,
    ParameterOperation,
    ParameterState,
    Pass,
    advance,
    group_plan,
    root_of,
    state_of,
)
from tests.helpers.sharding import single_rank

Hook = group_plan.Hook
P, PO, G, GO = ParameterState, ParameterOperation, GradientState, GradientOperation
Table = Mapping[tuple[Any, Any], Any]


def reachable(table: Table, start: Enum) -> set[Enum]:
    found, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        after = {end for (begin, _), end in table.items() if begin is state} - found
        found |= after
        frontier += after
    return found


def draw_transitions(table: Table, start: Enum) -> str:
    """Draw ``table`` as a tree from ``start``. Each state shows its operations where it is first reached. An operation
    that leads from every state to the same one has a line of its own, before the tree."""
    ends: dict[Enum, dict[Enum, Enum]] = {}
    for (begin, operation), end in table.items():
        ends.setdefault(begin, {})[operation] = end
    reached, queue, first_reached_by = {start}, [start], set[tuple[Enum, Enum]]()
    while queue:
        state = queue.pop(0)
        for operation, end in ends[state].items():
            if end not in reached:
                reached.add(end)
                queue.append(end)
                first_reached_by.add((state, operation))
    everywhere = {
        operation: targets.pop()
        for operation in type(next(iter(table))[1])
        if len(targets := {ends[state].get(operation) for state in type(start)}) == 1
    }
    lines = [f"any state: {operation.name} → {end.name}" for operation, end in everywhere.items() if end is not None]

    def draw(state: Enum, first: str, indent: str) -> None:
        stays = [o.name for o, end in ends[state].items() if end is state and o not in everywhere]
        lines.append(f"{first}{state.name}" + (f"  (stays: {', '.join(stays)})" if stays else ""))
        leads = [
            (operation, end)
            for operation, end in ends[state].items()
            if end is not state and ((state, operation) in first_reached_by or operation not in everywhere)
        ]
        for number, (operation, end) in enumerate(leads, start=1):
            branch, below = ("└── ", "    ") if number == len(leads) else ("├── ", "│   ")
            if (state, operation) in first_reached_by:
                draw(end, f"{indent}{branch}{operation.name} → ", indent + below)
            else:
                lines.append(f"{indent}{branch}{operation.name} → {end.name}")

    draw(start, "", "")
    return "\n".join(lines)


def test_the_architecture_page_shows_both_state_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    drawn = f"{draw_transitions(PARAMETER_TRANSITIONS, P.SHARDED)}\n\n{draw_transitions(GRADIENT_TRANSITIONS, G.NONE)}"
    assert f"```text\n{drawn}\n```" in page, f"docs/architecture.md must show:\n{drawn}"


@pytest.mark.parametrize(
    ("table", "start"),
    [(PARAMETER_TRANSITIONS, P.SHARDED), (GRADIENT_TRANSITIONS, G.NONE)],
    ids=["parameters", "gradients"],
)
def test_every_state_is_reached_from_the_first_and_leads_back_to_it(table: Table, start: Enum) -> None:
    assert reachable(table, start) == set(type(start))
    for state in type(start):
        assert start in reachable(table, state)


@pytest.mark.parametrize(
    ("table", "state", "operation"),
    [(t, *row) for t in (PARAMETER_TRANSITIONS, GRADIENT_TRANSITIONS) for row in t if row[1] is not PO.SHRINK],
    ids=lambda value: value.name if isinstance(value, Enum) else "",
)
def test_operations_are_idempotent(table: Table, state: Enum, operation: Enum) -> None:
    once = advance(table, state, operation, "g")
    assert advance(table, once, operation, "g") is once


@given(st.lists(st.sampled_from(PO)))
def test_parameters_are_usable_only_after_a_wait_with_no_reshard_since(operations: list[ParameterOperation]) -> None:
    state, waited = P.SHARDED, False
    for operation in operations:
        if (state, operation) not in PARAMETER_TRANSITIONS:
            continue
        state = advance(PARAMETER_TRANSITIONS, state, operation, "g")
        waited = operation is PO.WAIT or (waited and operation is PO.UNSHARD)
        assert (state is P.UNSHARDED) == waited


@given(st.lists(st.sampled_from(GO)))
def test_gradients_are_local_exactly_while_some_have_not_been_sent(operations: list[GradientOperation]) -> None:
    state, unsent = G.NONE, False
    for operation in operations:
        if (state, operation) not in GRADIENT_TRANSITIONS:
            continue
        state = advance(GRADIENT_TRANSITIONS, state, operation, "g")
        unsent = operation in (GO.ACCUMULATE, GO.READY) or (unsent and operation in (GO.COMPLETE, GO.KEEP))
        assert (state in LOCAL_GRADIENTS) == unsent


@pytest.mark.parametrize(
    ("table", "state", "operation", "legal"),
    [
        (PARAMETER_TRANSITIONS, P.SHARDED, PO.WAIT, "UNSHARD, RESHARD"),
        (GRADIENT_TRANSITIONS, G.NONE, GO.COMPLETE, "ACCUMULATE, READY, REDUCE, DROP"),
    ],
    ids=["parameters", "gradients"],
)
def test_an_illegal_operation_names_group_state_legal_operations_and_remedy(
    table: Table, state: Enum, operation: Enum, legal: str
) -> None:
    message = (
        f"group 'layers.3' is {state.name}: {operation.name} is not legal here (legal: {legal}). "
        "After an exception in forward or backward, call reset_iter_state() on the root module."
    )
    with pytest.raises(LifecycleError, match=f"^{re.escape(message)}$") as caught:
        advance(table, state, operation, "layers.3")
    assert isinstance(caught.value, FSDPError)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.__suppress_context__  # the KeyError does not help the user


class Unseen:
    """An output in which hooks find no tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Layer(nn.Linear):
    """Its backward begins with the given hook."""

    def __init__(self, first: Hook) -> None:
        super().__init__(4, 4)
        self.first = first

    def forward(self, x: torch.Tensor) -> Any:
        if self.first is Hook.POST_BACKWARD:
            return Unseen(x)
        return Unseen(super().forward(x)) if self.first is Hook.GRAD_READY else super().forward(x)


def run_layer(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = layer(x)
    return output.value if isinstance(output, Unseen) else output


class WithBackward(nn.Module):
    """Its forward has a backward of its layer, and another one in which the layer is recomputed."""

    def __init__(self, first: Hook) -> None:
        super().__init__()
        self.layer = fully_shard(Layer(first), reshard_after_forward=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run_layer(self.layer, x).sum().backward()
        if self.layer.first is Hook.PRE_BACKWARD:
            self.layer(checkpoint(self.layer, x, use_reentrant=True)).sum().backward()
        return x


class SeenPasses(Observer):
    """Notes each hook of a root, with the pass before it and after it."""

    def __init__(self) -> None:
        self.before: list[Pass] = []
        self.found: list[tuple[Pass, Hook, Pass]] = []

    def before_hook(self, root: Any, hook: Hook, subject: Any) -> None:
        self.before.append(root.current_pass)

    def after_hook(self, root: Any, hook: Hook, subject: Any) -> None:
        self.found.append((self.before.pop(), hook, root.current_pass))


@cache
def passes_of(first: Hook, *, in_forward: bool) -> list[tuple[Pass, Hook, Pass]]:
    with single_rank():
        seen, x = SeenPasses(), torch.ones(2, 4, requires_grad=True)
        model: Any = WithBackward(first) if in_forward else Layer(first)
        root = root_of(state_of(fully_shard(model, reshard_after_forward=False)))
        root.observers.add(seen)
        loss = run_layer(model, x).sum()
        assert root.current_pass is Pass.IDLE
        if not in_forward:
            loss.backward()
        assert root.current_pass is Pass.IDLE
    return seen.found


IDLE, FORWARD, BACKWARD = Pass.IDLE, Pass.FORWARD, Pass.BACKWARD
OF_BACKWARD = (Hook.PRE_BACKWARD, Hook.GRAD_READY, Hook.POST_BACKWARD)


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("first", OF_BACKWARD)
def test_a_hook_of_backward_begins_it_in_any_other_pass(first: Hook, *, in_forward: bool) -> None:
    around = FORWARD if in_forward else IDLE
    found = passes_of(first, in_forward=in_forward)
    assert next(each for each in found if each[1] in OF_BACKWARD) == (around, first, BACKWARD)
    assert (BACKWARD, Hook.END_BACKWARD, around) in found, "the pass around it goes on"


def test_each_pass_begins_and_ends_with_a_hook_of_its_own() -> None:
    found = {each for first in OF_BACKWARD for inside in (False, True) for each in passes_of(first, in_forward=inside)}
    assert found == {
        (IDLE, Hook.PRE_FORWARD, FORWARD),
        (FORWARD, Hook.PRE_FORWARD, FORWARD),
        (FORWARD, Hook.POST_FORWARD, FORWARD),
        (FORWARD, Hook.END_FORWARD, IDLE),
        (FORWARD, Hook.POST_FORWARD, IDLE),  # of the outermost module: it has the end inside
        *((begun, hook, BACKWARD) for begun in Pass for hook in OF_BACKWARD),
        (BACKWARD, Hook.PRE_FORWARD, BACKWARD),  # recomputation is not a separate forward
        (BACKWARD, Hook.POST_FORWARD, BACKWARD),
        (BACKWARD, Hook.END_BACKWARD, IDLE),
        (BACKWARD, Hook.END_BACKWARD, FORWARD),
    }
