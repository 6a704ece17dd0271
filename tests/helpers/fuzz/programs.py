"""Programs of the fuzzer: which module, how it is grouped, what three training steps do with it. Values, no tensors.

A program is a tree of frozen dataclasses that can be pickled, compared and pasted: its ``repr`` leaves out what has its
default value. A module that ``fully_shard`` is called on has a :class:`ShardCall`. What a word in a field means is said
where it is carried out: modules in ``model.py``, steps in ``run.py``. A new feature is a field with a default here, a
draw in ``draw.py``, a row in ``features.py``, and its meaning for the sharded run and for the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from math import prod

__all__ = [
    "ARRIVALS",
    "BACKWARDS",
    "BLOCKS",
    "BY_HAND",
    "FAILS",
    "HOLDS",
    "KEEPS",
    "LEAVES",
    "MODES",
    "OPTIMIZERS",
    "ORDERS",
    "RETURNS",
    "STEPS",
    "WHENS",
    "Again",
    "Block",
    "Leaf",
    "Node",
    "NodeInfo",
    "Placing",
    "Precision",
    "Program",
    "ShardCall",
    "Step",
    "borrowed",
    "completed",
    "groups",
    "node_infos",
]

STEPS = 3
LIST = -1
LEAVES = ("linear", "thin", "norm", "scale", "table", "conv", "empty", "idle")
BLOCKS = ("chain", "residual", "fork", "dead", "repeat", "recursive", "checkpoint", "reentrant checkpoint")
RETURNS = ("tensor", "tuple", "dict", "dataclass", "nested", "with input", "view")
BACKWARDS = ("all", "twice", "first", "second", "first, then second")
ORDERS = ("in turn", "late", "late, reversed", "joined")
HOLDS = ("none", "all", "roots", "no_sync", "no_sync, sharded", "no_sync of a part")
KEEPS = ("never", "until last", "always")
WHENS = ("before", "between", "after")
MODES = ("no_grad", "inference_mode")
BY_HAND = ("nothing", "unshard before", "unshard before, async", "reshard between", "unshard after")
FAILS = ("never", "forward", "backward")
OPTIMIZERS = ("sgd", "adamw", "adamw-fused")
ARRIVALS = ("replicated", "partial", "either")


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
class ShardCall(_Short):
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
        borrows: its weight is that of a linear leaf of another group, and it has no bias; see :func:`borrowed`.
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
    borrows: bool = False
    absent: tuple[int, ...] = ()
    returns: str = "tensor"
    uses_all: bool = False
    state: ShardCall | None = None


@dataclass(frozen=True, repr=False)
class Block(_Short):
    """A module that calls others: ``kind`` says how, ``times`` how often where that is a question.

    The children that are no groups of their own are one, given as a list, where ``together`` says how it is sharded.
    """

    kind: str = "chain"
    children: tuple[Node, ...] = ()
    times: int = 2
    absent: tuple[int, ...] = ()
    returns: str = "tensor"
    uses_all: bool = False
    together: ShardCall | None = None
    state: ShardCall | None = None


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
        hold: which units do not synchronise gradients before the last backward, and who says so.
        keep: when parameters stay unsharded after backward.
        is_last: call ``set_is_last_backward`` before each backward.
        evaluate: forwards without gradients, as pairs of when and mode.
        input_grad: the inputs need gradients.
        abandoned: begin with a forward that no backward comes back to.
        by_hand: calls of ``unshard`` and ``reshard``.
        reshard: ``set_reshard_after_forward`` of all units, before the forward.
        fails: where the step fails on all ranks the first time, to be repeated from its first microbatch.
        fails_at: the number of the module that fails, in the order in which they run; the step does not fail where
            fewer do.
        generate: unshard everything by hand, then run as many forwards as the rank's number, and reshard; before all
            else.
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
    fails: str = "never"
    fails_at: int = 0
    generate: bool = False


@dataclass(frozen=True, repr=False)
class Placing(_Short):
    """Parameters that are DTensors before they are sharded, replicated on their mesh.

    Args:
        tensor_ranks: ranks of a tensor-parallel dim behind the data-parallel ones. Gradients are pending sums over it.
        full: parameters are on the mesh of all dims, given to ``fully_shard`` with ``dp_mesh_dims``; else on that of
            the tensor-parallel dim.
        arrival: how gradients arrive on data-parallel dims of the full mesh. With ``"either"`` some parameters' arrive
            replicated, others' partial.
    """

    tensor_ranks: int = 1
    full: bool = True
    arrival: str = "replicated"


@dataclass(frozen=True, repr=False)
class Program(_Short):
    """A module for inputs of ``width``, trained on a data-parallel mesh of this shape.

    With ``by_seed`` it is initialised again once it is sharded, and the unsharded one from the same seed. With
    ``feedback``, gradients travel as bf16 with error feedback. With ``beside``, another thread of each rank trains that
    program at the same time, over process groups of its own. No step of either fails then: what a rank tells of a
    failure is of the whole process.
    """

    tree: Node
    width: int = 1
    mesh: tuple[int, ...] = (2,)
    placing: Placing | None = None
    optimizer: str = "sgd"
    by_seed: bool = False
    feedback: bool = False
    steps: tuple[Step, ...] = field(default=(Step(),) * STEPS)
    beside: Program | None = None

    @property
    def undisturbed(self) -> Program:
        """The program without steps that fail."""
        return replace(self, steps=tuple(replace(step, fails="never") for step in self.steps))

    @property
    def threads(self) -> list[Program]:
        """What each thread trains."""
        own = replace(self, beside=None)
        return [own] if self.beside is None else [own, *self.beside.threads]

    @property
    def world_size(self) -> int:
        return prod(self.mesh) * self.tensor_ranks

    @property
    def tensor_ranks(self) -> int:
        """Ranks whose gradients are summed before they are averaged over the data-parallel ones."""
        return 1 if self.placing is None else self.placing.tensor_ranks


@dataclass(frozen=True)
class NodeInfo:
    """Where a node is: ``path`` are indices of children from the tree's top, ``state`` and ``root`` paths of the unit
    that takes its parameters and of the outermost one around it; ``target`` the path of what an ``Again`` repeats.

    The path of a list is that of a child ``LIST`` of the block that holds its modules.
    """

    path: tuple[int, ...]
    node: Node
    state: tuple[int, ...] | None
    root: tuple[int, ...] | None
    target: tuple[int, ...] | None = None

    @property
    def is_listed(self) -> bool:
        """Whether it is given to ``fully_shard`` in a list."""
        return self.state == (*self.path[:-1], LIST)


def node_infos(tree: Node) -> list[NodeInfo]:
    """All nodes, a parent before its children."""
    complete: list[tuple[int, ...]] = []

    def walk(node: Node, path: tuple[int, ...], outer: NodeInfo | None) -> Iterator[NodeInfo]:
        state, root = (outer.state, outer.root) if outer is not None else (None, None)
        if isinstance(node, Again):
            target = complete[node.which % len(complete)] if complete else None
            yield NodeInfo(path, node, state, root, target)
            return
        if node.state is not None:
            state = path
        elif outer is not None and isinstance(outer.node, Block) and outer.node.together is not None:
            state = (*outer.path, LIST)
        root = state if root is None else root
        info = NodeInfo(path, node, state, root)
        yield info
        for i, child in enumerate(node.children if isinstance(node, Block) else ()):
            yield from walk(child, (*path, i), info)
        complete.append(path)

    return list(walk(tree, (), None))


def groups(tree: Node) -> dict[tuple[int, ...], ShardCall]:
    """How units are sharded, by their paths."""
    found = {}
    for info in node_infos(tree):
        if not isinstance(info.node, Again) and info.node.state is not None:
            found[info.path] = info.node.state
        if isinstance(info.node, Block) and info.node.together is not None:
            found[(*info.path, LIST)] = info.node.together
    return {path: found[path] for path in dict.fromkeys(p.state for p in node_infos(tree)) if path is not None}


def borrowed(tree: Node) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Where leaves are whose weights are another's, and where that is: the first that fits, and comes before."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    unit_at, before = groups(tree), list[NodeInfo]()
    for info in node_infos(tree):
        if not isinstance(info.node, Leaf) or info.node.kind != "linear" or info.node.ignored or info.state is None:
            continue
        if info.node.borrows and not unit_at[info.state].tied:
            for owner in before:
                assert isinstance(owner.node, Leaf)
                assert owner.state is not None
                around = owner.state[:-1] if owner.state[-1:] == (LIST,) else owner.state
                is_complete = info.path[: len(around)] != around
                if is_complete and owner.root == info.root and owner.node.dtype == info.node.dtype:
                    found[info.path] = owner.path
                    break
        if info.path not in found:
            before.append(info)
    return found


def completed(tree: Node) -> Node:
    """``tree`` with what it lacks.

    A leaf where there is nothing to repeat; and units, so that all parameters belong to a group, and all users of one
    to the same.
    """
    while missing := [p.path for p in node_infos(tree) if isinstance(p.node, Again) and p.target is None]:
        tree = _with(tree, missing[0], lambda _: Leaf())
    if not isinstance(tree, Again) and tree.state is None and any(isinstance(p.node, Again) for p in node_infos(tree)):
        tree = replace(tree, state=ShardCall())  # a module in two roots is none of the library's promises
    while True:
        found = node_infos(tree)
        by_path = {info.path: info for info in found}
        lacking = [p.path for p in found if isinstance(p.node, Leaf) and p.state is None]
        for info in found:
            target = by_path[info.target] if info.target is not None else None
            if target is None:
                continue
            if target.is_listed:  # who is repeated beside its list may be in a unit that must come before that
                is_fine = info.path[:-1] == target.path[:-1] or info.path[: len(target.path) - 1] != target.path[:-1]
            else:
                is_fine = target.state in (info.state, target.path)
            if not is_fine:
                lacking.append(target.path)
        if not lacking:
            return tree
        tree = _with(
            tree, lacking[0], lambda node: node if isinstance(node, Again) else replace(node, state=ShardCall())
        )


def _with(node: Node, path: tuple[int, ...], change: Callable[[Node], Node]) -> Node:
    if not path:
        return change(node)
    assert isinstance(node, Block)
    first, rest = path[0], path[1:]
    return replace(
        node, children=tuple(_with(c, rest, change) if i == first else c for i, c in enumerate(node.children))
    )
