"""The features of programs, with a predicate for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tests.helpers.fuzz import programs as of
from tests.helpers.fuzz.programs import Again, Block, Leaf, Program, ShardCall, Step, borrowed, groups, node_infos


def _any_node(test: Callable[[Leaf | Block], object]) -> Callable[[Program], bool]:
    return lambda program: any(not isinstance(p.node, Again) and bool(test(p.node)) for p in node_infos(program.tree))


def _any_leaf(test: Callable[[Leaf], object]) -> Callable[[Program], bool]:
    return _any_node(lambda node: isinstance(node, Leaf) and test(node))


def _any_unit(test: Callable[[ShardCall], object]) -> Callable[[Program], bool]:
    return lambda program: any(test(state) for state in groups(program.tree).values())


def _any_step(test: Callable[[Step], object]) -> Callable[[Program], bool]:
    return lambda program: any(test(step) for step in program.steps)


def _full_mesh(test: Callable[[Program], object]) -> Callable[[Program], bool]:
    return lambda program: program.placing is not None and program.placing.full and bool(test(program))


def _kind(kind: str) -> Callable[[Program], bool]:
    return _any_node(lambda node: node.kind == kind)


def _mixes_dtypes(program: Program) -> bool:
    found: dict[object, set[str]] = {}
    for info in node_infos(program.tree):
        if isinstance(info.node, Leaf):
            found.setdefault(info.state, set()).add(info.node.dtype)
    return any(len(dtypes) > 1 for dtypes in found.values())


def _lists(program: Program) -> Iterable[list[Leaf | Block]]:
    """Return the modules of each list with several modules."""
    found: dict[object, list[Leaf | Block]] = {}
    for info in node_infos(program.tree):
        if info.is_listed and not isinstance(info.node, Again):
            found.setdefault(info.state, []).append(info.node)
    return [nodes for nodes in found.values() if len(nodes) > 1]


FEATURES: Mapping[str, Callable[[Program], bool]] = {
    **{f"leaf {kind}": _kind(kind) for kind in of.LEAVES},
    **{f"block {kind}": _kind(kind) for kind in of.BLOCKS},
    **{f"returns {kind}": _any_node(lambda n, k=kind: n.returns == k) for kind in of.RETURNS},  # type: ignore[misc]
    **{f"backward {kind}": _any_step(lambda s, k=kind: k in s.backwards) for kind in of.BACKWARDS},  # type: ignore[misc]
    **{f"order {kind}": _any_step(lambda s, k=kind: s.order == k) for kind in of.ORDERS},  # type: ignore[misc]
    **{f"hold {kind}": _any_step(lambda s, k=kind: s.hold == k) for kind in of.HOLDS},  # type: ignore[misc]
    **{f"finish by {kind}": _any_step(lambda s, k=kind: s.finish == k) for kind in of.FINISHES},  # type: ignore[misc]
    **{f"keep {kind}": _any_step(lambda s, k=kind: s.keep == k) for kind in of.KEEPS},  # type: ignore[misc]
    **{f"by hand {kind}": _any_step(lambda s, k=kind: s.by_hand == k) for kind in of.BY_HAND},  # type: ignore[misc]
    **{f"fails {kind}": _any_step(lambda s, k=kind: s.fails == k) for kind in of.FAILS},  # type: ignore[misc]
    **{f"optimizer {kind}": (lambda p, k=kind: p.optimizer == k) for kind in of.OPTIMIZERS},  # type: ignore[misc]
    **{
        f"evaluate {when}, {mode}": _any_step(lambda s, pair=(when, mode): pair in s.evaluate)  # type: ignore[misc]
        for when in of.WHENS
        for mode in of.MODES
    },
    **{
        f"reshard_after_forward {value}": _any_unit(lambda u, v=value: u.reshard is v)  # type: ignore[misc]
        for value in (True, False, None, 1, 2)
    },
    **{f"{n}-d mesh": (lambda p, n=n: len(p.mesh) == n) for n in (1, 2)},  # type: ignore[misc]
    **{
        f"dp_mesh_dims, gradients {kind}": _full_mesh(lambda p, k=kind: p.placing.arrival == k)  # type: ignore[misc]
        for kind in of.ARRIVALS
    },
    "dp_mesh_dims, sgd": _full_mesh(lambda p: p.optimizer == "sgd"),
    **{f"dp_mesh_dims, {n}-d data mesh": _full_mesh(lambda p, n=n: len(p.mesh) == n) for n in (1, 2)},  # type: ignore[misc]
    "dp_mesh_dims and a tensor-parallel dim": _full_mesh(lambda p: p.tensor_ranks > 1),
    "tensor-parallel mesh": lambda p: p.placing is not None and not p.placing.full,
    "tensor-parallel sums with reduce_dtype": lambda p: (
        p.tensor_ranks > 1 and any(state.precision.reduce for state in groups(p.tree).values())
    ),
    **{f"hidden states in {kind}": (lambda p, k=kind: p.hidden == k) for kind in of.HIDDEN},  # type: ignore[misc]
    "hidden states that are cast": lambda p: (
        p.hidden != "none" and any(u.precision.param and u.precision.cast_inputs for u in groups(p.tree).values())
    ),
    **{f"inside {kind}": (lambda p, k=kind: p.inside == k) for kind in of.INSIDE},  # type: ignore[misc]
    "selective checkpoint of groups": lambda p: (
        p.inside == "selective checkpoints"
        and any(
            isinstance(info.node, Block) and info.node.kind == "checkpoint" and info.state != info.root
            for info in node_infos(p.tree)
        )
    ),
    "initialised by seed": lambda p: p.by_seed,
    "two threads": lambda p: p.beside is not None,
    "mesh without shards": lambda p: len(p.mesh) == 2 and p.mesh[1] == 1,
    "mesh without replicas": lambda p: len(p.mesh) == 2 and p.mesh[0] == 1,
    "set_reshard_after_forward": _any_step(lambda s: s.reshard is not None),
    "error feedback": lambda p: p.feedback,
    "error feedback and a failed step": lambda p: p.feedback and any(s.fails != "never" for s in p.steps),
    "different numbers of forwards": _any_step(lambda s: s.generate),
    "several reductions in flight": _any_step(lambda s: s.in_flight > 1),
    "set_is_last_backward": _any_step(lambda s: s.is_last),
    "split backward": _any_step(lambda s: s.split),
    "several microbatches": _any_step(lambda s: len(s.backwards) > 1),
    "inputs with gradient": _any_step(lambda s: s.input_grad),
    "inputs without gradient": _any_step(lambda s: not s.input_grad),
    "losses with tangents": _any_step(lambda s: s.tangents),
    "abandoned forward": _any_step(lambda s: s.abandoned),
    "all outputs used": _any_node(lambda n: n.uses_all and n.returns not in ("tensor", "view")),
    "output not used": _any_node(lambda n: not n.uses_all and n.returns not in ("tensor", "view")),
    "module shared": lambda p: any(info.target is not None for info in node_infos(p.tree)),
    "parameter tied": _any_unit(lambda u: u.tied),
    "took no part": _any_node(lambda n: 0 < len(n.absent) < of.STEPS),
    "frozen": _any_leaf(lambda n: len(n.frozen) == of.STEPS),
    "frozen and thawed": _any_leaf(lambda n: 0 < len(n.frozen) < of.STEPS),
    "partly frozen": _any_leaf(lambda n: n.frozen and n.part != "all"),
    "ignored": _any_leaf(lambda n: n.ignored),
    "one row": _any_leaf(lambda n: n.kind in ("thin", "table", "conv", "idle") and n.size == 1),
    "uneven rows": lambda p: p.width % 2 == 1 and p.width > 1,
    "dtypes mixed in a group": _mixes_dtypes,
    "Shard(d), d > 0": _any_unit(lambda u: u.dim > 0),
    "Shard(d), d < 0": _any_unit(lambda u: u.dim < 0),
    "param_dtype": _any_unit(lambda u: u.precision.param),
    "reduce_dtype": _any_unit(lambda u: u.precision.reduce),
    "output_dtype": _any_unit(lambda u: u.precision.output),
    "inputs not cast": _any_unit(lambda u: u.precision.param and not u.precision.cast_inputs),
    "forward prefetch list": _any_unit(lambda u: u.forward_prefetch is not None),
    "backward prefetch list": _any_unit(lambda u: u.backward_prefetch is not None),
    "registered method": _any_unit(lambda u: u.method),
    "list of modules": lambda p: any(_lists(p)),
    "list of blocks": lambda p: any(any(isinstance(n, Block) for n in nodes) for nodes in _lists(p)),
    "list that is a root": lambda p: any(info.is_listed and info.state == info.root for info in node_infos(p.tree)),
    "took no part in its list": lambda p: any(any(0 < len(n.absent) < of.STEPS for n in nodes) for nodes in _lists(p)),
    "parameter of another group": lambda p: bool(borrowed(p.tree)),
    "one unit": lambda p: len(groups(p.tree)) == 1,
    "several units": lambda p: len(groups(p.tree)) > 1,
    "units in units": lambda p: any(info.state != info.root for info in node_infos(p.tree)),
    "several roots": lambda p: len({info.root for info in node_infos(p.tree)} - {None}) > 1,
}
"""Maps each feature to its predicate. ``test_fuzz`` checks that the drawn programs have every feature."""


def features(program: Program) -> list[str]:
    return [name for name, is_used in FEATURES.items() if is_used(program)]
