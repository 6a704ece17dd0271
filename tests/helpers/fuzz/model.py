"""Builds the modules of programs. The same program gives the same module on every rank. A *part* is a module of a
program. Every part maps inputs of shape ``(batch, width)`` to outputs of that shape, in one of several containers, and
computes in the dtype of its own parameters. The parts that it calls may depend on the step, which it reads from its
``Clock``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.helpers.fuzz.programs import Block, Leaf, Program, ShardCall, borrowed, groups, node_infos

Hidden = list[torch.Tensor] | dict[str, torch.Tensor]
"""A container of hidden states."""


@dataclass
class Clock:
    """The current training step, and the point at which it fails."""

    step: int = 0
    fails: str = "never"
    countdown: int = 0
    is_selective: bool = False
    """True if checkpoints keep the results of products."""

    def run(self, where: str) -> None:
        """Count the run of a part, and raise once when the countdown reaches zero."""
        if self.fails == where:
            self.countdown -= 1
            if self.countdown < 0:
                self.fails = "never"
                raise ArithmeticError("test failure")


@dataclass
class Pair:
    """An output that is not registered with pytree."""

    first: torch.Tensor
    rest: torch.Tensor


@dataclass(frozen=True)
class Group:
    """The parameter group of a part: the path of its ``fully_shard`` call in the tree, and the call."""

    path: tuple[int, ...] | None = None
    state: ShardCall | None = None


class Part(nn.Module):
    """The base class of ``LeafModule`` and ``BlockModule``: puts outputs in a container and calls other parts.
    ``state`` is the ``fully_shard`` call on the part, by itself or in a list."""

    node: Leaf | Block

    def __init__(self, node: Leaf | Block, group: Group, clock: Clock) -> None:
        super().__init__()
        self.node, self.group, self.clock = node, group, clock
        self.state: ShardCall | None = None

    def compute(self, x: torch.Tensor, depth: int, hidden: Hidden | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, depth: int = 1, hidden: Hidden | None = None) -> Any:
        self.clock.run("forward")
        if hidden is not None:
            x = x + 0.125 * in_order(hidden)[-1].to(x.dtype)
        first, rest = self.compute(x, depth, hidden)
        if hidden is not None:
            add(hidden, first.sin())
        if self.clock.fails == "backward" and first.requires_grad:
            first.register_hook(lambda _: self.clock.run("backward"))
        return _contained(self.node.returns, x, first, first * 0.5 if rest is None else rest)

    def other(self, x: torch.Tensor, hidden: Hidden | None = None) -> Any:
        """Run forward. This method is registered with ``register_fsdp_forward_method``."""
        return self.forward(x, 1, hidden)


def in_order(hidden: Hidden) -> list[torch.Tensor]:
    """Return hidden states, the first one first."""
    return list(hidden.values()) if isinstance(hidden, dict) else hidden


def add(hidden: Hidden, state: torch.Tensor) -> None:
    if isinstance(hidden, dict):
        hidden[f"state {len(hidden)}"] = state
    else:
        hidden.append(state)


def run(part: Part, x: torch.Tensor, hidden: Hidden | None) -> torch.Tensor:
    """Call ``part`` and use its outputs as its node specifies."""
    if part.clock.step in part.node.absent:
        return x
    state = part.state
    first, rest = first_and_rest(
        part.other(x, hidden) if state is not None and state.method else part(x=x, hidden=hidden)
    )
    if part.node.returns == "view":
        return first.mul_(0.5)
    return first + 0.25 * rest if rest is not None and part.node.uses_all else first


def first_and_rest(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    match output:
        case (first, rest) | {"first": first, "more": [{"rest": rest}, None]} | {"first": first, "rest": rest}:
            return first, rest
        case Pair(first, rest):
            return first, rest
        case _:
            return output, None


def _contained(returns: str, x: torch.Tensor, first: torch.Tensor, rest: torch.Tensor) -> Any:
    match returns:
        case "tuple":
            return first, rest
        case "dict":
            return {"first": first, "rest": rest}
        case "nested":
            return {"first": first, "more": [{"rest": rest}, None]}
        case "dataclass":
            return Pair(first, rest)
        case "with input":
            return first, x
        case "view":
            return (first * 1.0).view(-1).view(first.shape)
        case _:
            return first


class LeafModule(Part):
    """A part with parameters that depend on its kind. Initial values depend only on ``number``."""

    node: Leaf

    weight: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter

    def __init__(self, node: Leaf, group: Group, clock: Clock, width: int, number: int) -> None:
        super().__init__(node, group, clock)
        generator = torch.Generator().manual_seed(number)
        shapes: dict[str, dict[str, tuple[int, ...]]] = {
            "linear": {"weight": (width, width), "bias": (width,)},
            "thin": {"up": (node.size, width), "down": (width, node.size), "bias": (width,)},
            "norm": {"weight": (width,), "bias": (width,)},
            "scale": {"weight": (1,), "bias": (1, width)},
            "table": {"weight": (node.size, width)},
            "conv": {"weight": (node.size, 1, 3), "bias": (node.size,)},
            "empty": {"weight": (0, width), "bias": (width,)},
            "idle": {"weight": (node.size, width)},
        }
        self.bias: nn.Parameter | None = None
        self.owner_path: tuple[int, ...] | None = None
        self.arrive: list[Placement] = []
        """The placements of the gradients of parameters that are DTensors."""
        for name, shape in shapes[node.kind].items():
            if name != "bias" or node.bias:
                values = torch.randn(shape, generator=generator, dtype=torch.float64)
                setattr(self, name, nn.Parameter(values.to(getattr(torch, node.dtype))))

    def compute(self, x: torch.Tensor, depth: int, hidden: Hidden | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = x.to(next(self.parameters(recurse=False)).dtype)
        kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "linear": lambda x: F.linear(x, self.own(self.weight), self.own_bias()),
            "thin": lambda x: F.linear(
                torch.tanh(F.linear(x, self.own(self.up))), self.own(self.down), self.own_bias()
            ),
            "norm": lambda x: (
                x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1) * self.own(self.weight) + self.offset()
            ),
            "scale": lambda x: x * self.own(self.weight) + self.offset(),
            "table": lambda x: x + self.own(self.weight)[torch.arange(x.size(0)) % self.node.size],
            "conv": self.convolve,
            "empty": lambda x: x + self.own(self.weight).sum(0) + self.offset(),
            "idle": lambda x: x * 2.0,
        }
        return torch.tanh(kinds[self.node.kind](x)), None

    def own(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.to_local(grad_placements=self.arrive) if isinstance(parameter, DTensor) else parameter

    def own_bias(self) -> torch.Tensor | None:
        return None if self.bias is None else self.own(self.bias)

    def offset(self) -> torch.Tensor | float:
        return 0.0 if self.bias is None else self.own(self.bias)

    def convolve(self, x: torch.Tensor) -> torch.Tensor:
        windows = F.pad(x, (1, 1)).unfold(1, 3, 1)
        return (F.linear(windows, self.own(self.weight).flatten(1)) + self.offset()).mean(-1)


class BlockModule(Part):
    node: Block

    def __init__(self, node: Block, group: Group, clock: Clock) -> None:
        super().__init__(node, group, clock)
        self.parts = nn.ModuleList()

    def all_parts(self, x: torch.Tensor, hidden: Hidden | None = None) -> torch.Tensor:
        for part in self.parts:
            assert isinstance(part, Part)
            x = run(part, x, hidden)
        return x

    def compute(self, x: torch.Tensor, depth: int, hidden: Hidden | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        first, last = self.parts[0], self.parts[-1]
        assert isinstance(first, Part)
        assert isinstance(last, Part)
        match self.node.kind:
            case "residual":
                return x + self.all_parts(x, hidden), None
            case "fork":
                return run(first, x, hidden), run(last, x, hidden)
            case "dead":  # the result is not used
                self.all_parts(x, hidden)
                return x, None
            case "repeat":
                for _ in range(self.node.times):
                    x = self.all_parts(x, hidden)
                return x, None
            case "recursive":
                x = run(first, x, hidden)
                if depth < self.node.times:
                    x = first_and_rest(self(x, depth + 1, hidden))[0]
                return run(last, x, hidden), None
            case "checkpoint" | "reentrant checkpoint" as kind:
                # The reentrant kind gives no gradients at all if no input needs one.
                reentrant = kind.startswith("reentrant") and x.requires_grad
                if self.clock.is_selective and not reentrant:
                    contexts = partial(create_selective_checkpoint_contexts, _keep_products)
                    return checkpoint(self.all_parts, x, use_reentrant=False, context_fn=contexts), None
                return checkpoint(self.all_parts, x, use_reentrant=reentrant), None
            case _:
                return self.all_parts(x, hidden), None


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def build(program: Program, clock: Clock) -> Part:
    clock.is_selective = program.inside == "selective checkpoints"
    found, unit_at = node_infos(program.tree), groups(program.tree)
    built: dict[tuple[int, ...], Part] = {}
    for number, info in reversed(list(enumerate(found))):  # children before their parents
        node, group = info.node, Group(info.state, None if info.state is None else unit_at[info.state])
        if isinstance(node, Leaf):
            built[info.path] = LeafModule(node, group, clock, program.width, number)
        elif isinstance(node, Block):
            built[info.path] = BlockModule(node, group, clock)
        if info.path in built and (info.is_listed or info.path == info.state):
            built[info.path].state = group.state
    for info in found:
        if info.path:
            above = built[info.path[:-1]]
            assert isinstance(above, BlockModule)
            source = info.path if info.target is None else info.target
            above.parts.append(built[source])
    _tie([part for info in found if isinstance(part := built.get(info.path), LeafModule)])
    for user, owner in borrowed(program.tree).items():
        _share_weight(built[owner], built[user])
    return built[()]


def _tie(leaves: list[LeafModule]) -> None:
    first: dict[object, nn.Parameter] = {}
    for leaf in leaves:
        state, node = leaf.group.state, leaf.node
        if state is not None and state.tied and node.kind == "linear" and not node.ignored:
            leaf.weight = first.setdefault((leaf.group.path, node.dtype), leaf.weight)


def _share_weight(owner: Part, user: Part) -> None:
    assert isinstance(owner, LeafModule)
    assert isinstance(user, LeafModule)
    user.weight, user.owner_path = owner.weight, owner.group.path
    del user.bias  # it might compute in another dtype
    user.bias = None


def parts(model: nn.Module) -> Iterator[Part]:
    """Return all parts of a program, each once, a parent before its children."""
    return (module for module in model.modules() if isinstance(module, Part))


def states(model: nn.Module) -> list[Part]:
    """Return the parts that are passed to ``fully_shard``."""
    return [part for part in parts(model) if part.state is not None]


@torch.no_grad()
def randomise(module: nn.Module) -> None:
    """Draw the parameters of one module from the default generator."""
    if isinstance(module, LeafModule):
        for parameter in module.parameters(recurse=False):
            parameter.normal_()


def freeze(model: nn.Module, step: int) -> None:
    for part in parts(model):
        if isinstance(part, LeafModule):
            for i, parameter in enumerate(part.parameters(recurse=False)):
                chosen = {"all": True, "first": i == 0, "rest": i > 0}[part.node.part]
                parameter.requires_grad_(not (chosen and step in part.node.frozen))
