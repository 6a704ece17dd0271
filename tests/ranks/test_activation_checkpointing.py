"""Both kinds of activation checkpointing, around and inside sharded modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from composable_fsdp import fully_shard
from composable_fsdp.trace import Operation, Recorder
from tests.helpers.assert_trace import assert_trace
from tests.helpers.models import TASKS, Block, Chain, Transformer, seeded, shard_layers
from tests.helpers.run_ranks import run_ranks
from tests.helpers.training import check_parity, play_task
from tests.helpers.transports import SOCKETS, TRANSPORTS, Environment


class Inside(nn.Module):
    """A block whose own forward checkpoints what it contains."""

    def __init__(self, block: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.gain = nn.Parameter(torch.ones(1))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return out * self.gain


class Outside(nn.Module):
    """A transformer that checkpoints its blocks, each alone or all together, each once or twice."""

    def __init__(self, *, use_reentrant: bool, calls: int = 1, together: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 12)
        self.layers = nn.ModuleList([Block(12, 3) for _ in range(2)])
        self.head = nn.Linear(12, 23)
        self.checkpoint = partial(checkpoint, use_reentrant=use_reentrant)
        self.calls = calls
        self.together = together

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.together:
            x = self.checkpoint(self.run_all, x)
        else:
            for layer in self.layers:
                x = self.checkpoint(partial(self.run_one, layer), x)
        out: torch.Tensor = self.head(x)
        return out

    def run_one(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            x = layer(x)
        return x

    def run_all(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.run_one(layer, x)
        return x


def transformer_of(make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The transformer with its blocks replaced."""
    model = TASKS["transformer"].build()
    assert isinstance(model, Transformer)
    for i, block in enumerate(model.layers):
        model.layers[i] = make(block)
    return model


def sharded_halves(model: nn.Module) -> None:
    """Shard nested groups: the linear layers of every block, the block, the model."""
    for module in list(model.get_submodule("layers").modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module)
    shard_layers(model, fully_shard)


def builders(use_reentrant: bool) -> dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object] | None]]:
    kind = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=kind)
    return {
        "inside": (lambda: transformer_of(lambda b: Inside(b, use_reentrant=use_reentrant)), None),
        "outside": (seeded(Outside, use_reentrant=use_reentrant), None),
        "outside, called twice": (seeded(Outside, use_reentrant=use_reentrant, calls=2), None),
        "outside, all at once": (seeded(Outside, use_reentrant=use_reentrant, together=True), None),
        "outside, with units in units": (seeded(Outside, use_reentrant=use_reentrant, calls=2), sharded_halves),
        "wrapper inside of the unit": (lambda: transformer_of(wrapper), None),
        "wrapper outside of the unit": (lambda: transformer_of(wrapper), shard_the_wrapped),
    }


def shard_the_wrapped(model: nn.Module) -> None:
    for wrapped in model.get_submodule("layers").children():
        fully_shard(wrapped.get_submodule("_checkpoint_wrapped_module"))
    fully_shard(model)


def train_with_checkpointing(use_reentrant: bool, reshard_after_forward: bool | int | None) -> None:
    for what, (build, shard) in builders(use_reentrant).items():
        with Recorder() as recorder:
            check_parity(
                build,
                play_task("transformer"),
                shard=shard,
                steps=3,
                what=what,
                reshard_after_forward=reshard_after_forward,
            )
        assert recorder.allocated == {}, what


@pytest.mark.behaviour("C-13")
@pytest.mark.parametrize(
    ("world_size", "use_reentrant", "reshard"),
    [(2, False, True), (2, False, None), (2, True, True), (2, True, False), (4, False, 2)],
)
def test_activation_checkpointing_trains_in_either_order(
    world_size: int, use_reentrant: bool, reshard: bool | int | None
) -> None:
    run_ranks(train_with_checkpointing, world_size, use_reentrant, reshard)


class CheckpointedChain(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x


def trace_recomputation() -> None:
    task, rank = TASKS["chain"], dist.get_rank()
    model = shard_layers(CheckpointedChain(depth=3), fully_shard, fuses=False)
    for step in range(2):
        loss = task.loss(model, task.batch_of(step, rank))
        with Recorder() as backward:
            loss.backward()
        # Each group is gathered once for recomputation and backward together.
        operations = (Operation.UNSHARD, Operation.WAIT, Operation.RESHARD, Operation.REDUCE)
        assert_trace(
            (event for event in backward if event.group != "root"),
            "unshard layers.2",
            "unshard layers.1",
            "wait layers.2",
            "reduce layers.2",
            "reshard layers.2",
            "wait layers.1",
            "unshard layers.0",
            "reduce layers.1",
            "reshard layers.1",
            "wait layers.0",
            "reshard layers.0",
            "reduce layers.0",
            operations=operations,
        )


@pytest.mark.behaviour("C-13")
def test_recomputation_and_backward_share_one_gather() -> None:
    run_ranks(trace_recomputation, 2, environment=SOCKETS)


class Segments(nn.Module):
    """One group with a layer used by several reentrant checkpoints: it gets a gradient in the backward of each."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(3)])
        self.shared = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.before:
            x = torch.tanh(layer(x))
        for _ in range(3):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


def play_segments(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def train_segments() -> None:
    check_parity(seeded(Segments), play_segments, shard=fully_shard)


@pytest.mark.behaviour("C-13")
@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_gradients_of_several_segments_are_not_split_by_parameter(transport: Environment) -> None:
    run_ranks(train_segments, 2, environment=transport)


class UsedThrice(nn.Module):
    """Two layers, the second directly and in two reentrant checkpoints: it gets gradients in three autograd runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.run_second, self.first(x), use_reentrant=True)
        x = checkpoint(self.run_second, x, use_reentrant=True)
        return self.run_second(x)

    def run_second(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(x.tanh())
        return out


def gradients_with(max_fused_bytes: int) -> dict[str, torch.Tensor]:
    model: Any = seeded(UsedThrice)()
    fully_shard(model.first)
    fully_shard(model.second)
    fully_shard(model)
    model.set_schedule(max_fused_bytes=max_fused_bytes)
    for step in range(2):  # the second knows the order, and fuses
        model.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()
    return {name: parameter.grad.to_local() for name, parameter in model.named_parameters()}


def fuse_or_not() -> None:
    fused, alone = gradients_with(1 << 20), gradients_with(0)
    for name, gradient in fused.items():
        assert torch.equal(gradient, alone[name]), name


@pytest.mark.behaviour("C-13")
def test_gradients_of_nested_autograd_runs_do_not_depend_on_fusions() -> None:
    run_ranks(fuse_or_not, 2, environment=SOCKETS)
