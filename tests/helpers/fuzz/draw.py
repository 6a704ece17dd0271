"""Strategies for programs. Every draw has its simplest value first, so that shrinking removes irrelevant features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from hypothesis import strategies as st

from tests.helpers.fuzz import programs as of
from tests.helpers.fuzz.programs import (
    Again,
    Block,
    Leaf,
    Node,
    Placing,
    Precision,
    Program,
    ShardCall,
    Step,
    completed,
    groups,
    node_infos,
)

T = TypeVar("T")
Draw = Callable[..., T]  # the type in hypothesis has more requirements than needed here

DEPTH = 3
MESHES = {1: ((1,), (1, 1)), 2: ((2,), (1, 2), (2, 1)), 4: ((4,), (2, 2), (1, 4), (4, 1))}
DTYPES = ("float64", "float32", "bfloat16")
SOME_STEPS = st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])


@st.composite
def programs(draw: Draw, world_size: int = 2) -> Program:
    placing = _maybe(draw, _placings(), None)
    tensor_ranks = 1 if placing is None else placing.tensor_ranks
    mesh = draw(st.sampled_from(MESHES[world_size // tensor_ranks]))
    tree = completed(draw(_blocks(DEPTH, mesh[-1], is_root=True)))
    steps = draw(st.lists(_steps(), min_size=1, max_size=of.STEPS))
    if not _is_sharded(tree):  # the last backward may not reach every root, which would then keep its gradients
        steps = [replace(step, hold="none") for step in steps]
    number = len(repr(tree))  # for what is not drawn, because additional draws would change all programs
    may_use_tangents = placing is None and "checkpoint" not in repr(tree)
    steps = [_varied(step, number, mesh, may_use_tangents=may_use_tangents) for step in steps]
    hidden, context = (*of.HIDDEN, *["none"] * 3)[number // 3 % 6], _inside(repr(tree), steps)
    if placing is None and (hidden, context) == ("none", "nothing") and _can_be_split(tree):
        steps = [_split(step) for step in steps]
    return Program(
        tree=tree,
        width=draw(st.sampled_from([2, 1, 3, 4, 5, 7])),
        mesh=mesh,
        placing=placing,
        optimizer=draw(st.sampled_from(["sgd", *of.OPTIMIZERS])),
        feedback=_maybe(draw, st.just(True), False),
        steps=tuple(steps[i % len(steps)] for i in range(of.STEPS)),
        by_seed=number % 3 == 0,
        hidden=hidden,
        inside=context,
    )


@st.composite
def _placings(draw: Draw) -> Placing:
    full = draw(st.sampled_from([True, True, False]))
    arrival = draw(st.sampled_from(of.ARRIVALS)) if full else of.ARRIVALS[0]
    return Placing(tensor_ranks=draw(st.sampled_from([1, 2])) if full else 2, full=full, arrival=arrival)


def _is_sharded(tree: Node) -> bool:
    return not isinstance(tree, Again) and tree.state is not None


def _maybe(draw: Draw, strategy: st.SearchStrategy[T], default: T, one_in: int = 4) -> T:
    return draw(strategy) if draw(st.integers(0, one_in - 1)) == one_in - 1 else default


def _states(draw: Draw, shards: int, one_in: int = 2, *, is_root: bool = False) -> ShardCall | None:
    return _maybe(draw, _some_unit(shards), ShardCall() if is_root else None, one_in)


@st.composite
def _some_unit(draw: Draw, shards: int) -> ShardCall:
    lists = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    smaller = [n for n in (1, 2, 4) if n <= shards]
    return ShardCall(
        reshard=draw(st.sampled_from([None, True, False, *smaller])),
        dim=_maybe(draw, st.sampled_from([1, -1, 2, -2]), 0),
        precision=_maybe(draw, _precisions(), Precision()),
        tied=_maybe(draw, st.just(True), False),
        forward_prefetch=_maybe(draw, lists, None, 6),
        backward_prefetch=_maybe(draw, lists, None, 6),
        method=_maybe(draw, st.just(True), False, 8),
    )


@st.composite
def _precisions(draw: Draw) -> Precision:
    names = st.sampled_from([None, *DTYPES])
    return Precision(
        param=draw(names), reduce=draw(names), output=_maybe(draw, names, None), cast_inputs=draw(st.booleans())
    )


@st.composite
def _leaves(draw: Draw, shards: int) -> Leaf:
    ignored = _maybe(draw, st.just(True), False, 16)
    frozen = tuple(range(of.STEPS)) if ignored else _maybe(draw, SOME_STEPS, ())
    borrows = _maybe(draw, st.just(True), False)
    return Leaf(
        kind="linear" if borrows else draw(st.sampled_from(of.LEAVES)),
        size=draw(st.sampled_from([1, 2, 3, 5])),
        bias=draw(st.booleans()),
        dtype=_maybe(draw, st.sampled_from(DTYPES), "float64"),
        frozen=frozen,
        part=draw(st.sampled_from(["all", "first", "rest"])) if frozen and not ignored else "all",
        ignored=ignored,
        borrows=borrows,
        absent=_maybe(draw, SOME_STEPS, (), 10),
        returns=_maybe(draw, st.sampled_from(of.RETURNS[1:]), "tensor"),
        uses_all=draw(st.booleans()),
        state=_states(draw, shards, 3),
    )


@st.composite
def _blocks(draw: Draw, depth: int, shards: int, *, is_root: bool = False) -> Block:
    node = _nodes(depth - 1, shards)
    return Block(
        kind=draw(st.sampled_from(of.BLOCKS)),
        children=tuple(draw(st.lists(node, min_size=1, max_size=3))),
        times=draw(st.integers(2, 3)),
        absent=() if is_root else _maybe(draw, SOME_STEPS, (), 10),
        returns=_maybe(draw, st.sampled_from(of.RETURNS[1:]), "tensor"),
        uses_all=draw(st.booleans()),
        together=_states(draw, shards),
        state=draw(st.sampled_from([ShardCall(), None]))
        if is_root and draw(st.booleans())
        else _states(draw, shards, is_root=is_root),
    )


@st.composite
def _nodes(draw: Draw, depth: int, shards: int) -> Node:
    kinds = ["leaf", "leaf", "leaf", "again"] + ["block"] * (2 if depth > 0 else 0)
    kind = draw(st.sampled_from(kinds))
    if kind == "again":
        return Again(draw(st.integers(0, 7)))
    return draw(_leaves(shards) if kind == "leaf" else _blocks(depth, shards))


@st.composite
def _steps(draw: Draw) -> Step:
    evaluations = st.lists(st.tuples(st.sampled_from(of.WHENS), st.sampled_from(of.MODES)), min_size=1, max_size=2)
    backwards = tuple(draw(st.lists(st.sampled_from(["all", *of.BACKWARDS]), min_size=1, max_size=3)))
    is_last = _maybe(draw, st.just(True), False)
    if is_last:  # an announced last backward must run: one output may need no gradient, but the sum of both does
        backwards = ("all", *backwards[1:-1], "all")[-len(backwards) :]
    return Step(
        backwards=backwards,
        order=draw(st.sampled_from(["in turn", *of.ORDERS])) if len(backwards) > 1 else "in turn",
        hold=_maybe(draw, st.sampled_from(of.HOLDS[1:-1]), "none", 3),
        keep=_maybe(draw, st.sampled_from(of.KEEPS[1:]), "never", 3),
        is_last=is_last,
        evaluate=_maybe(draw, evaluations.map(tuple), (), 3),
        input_grad=draw(st.booleans()),
        abandoned=_maybe(draw, st.just(True), False, 8),
        by_hand=_maybe(draw, st.sampled_from(of.BY_HAND[1:]), "nothing", 2),
        reshard=_maybe(draw, st.booleans(), None, 6),
        fails=_maybe(draw, st.sampled_from(of.FAILS[1:]), "never", 4),
        fails_at=draw(st.integers(0, 4)),
        generate=_maybe(draw, st.just(True), False, 10),
    )


def _inside(tree: str, steps: Sequence[Step]) -> str:
    """Return the context of a program. A selective checkpoint allows one backward."""
    has_two = any({"twice", "first, then second"}.intersection(step.backwards) for step in steps)
    if "kind='checkpoint'" in tree and not has_two and len(tree) % 4:
        return "selective checkpoints"
    others = [each for each in of.INSIDE if each != "selective checkpoints"]
    return others[len(tree) // 3 % len(others)]


def _can_be_split(tree: Node) -> bool:
    """Return whether torch's pipelining can split a backward: each parameter is used once, and nothing recomputed."""
    nodes = [info.node for info in node_infos(tree)]
    blocks = [node for node in nodes if isinstance(node, Block)]
    return (
        not any(isinstance(node, Again) or (isinstance(node, Leaf) and node.borrows) for node in nodes)
        and not any(block.kind not in ("chain", "residual", "fork", "dead") for block in blocks)
        and not any(block.kind == "fork" and len(block.children) == 1 for block in blocks)
        and not any(call.tied for call in groups(tree).values())
    )


def _split(step: Step) -> Step:
    """Return ``step`` with split backwards if it holds gradients, and what they need. Not drawn, as in :func:`_varied`.
    Parameters must be unsharded, and stay so, when the gradients of weights are computed."""
    if step.hold not in ("all", "no_sync") or len(step.backwards) == 1:
        return step
    return replace(
        step,
        split=True,
        tangents=False,
        backwards=("all",) * len(step.backwards),
        order="in turn",
        keep="until last",
        input_grad=True,
        by_hand="nothing",
        reshard=False,
        fails="never",
    )


def _varied(step: Step, number: int, mesh: tuple[int, ...], *, may_use_tangents: bool) -> Step:
    """Return ``step`` with settings that are not drawn, because additional draws would change all programs."""
    number += len(repr(step))
    finish, in_flight = number % 16, (0, 2, 0, 100)[number // 16 % 4]
    holds = step.hold in ("all", "roots") and len(mesh) == 2 and number % 2
    return replace(
        step,
        hold="all-reduce" if holds else step.hold,
        finish=of.FINISHES[finish] if finish < len(of.FINISHES) else of.FINISHES[0],
        in_flight=in_flight,
        tangents=may_use_tangents and number % 5 == 0,
    )
