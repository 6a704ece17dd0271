"""Programs of the fuzzer: which module, how it is grouped, what three training steps do with it. Values, no tensors.

A program is a tree of frozen dataclasses that can be pickled, compared and pasted: its ``repr`` leaves out what has its
default value. A module that ``fully_shard`` is called on has a :class:`Unit`. What a word in a field means is said
where it is carried out: modules in ``_fuzz_model``, steps in ``_fuzz_run``. A new feature is a field with a default
here, a draw in ``_draw``, a row in ``FEATURES`` below, and its meaning for the sharded run and for the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod

__all__ = [
    "FEATURES",
    "KNOWN",
    "Again",
    "Block",
    "Leaf",
    "Node",
    "Place",
    "Precision",
    "Program",
    "Step",
    "Unit",
    "completed",
    "features",
        "places",
]

STEPS = 3


class _Short:
    def __repr__(self) -> str:
        shown = [f for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


@dataclass(frozen=True, repr=False)
class Precision(_Short):
    """``MixedPrecisionPolicy`` with names of dtypes."""

    param: str | None = None
    reduce: str | None = None
    output: str | None = None
    cast_inputs: bool = True


@dataclass(frozen=True, repr=False)
class Unit(_Short):
    """A ``fully_shard`` call.

    Args:
        reshard: ``reshard_after_forward``.
        dim: parameters are cut on this dim where they have it, else on dim 0.
        precision: its policy.
        tied: the square weights of the group are one parameter.
        forward_prefetch, backward_prefetch: units by their number in module order (modulo how many there are), given
            to the setters of those names; ``None`` leaves it to the library.
        method: its caller calls a registered method instead of the module.
    """

    reshard: bool | int | None = None
    dim: int = 0
    precision: Precision = Precision()
    tied: bool = False
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None
    method: bool = False


@dataclass(frozen=True, repr=False)
class Leaf(_Short):
    """A module with parameters of its own.

    Args:
        kind: which.
        size: rows of parameters that the width does not determine.
        dtype: of its parameters.
        frozen: in these steps.
        part: which of its parameters are ``frozen``.
        ignored: given to every ``fully_shard`` in ``ignored_params``, and frozen in all steps.
        absent: in these steps the caller leaves it out.
        returns: the container of its outputs.
        uses_all: whether the caller uses all outputs or only the first.
        unit: how it is sharded, if it is a group of its own.
    """

    kind: str = "linear"
    size: int = 1
    bias: bool = False
    dtype: str = "float64"
    frozen: tuple[int, ...] = ()
    part: str = "all"
    ignored: bool = False
    absent: tuple[int, ...] = ()
    returns: str = "tensor"
    uses_all: bool = False
    unit: Unit | None = None


@dataclass(frozen=True, repr=False)
class Block(_Short):
    """A module that calls others: ``kind`` says how, ``times`` how often where that is a question."""

    kind: str = "chain"
    children: tuple[Node, ...] = ()
    times: int = 2
    absent: tuple[int, ...] = ()
    returns: str = "tensor"
    uses_all: bool = False
    unit: Unit | None = None


@dataclass(frozen=True, repr=False)
class Again(_Short):
    """A module that was there before, by its number among those complete (modulo how many these are)."""

    which: int = 0


Node = Leaf | Block | Again


@dataclass(frozen=True, repr=False)
class Step(_Short):
    """One step of training.

    Args:
        backwards: one per microbatch: what of its outputs goes backward, and how often.
        order: of forwards and backwards.
        hold: which units do not synchronise gradients before the last backward.
        keep: when parameters stay unsharded after backward.
        is_last: call ``set_is_last_backward`` before each backward.
        evaluate: forwards without gradients, as pairs of when and mode.
        input_grad: the inputs need gradients.
        abandoned: begin with a forward that no backward comes back to.
        by_hand: calls of ``unshard`` and ``reshard``.
        reshard: ``set_reshard_after_forward`` of all units, before the forward.
    """

    backwards: tuple[str, ...] = ("all",)
    order: str = "in turn"
    hold: str = "none"
    keep: str = "never"
    is_last: bool = False
    evaluate: tuple[tuple[str, str], ...] = ()
    input_grad: bool = False
    abandoned: bool = False
    by_hand: str = "nothing"
    reshard: bool | None = None


@dataclass(frozen=True, repr=False)
class Program(_Short):
    """A module for inputs of ``width``, trained on a mesh of this shape."""

    tree: Node
    width: int = 1
    mesh: tuple[int, ...] = (2,)
    optimizer: str = "sgd"
    steps: tuple[Step, ...] = field(default=(Step(),) * STEPS)

    @property
    def world_size(self) -> int:
        return prod(self.mesh)


@dataclass(frozen=True)
class Place:
    """Where a node is: ``path`` are indices of children from the tree's top, ``unit`` and ``root`` paths of the unit
    that takes its parameters and of the outermost one around it; ``target`` the path of what an ``Again`` repeats."""

    path: tuple[int, ...]
    node: Node
    unit: tuple[int, ...] | None
    root: tuple[int, ...] | None
    target: tuple[int, ...] | None = None


def places(tree: Node) -> list[Place]:
    """All nodes, a parent before its children."""
    complete: list[tuple[int, ...]] = []

    def walk(node: Node, path: tuple[int, ...], outer: Place | None) -> Iterator[Place]:
        unit, root = (outer.unit, outer.root) if outer is not None else (None, None)
        if isinstance(node, Again):
            target = complete[node.which % len(complete)] if complete else None
            yield Place(path, node, unit, root, target)
            return
        if node.unit is not None:
            unit, root = path, path if root is None else root
        place = Place(path, node, unit, root)
        yield place
        for i, child in enumerate(node.children if isinstance(node, Block) else ()):
            yield from walk(child, (*path, i), place)
        complete.append(path)

    return list(walk(tree, (), None))


def completed(tree: Node) -> Node:
    """``tree`` with what it lacks: a leaf where there is nothing to repeat; and units, so that all parameters belong to a
    group, and the groups of all who use them are the same."""
    while missing := [p.path for p in places(tree) if isinstance(p.node, Again) and p.target is None]:
        tree = _with(tree, missing[0], lambda _: Leaf())
    if not isinstance(tree, Again) and tree.unit is None and any(isinstance(p.node, Again) for p in places(tree)):
        tree = replace(tree, unit=Unit())  # a module in two roots is none of the library's promises
    while True:
        found = places(tree)
        by_path = {place.path: place for place in found}
        lacking = [p.path for p in found if isinstance(p.node, Leaf) and p.unit is None]
        for place in found:
            target = by_path[place.target] if place.target is not None else None
            if target is not None and target.unit not in (place.unit, target.path):
                lacking.append(target.path)
        if not lacking:
            return tree
        tree = _with(tree, lacking[0], lambda node: node if isinstance(node, Again) else replace(node, unit=Unit()))


def _with(node: Node, path: tuple[int, ...], change: Callable[[Node], Node]) -> Node:
    if not path:
        return change(node)
    assert isinstance(node, Block)
    first, rest = path[0], path[1:]
    return replace(node, children=tuple(_with(c, rest, change) if i == first else c for i, c in enumerate(node.children)))


def _any_node(test: Callable[[Leaf | Block], object]) -> Callable[[Program], bool]:
    return lambda program: any(not isinstance(p.node, Again) and bool(test(p.node)) for p in places(program.tree))


def _any_leaf(test: Callable[[Leaf], object]) -> Callable[[Program], bool]:
    return _any_node(lambda node: isinstance(node, Leaf) and test(node))


def _any_unit(test: Callable[[Unit], object]) -> Callable[[Program], bool]:
    return _any_node(lambda node: node.unit is not None and test(node.unit))


def _any_step(test: Callable[[Step], object]) -> Callable[[Program], bool]:
    return lambda program: any(test(step) for step in program.steps)


def _kind(kind: str) -> Callable[[Program], bool]:
    return _any_node(lambda node: node.kind == kind)


def _mixes_dtypes(program: Program) -> bool:
    found: dict[object, set[str]] = {}
    for place in places(program.tree):
        if isinstance(place.node, Leaf):
            found.setdefault(place.unit, set()).add(place.node.dtype)
    return any(len(dtypes) > 1 for dtypes in found.values())


def _num_units(program: Program) -> int:
    return sum(not isinstance(p.node, Again) and p.node.unit is not None for p in places(program.tree))


LEAVES = ("linear", "thin", "norm", "scale", "table", "conv", "empty", "idle")
BLOCKS = ("chain", "residual", "fork", "dead", "repeat", "recursive", "checkpoint", "reentrant checkpoint")
RETURNS = ("tensor", "tuple", "dict", "dataclass", "nested", "with input", "view")
BACKWARDS = ("all", "twice", "first", "second", "first, then second")
ORDERS = ("in turn", "late", "late, reversed", "joined")
HOLDS = ("none", "all", "roots")
KEEPS = ("never", "until last", "always")
WHENS = ("before", "between", "after")
MODES = ("no_grad", "inference_mode")
BY_HAND = ("nothing", "unshard before", "unshard before, async", "reshard between", "unshard after")
OPTIMIZERS = ("sgd", "adamw", "adamw-fused")

FEATURES: Mapping[str, Callable[[Program], bool]] = {
    **{f"leaf {kind}": _kind(kind) for kind in LEAVES},
    **{f"block {kind}": _kind(kind) for kind in BLOCKS},
    **{f"returns {kind}": _any_node(lambda n, k=kind: n.returns == k) for kind in RETURNS},  # type: ignore[misc]
    **{f"backward {kind}": _any_step(lambda s, k=kind: k in s.backwards) for kind in BACKWARDS},  # type: ignore[misc]
    **{f"order {kind}": _any_step(lambda s, k=kind: s.order == k) for kind in ORDERS},  # type: ignore[misc]
    **{f"hold {kind}": _any_step(lambda s, k=kind: s.hold == k) for kind in HOLDS},  # type: ignore[misc]
    **{f"keep {kind}": _any_step(lambda s, k=kind: s.keep == k) for kind in KEEPS},  # type: ignore[misc]
    **{f"by hand {kind}": _any_step(lambda s, k=kind: s.by_hand == k) for kind in BY_HAND},  # type: ignore[misc]
    **{f"optimizer {kind}": (lambda p, k=kind: p.optimizer == k) for kind in OPTIMIZERS},  # type: ignore[misc]
    **{
        f"evaluate {when}, {mode}": _any_step(lambda s, pair=(when, mode): pair in s.evaluate)  # type: ignore[misc]
        for when in WHENS
        for mode in MODES
    },
    **{
        f"reshard_after_forward {value}": _any_unit(lambda u, v=value: u.reshard is v)  # type: ignore[misc]
        for value in (True, False, None, 1, 2)
    },
    **{f"{n}-d mesh": (lambda p, n=n: len(p.mesh) == n) for n in (1, 2)},  # type: ignore[misc]
    "mesh without shards": lambda p: len(p.mesh) == 2 and p.mesh[1] == 1,
    "mesh without replicas": lambda p: len(p.mesh) == 2 and p.mesh[0] == 1,
    "set_reshard_after_forward": _any_step(lambda s: s.reshard is not None),
    "set_is_last_backward": _any_step(lambda s: s.is_last),
    "several microbatches": _any_step(lambda s: len(s.backwards) > 1),
    "inputs with gradient": _any_step(lambda s: s.input_grad),
    "inputs without gradient": _any_step(lambda s: not s.input_grad),
    "abandoned forward": _any_step(lambda s: s.abandoned),
    "all outputs used": _any_node(lambda n: n.uses_all and n.returns not in ("tensor", "view")),
    "output not used": _any_node(lambda n: not n.uses_all and n.returns not in ("tensor", "view")),
    "module shared": lambda p: any(place.target is not None for place in places(p.tree)),
    "parameter tied": _any_unit(lambda u: u.tied),
    "took no part": _any_node(lambda n: 0 < len(n.absent) < STEPS),
    "frozen": _any_leaf(lambda n: len(n.frozen) == STEPS),
    "frozen and thawed": _any_leaf(lambda n: 0 < len(n.frozen) < STEPS),
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
    "one unit": lambda p: _num_units(p) == 1,
    "several units": lambda p: _num_units(p) > 1,
    "units in units": lambda p: any(place.unit != place.root for place in places(p.tree)),
    "several roots": lambda p: len({place.root for place in places(p.tree)} - {None}) > 1,
}
"""What programs can be made of; ``test_fuzz`` sees to it that each occurs."""


def features(program: Program) -> list[str]:
    """Names of what ``program`` makes use of."""
    return [name for name, is_used in FEATURES.items() if is_used(program)]


KNOWN: Mapping[str, Callable[[Program], bool]] = {}
"""Programs that are not drawn, because of a bug of the library that is known, or of torch. By what is wrong there."""
