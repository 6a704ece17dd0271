"""``torch.compile`` of blocks and of sharded models: the same losses, and no hook in a graph."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from composable_fsdp import fully_shard
from composable_fsdp.trace import Recorder
from tests.helpers.assert_trace import ledger
from tests.helpers.models import seeded, shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.training import assert_equal_runs, check_parity, play_task, train


class Gate(nn.Module):
    """A block with a forward of its own: from 2.14 on torch traces the hooks of a compiled ``nn.Sequential`` too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Gates(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gate() for _ in range(depth)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


GRAPHS: list[torch.fx.GraphModule] = []


def watching(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Return the backend ``aot_eager``, which records its graphs."""
    from torch._dynamo.backends.debugging import aot_eager

    GRAPHS.append(graph)
    return aot_eager(graph, inputs)


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Ignore torch's own warnings during compilation, and reset the compiler between cases."""
    GRAPHS.clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        yield
    torch._dynamo.reset()


def compiled_in_place(model: Gates, backend: Any) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    return sharded(model)


def compiled_as_wrappers(model: Gates, backend: Any) -> nn.Module:
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend=backend, fullgraph=True)  # type: ignore[assignment]
    return sharded(model)


def compiled_after_sharding(model: Gates, backend: Any) -> nn.Module:
    sharded(model)
    for i, layer in enumerate(model.layers):
        if i:
            layer.compile(backend=backend, fullgraph=True)
        else:
            model.layers[i] = torch.compile(layer, backend=backend, fullgraph=True)  # type: ignore[assignment]
    return model


def compiled_under_checkpointing(model: Gates, backend: Any) -> nn.Module:
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
        model.layers[i].compile(backend=backend, fullgraph=True)
    return sharded(model)


def compiled_as_a_whole(model: Gates, backend: Any) -> nn.Module:
    sharded(model).compile(backend=backend)
    return model


def checkpointed_and_compiled_as_a_whole(model: Gates, backend: Any) -> nn.Module:
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
    return compiled_as_a_whole(model, backend)


def sharded(model: Gates) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


IN_FULL: tuple[Callable[[Gates, Any], nn.Module], ...] = (
    compiled_in_place,
    compiled_as_wrappers,
    compiled_after_sharding,
    compiled_under_checkpointing,
)
"""Ways without a graph break."""
WAYS = (*IN_FULL, compiled_as_a_whole, checkpointed_and_compiled_as_a_whole)


@pytest.mark.behaviour("C-15")
@on_ranks(1)
def test_models_are_compiled_one_after_the_other_in_a_process() -> None:
    """Compile models without a reset in between: code compiled for the first must not be used for the next."""
    x, build = torch.randn(2, 8), seeded(Gates, depth=2)
    expected = build()(x).sum()
    with fresh_compiler():
        for _ in range(3):
            unsharded = build()
            assert isinstance(unsharded, Gates)
            model = compiled_in_place(unsharded, "aot_eager")
            for _ in range(2):
                loss = model(x).sum()
                loss.backward()
                torch.testing.assert_close(loss, expected)


def train_compiled(steps: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    build, play = seeded(Gates, depth=2), play_task("chain")
    expected = train(build(), play, ranks=range(world_size), watched=rank, divide=world_size, steps=steps)
    for way in WAYS:
        with fresh_compiler(), Recorder() as recorder:
            model = build()
            assert isinstance(model, Gates)
            model = way(model, watching)
            ours = train(model, play, ranks=[rank], watched=rank, steps=steps)
            ours.parameters = {plain(name): value for name, value in ours.parameters.items()}
            ours.gradients = {plain(name): value for name, value in ours.gradients.items()}
            assert_equal_runs(ours, expected, what=way.__name__)
            assert ledger(recorder) == {}
            check_graphs(way.__name__)
            assert bool(torch._dynamo.utils.counters["graph_break"]) is (way not in IN_FULL), way.__name__


def plain(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def check_graphs(what: str) -> None:
    graphs = [module for graph in GRAPHS for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]
    assert any("linear" in target for target in targets), f"{what}: {targets}"
    assert not any("c10d" in target or "composable_fsdp" in target for target in targets), what
    assert len(GRAPHS) < 12, f"{what}: compiled {len(GRAPHS)} times"


@pytest.mark.behaviour("C-15", "C-13")
def test_compiled_blocks_and_models_train_like_eager_ones() -> None:
    run_ranks(train_compiled, 2, 5, timeout=150)


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.mark.behaviour("C-15", "M-04")
@NEEDS_COMPILER
@on_ranks(2, timeout=150)
def test_blocks_compiled_by_inductor_train_like_eager_ones() -> None:
    def shard(model: nn.Module) -> None:
        model.get_submodule("layers.0").compile(backend="inductor", fullgraph=True)
        shard_layers(model, fully_shard)

    with fresh_compiler():
        check_parity(seeded(Gates, depth=1), play_task("chain"), shard=shard, steps=3)
        assert not torch._dynamo.utils.counters["graph_break"]
