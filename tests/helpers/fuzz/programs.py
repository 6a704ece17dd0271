"""Programs of the fuzzer: a module, its ``fully_shard`` calls and three training steps, as values without tensors. A
program is a tree of frozen dataclasses that can be pickled and compared. Its ``repr`` leaves out default values and can
be pasted into code. A node on which ``fully_shard`` is called has a :class:`ShardCall`. ``model.py`` implements the
kinds of modules, and ``run.py`` the options of steps. A new feature needs a field with a default here, a draw in
``draw.py``, a row in ``features.py``, and an implementation in the sharded run and in the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from math import prod

STEPS = 3
LIST = -1
LEAVES = ("linear", "thin", "norm", "scale", "table", "conv", "empty", "idle")
BLOCKS = ("chain", "residual", "fork", "dead", "repeat", "recursive", "checkpoint", "reentrant checkpoint")
RETURNS = ("tensor", "tuple", "dict", "dataclass", "nested", "with input", "view")
BACKWARDS = ("all", "twice", "first", "second", "first, then second")
ORDERS = ("in turn", "late", "late, reversed", "joined")
HOLDS = ("none", "all", "roots", "no_sync", "no_sync, sharded", "no_sync of a part", "all-reduce")
HIDDEN = ("none", "list", "dict")
INSIDE = ("nothing", "selective checkpoints", "autocast", "dispatch mode", "function mode")
FINISHES = ("backward", "synchronize", "finalize", "finalize, async")
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
    """A ``fully_shard`` call. ``reshard``: ``reshard_after_forward``. ``dim``: the dim on which parameters are sharded.
    Parameters without this dim are sharded on dim 0. ``precision``: the mixed-precision policy. ``tied``: if true, the
    square weights of the group are one parameter. ``forward_prefetch``, ``backward_prefetch``: the arguments of the
    setters of explicit prefetching, as numbers of groups in module order, modulo the number of groups. ``None`` means
    that the setter is not called. ``method``: if true, callers call a registered method instead of the module."""

    reshard: bool | int | None = None
    dim: int = 0
    precision: Precision = Precision()
    tied: bool = False
    forward_prefetch: tuple[int, ...] | None = None
    backward_prefetch: tuple[int, ...] | None = None
    method: bool = False


@dataclass(frozen=True, repr=False)
class Leaf(_Short):
    """A module with its own parameters. ``kind``: the kind of module. ``size``: the rows of parameters that the width
    does not determine. ``dtype``: the dtype of its parameters. ``frozen``: the steps in which its parameters are
    frozen. ``part``: the parameters to which ``frozen`` applies. ``ignored``: if true, its parameters are in
    ``ignored_params`` of every ``fully_shard`` call, and always frozen. ``borrows``: if true, it uses the weight of a
    linear leaf of another group, and has no bias. See :func:`borrowed`. ``absent``: the steps in which the caller skips
    it. ``returns``: the container of its outputs. ``uses_all``: if true, the caller uses all outputs, otherwise only
    the first. ``state``: its ``fully_shard`` call, if it has its own."""

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
    """A module that calls other modules in a way that ``kind`` specifies. ``kind``: the kind of block. ``children``:
    the nodes of the modules that it calls. ``times``: the number of calls, for kinds that call children repeatedly.
    ``together``: the ``fully_shard`` call on the list of all children without their own call."""

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
    """A module that occurs earlier in the tree, by its number among complete nodes, modulo the number of these."""

    which: int = 0


Node = Leaf | Block | Again


@dataclass(frozen=True, repr=False)
class Step(_Short):
    """One training step. ``backwards``: for each microbatch, the outputs from which backward runs, and how often.
    ``order``: the order of forwards and backwards. ``hold``: the groups that do not synchronize gradients before the
    last backward, and the API that is used. With ``"all-reduce"`` they reduce them over the shard axis only.
    ``finish``: how the step ends: by its last backward; by ``synchronize_gradients()``, so that the last backward holds
    gradients like the others; or by ``finalize_backward()``. ``in_flight``: the number of reductions that may be in
    flight; 0 is the default. ``keep``: the backwards after which parameters stay unsharded. ``is_last``: if true,
    ``set_is_last_backward`` is called before each backward. ``evaluate``: forwards without gradients, as pairs of time
    and mode. ``input_grad``: if true, the inputs need gradients. ``abandoned``: if true, the step begins with a forward
    that has no backward. ``by_hand``: the calls of ``unshard`` and ``reshard``. ``reshard``: the argument of
    ``set_reshard_after_forward`` of all groups, called before the forward. ``fails``: the pass in which the step first
    fails on all ranks. It is then repeated from its first microbatch. ``fails_at``: the number of the module that
    fails, in the order of execution. If fewer modules run, none fails. ``tangents``: if true, the losses have their
    derivatives along a direction in the space of inputs, by dual numbers. ``generate``: if true, the step first
    unshards all groups, runs as many forwards as the rank's number, and reshards. ``split``: if true, backwards before
    the last one compute gradients of inputs, and then those of weights, as zero-bubble pipelines do."""

    backwards: tuple[str, ...] = ("all",)
    order: str = "in turn"
    hold: str = "none"
    finish: str = "backward"
    in_flight: int = 0
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
    tangents: bool = False
    split: bool = False


@dataclass(frozen=True, repr=False)
class Placing(_Short):
    """The mesh of parameters that are DTensors before they are sharded. They are replicated on it. ``tensor_ranks``:
    the size of a tensor-parallel dim after the data-parallel dims. Gradients are partial on it. ``full``: if true,
    parameters are on the mesh of all dims, and ``fully_shard`` gets ``dp_mesh_dims``. Otherwise they are on the mesh of
    the tensor-parallel dim. ``arrival``: the placement of gradients on the data-parallel dims of the full mesh. With
    ``"either"``, gradients of some parameters are replicated and those of others are partial."""

    tensor_ranks: int = 1
    full: bool = True
    arrival: str = "replicated"


@dataclass(frozen=True, repr=False)
class Program(_Short):
    """A module for inputs of ``width``, trained on a data-parallel mesh of shape ``mesh``. ``by_seed``: if true, the
    sharded model is initialised again from a seed, and so is the unsharded one. ``feedback``: if true, gradients are
    sent as bf16 with error feedback. ``hidden``: the container that parts get, read and write hidden states into,
    except those in checkpoints. It begins with the input, and the second output of a step depends on what is in it.
    ``inside``: the context in which its steps run; with ``"selective checkpoints"``, non-reentrant ones keep products.
    ``beside``: a program that another thread of each rank trains at the same time, over its own process groups. No step
    of either fails then, because ranks report failures per process, not per thread."""

    tree: Node
    width: int = 1
    mesh: tuple[int, ...] = (2,)
    placing: Placing | None = None
    optimizer: str = "sgd"
    by_seed: bool = False
    feedback: bool = False
    hidden: str = "none"
    inside: str = "nothing"
    steps: tuple[Step, ...] = field(default=(Step(),) * STEPS)
    beside: Program | None = None

    @property
    def undisturbed(self) -> Program:
        """The program without steps that fail."""
        return replace(self, steps=tuple(replace(step, fails="never") for step in self.steps))

    @property
    def for_threads(self) -> Program:
        """The program without steps that fail, and without what threads share: dual numbers and autocast's cache. A
        checkpoint of one thread that leaves autocast empties that cache for all threads. So the graph of another one
        may have a cast for each use of a weight, or one for all, and ranks get gradients in different orders."""
        steps = tuple(replace(step, fails="never", tangents=False) for step in self.steps)
        return replace(self, steps=steps, inside="nothing" if self.inside == "autocast" else self.inside)

    @property
    def threads(self) -> list[Program]:
        own = replace(self, beside=None)
        return [own] if self.beside is None else [own, *self.beside.threads]

    @property
    def world_size(self) -> int:
        return prod(self.mesh) * self.tensor_ranks

    @property
    def tensor_ranks(self) -> int:
        """Return the number of ranks whose gradients are summed before the data-parallel average."""
        return 1 if self.placing is None else self.placing.tensor_ranks


@dataclass(frozen=True)
class NodeInfo:
    """A node and its position in the tree. ``path``: the indices of children from the root of the tree. A list has the
    index ``LIST`` in its block. ``state``: the path of the ``fully_shard`` call that shards the parameters of the node.
    ``root``: the path of the outermost ``fully_shard`` call around the node. ``target``: the path of the node that an
    ``Again`` repeats."""

    path: tuple[int, ...]
    node: Node
    state: tuple[int, ...] | None
    root: tuple[int, ...] | None
    target: tuple[int, ...] | None = None

    @property
    def is_listed(self) -> bool:
        """Return whether the node is passed to ``fully_shard`` in a list."""
        return self.state == (*self.path[:-1], LIST)


def node_infos(tree: Node) -> list[NodeInfo]:
    """Return all nodes with their positions, a parent before its children."""
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


def module_calls(program: Program) -> int:
    """Estimate how many modules a training calls, which is most of its time. Backwards count like forwards."""

    def called(node: Node) -> int:
        if not isinstance(node, Block):
            return 1
        children = [called(child) for child in node.children]
        match node.kind:
            case "fork":
                return 1 + children[0] + children[-1]
            case "repeat":
                return 1 + node.times * sum(children)
            case "recursive":
                return 1 + node.times * (children[0] + children[-1])
            case "checkpoint" | "reentrant checkpoint":
                return 1 + 2 * sum(children)
            case _:
                return 1 + sum(children)

    passes = sum(2 * len(step.backwards) + len(step.evaluate) + step.abandoned for step in program.steps)
    trainings = 1 if program == program.undisturbed else 2
    second = 0 if program.beside is None else module_calls(program.beside)
    return trainings * passes * called(program.tree) + second


def groups(tree: Node) -> dict[tuple[int, ...], ShardCall]:
    found = {}
    for info in node_infos(tree):
        if not isinstance(info.node, Again) and info.node.state is not None:
            found[info.path] = info.node.state
        if isinstance(info.node, Block) and info.node.together is not None:
            found[(*info.path, LIST)] = info.node.together
    return {path: found[path] for path in dict.fromkeys(p.state for p in node_infos(tree)) if path is not None}


def borrowed(tree: Node) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Map each leaf that uses the weight of another leaf to that leaf, which is the first suitable one before it."""
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
    """Return ``tree`` with additional nodes and ``fully_shard`` calls that make it valid. An ``Again`` that has nothing
    to repeat becomes a leaf. The additional calls put every parameter in a group, and all users of a repeated module in
    the same group."""
    while missing := [p.path for p in node_infos(tree) if isinstance(p.node, Again) and p.target is None]:
        tree = _with(tree, missing[0], lambda _: Leaf())
    if not isinstance(tree, Again) and tree.state is None and any(isinstance(p.node, Again) for p in node_infos(tree)):
        tree = replace(tree, state=ShardCall())  # the library does not support one module in two roots
    while True:
        found = node_infos(tree)
        by_path = {info.path: info for info in found}
        lacking = [p.path for p in found if isinstance(p.node, Leaf) and p.state is None]
        for info in found:
            target = by_path[info.target] if info.target is not None else None
            if target is None:
                continue
            if target.is_listed:  # a module repeated outside its list may be in a group that must be sharded earlier
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
