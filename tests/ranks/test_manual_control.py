"""Test manual control: ``unshard``, ``reshard``, prefetch lists, registered forward methods."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import composable_fsdp
from composable_fsdp import FSDPModule, fully_shard, register_fsdp_forward_method, unsharded_params
from composable_fsdp.errors import ConfigurationError
from composable_fsdp.trace import Operation, Recorder
from tests.helpers.assert_trace import assert_trace, ledger
from tests.helpers.models import TASKS, Chain, Transformer, seeded, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import full_value, sharded
from tests.helpers.training import OPTIMIZERS, check_parity, play_task
from tests.helpers.transports import SOCKETS

PARAMETERS = (Operation.UNSHARD, Operation.WAIT, Operation.RESHARD)


def sharded_layers(model: nn.Module) -> list[FSDPModule]:
    layers: list[FSDPModule] = [
        layer for layer in model.get_submodule("layers").children() if isinstance(layer, FSDPModule)
    ]
    assert layers
    return layers


@pytest.mark.behaviour("C-08")
@on_ranks(2, 4)
def test_unshard_and_reshard_by_hand() -> None:
    task, rank = TASKS["mlp"], dist.get_rank()
    originals = dict(task.build().named_parameters())
    model = shard_layers(task.build(), fully_shard)
    layer = model.get_submodule("layers.1")
    for async_op in (False, True, False):
        handle = layer.unshard(async_op=async_op)
        assert (handle is not None) == async_op
        if handle is not None:
            handle.wait()
            handle.wait()
        for name, parameter in layer.named_parameters():
            assert not isinstance(parameter, DTensor)
            torch.testing.assert_close(parameter, originals[f"layers.1.{name}"], rtol=0, atol=0)
        assert all(isinstance(p, DTensor) for p in model.get_submodule("layers.0").parameters())
        layer.reshard()
        layer.reshard()
        assert all(isinstance(p, DTensor) for p in model.parameters())

    batch = task.batch_of(0, rank)
    expected = task.loss(task.build(), batch)
    layer.unshard(async_op=True)
    with Recorder() as recorder:  # groups have their final names from this forward on
        loss = task.loss(model, batch)
    torch.testing.assert_close(loss, expected)
    assert_trace(
        (event for event in recorder if event.group == "layers.1"),
        "wait layers.1",  # already gathered: no second all-gather
        "reshard layers.1",
        operations=PARAMETERS,
    )
    model.reshard()


def fail(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 5))


def show(model: nn.Module) -> None:
    with unsharded_params(model):
        pass


FREE: dict[str, Callable[[Any, nn.Module], object]] = {
    "reshard": lambda layer, model: layer.reshard(),
    "evaluation": lambda layer, model: layer.eval()(torch.ones(2, 4)),
    "step": lambda layer, model: model(torch.ones(2, 4)).sum().backward(),
    "failed forward": lambda layer, model: fail(model),
    "state dict": lambda layer, model: model.state_dict(),
    "full parameters": lambda layer, model: show(model),
}
"""Ways to free the parameters of a layer of the model."""


def wait_after(library: Any, how: str, **options: Any) -> None:
    """Wait for an all-gather whose parameters were freed before: for that alone, and while another one is in flight."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    library.fully_shard(model[0], **options)
    library.fully_shard(model)
    if how == "evaluation":
        model(torch.ones(2, 4))
    handle = model[0].unshard(async_op=True)
    FREE[how](model[0], model)
    handle.wait()
    assert all(isinstance(p, DTensor) for p in model[0].parameters())
    first = model[0].unshard(async_op=True)
    FREE[how](model[0], model)
    second = model[0].unshard(async_op=True)
    for each in (first, second, first):
        each.wait()
    assert not any(isinstance(p, DTensor) for p in model[0].parameters())
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.behaviour("C-08")
@on_ranks(2)
def test_a_wait_after_the_parameters_were_freed_has_no_effect() -> None:
    for how in FREE:
        wait_after(composable_fsdp, how)
    wait_after(composable_fsdp, "step", reshard_after_forward=1)
    for how in ("evaluation", "step"):
        wait_after(torch.distributed.fsdp, how)


@pytest.mark.behaviour("C-08")
@on_ranks(2, environment=SOCKETS)
def test_reshard_after_forward_can_be_changed_between_iterations() -> None:
    task = TASKS["chain"]
    wanted = (True, False, True, False, False, True)

    def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        expected = set() if wanted[step] else {f"layers.{i}" for i in range(4)}
        if isinstance(model, FSDPModule):
            model.set_reshard_after_forward(wanted[step])
            if step == 4:
                sharded_layers(model)[0].set_reshard_after_forward(True, recurse=False)
                expected.remove("layers.0")
        with Recorder() as forward:
            loss = task.loss(model, task.batch_of(step, rank))
        with Recorder() as backward:
            loss.backward()
        if isinstance(model, FSDPModule):
            kept = set(ledger(forward))
            gathered = {e.group for e in backward if e.operation is Operation.UNSHARD and e.bytes}
            assert (kept, gathered) == (expected, {f"layers.{i}" for i in range(4)} - expected), step
        return loss.detach()

    model = check_parity(task.build, play, steps=len(wanted))
    with pytest.raises(ConfigurationError, match="bool"):
        model.set_reshard_after_forward(2)


class ByHand:
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.5)


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@on_ranks(2)
def test_parameters_kept_after_backward_are_not_stale_after_an_optimizer_step(
    reshard_after_forward: bool | None,
) -> None:
    task, rank = TASKS["mlp"], dist.get_rank()

    def shard(model: Any) -> None:
        shard_layers(model, fully_shard, reshard_after_forward=reshard_after_forward)
        model.set_reshard_after_backward(False)

    for name, optimizer in {**OPTIMIZERS, "by hand": ByHand}.items():
        model: Any = check_parity(task.build, play_task("mlp"), optimizer, shard=shard, what=name)
        traces = []
        for step in range(2):
            with Recorder() as recorder:
                task.loss(model, task.batch_of(step, rank)).backward()
            traces.append([event.operation for event in recorder if event.group == "layers.1"])
        assert Operation.UNSHARD in traces[0], "parameters are gathered again after an optimizer step"
        if reshard_after_forward is False:
            assert Operation.UNSHARD not in traces[1], "unchanged parameters are not gathered again"
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        model.set_reshard_after_backward(True)
        task.loss(model, task.batch_of(0, rank)).backward()
        assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.behaviour("C-08")
@on_ranks(2)
def test_only_an_optimizer_of_shards_makes_kept_parameters_stale() -> None:
    """Step optimizers of plain tensors between passes that keep parameters unsharded."""
    task, rank = TASKS["mlp"], dist.get_rank()
    model = shard_layers(task.build(), fully_shard, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    shards = [cast(DTensor, p)._local_tensor for p in model.parameters()]
    for aliases in ([s.detach() for s in shards], [s.data for s in shards]):
        task.loss(model, task.batch_of(0, rank)).backward()
        beside = torch.nn.Linear(2, 2)
        if rank == 0:  # trains what no other rank has
            beside(torch.ones(2)).sum().backward()
            torch.optim.SGD(beside.parameters()).step()
        with Recorder() as recorder, torch.no_grad():
            before = model(task.batch_of(0, rank)[0])
        assert not any(event.operation is Operation.UNSHARD for event in recorder), "unchanged parameters are kept"
        for alias in aliases:
            alias.grad = torch.ones_like(alias)
        torch.optim.SGD(aliases, lr=1.0, foreach=True).step()
        with torch.no_grad():
            assert not torch.equal(model(task.batch_of(0, rank)[0]), before), "an optimizer of local shards has stepped"


@pytest.mark.behaviour("C-08")
@on_ranks(4)
def test_parameters_kept_on_some_ranks_after_forward_may_stay_so_after_backward() -> None:
    """One group is not gathered in backward since its settings say so, another since the backward does not use it."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model = copy.deepcopy(whole)
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=2)
    sharded(model).set_reshard_after_backward(False)
    sharded(model[0]).set_unshard_in_backward(False)
    for each in (whole, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(6):
            output = each(torch.arange(8)) if step % 2 else list(each)[2](torch.ones(8, 8))
            output.square().mean().backward()
            if step % 3:
                optimizer.step()
                optimizer.zero_grad()
    for module in (*model, model):
        sharded(module).reshard()
    for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full_value(parameter), expected)


@pytest.mark.behaviour("C-08")
@on_ranks(2, environment=SOCKETS)
def test_prefetch_lists_determine_the_order_of_gathers() -> None:
    task, rank = TASKS["chain"], dist.get_rank()
    model = shard_layers(task.build(), fully_shard, fuses=False)
    layers = sharded_layers(model)
    # Two ahead in forward, each group only once; in backward two ahead from the last, then none.
    layers[0].set_modules_to_forward_prefetch([layers[1], layers[2]])
    layers[1].set_modules_to_forward_prefetch([layers[3]])
    layers[2].set_modules_to_forward_prefetch([])
    layers[3].set_modules_to_backward_prefetch([layers[2], layers[1]])
    layers[2].set_modules_to_backward_prefetch([])
    layers[1].set_modules_to_backward_prefetch([layers[0]])
    for step in range(2):
        with Recorder() as forward:
            loss = task.loss(model, task.batch_of(step, rank))
        with Recorder() as backward:
            loss.backward()
        # The root prefetches layers.0 without a list once it knows the order.
        before = ["unshard root", "wait root", "unshard layers.0"] if step == 0 else [
            "unshard root",
            "unshard layers.0",
            "wait root",
        ]  # fmt: skip
        assert_trace(
            (event for event in forward if event.group != "root"),
            *[line for line in before if not line.endswith("root")],
            "unshard layers.1; unshard layers.2; wait layers.0; reshard layers.0; wait layers.1; unshard layers.3",
            "reshard layers.1; wait layers.2; reshard layers.2; wait layers.3; reshard layers.3",
        )
        assert_trace(
            (event for event in backward if event.group != "root"),
            "unshard layers.3; unshard layers.2; unshard layers.1; wait layers.3; reshard layers.3; wait layers.2",
            "reshard layers.2; wait layers.1; unshard layers.0; reshard layers.1; wait layers.0; reshard layers.0",
        )
    with pytest.raises(ConfigurationError, match="Linear"):
        layers[0].set_modules_to_forward_prefetch([nn.Linear(1, 1)])  # type: ignore[list-item]


@pytest.mark.behaviour("C-08")
@on_ranks(2)
def test_an_embedding_is_not_gathered_in_backward() -> None:
    gathered: list[int] = []
    task = TASKS["transformer"]

    def play(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss = task.loss(model, task.batch_of(step, rank))
        with Recorder() as backward:
            loss.backward()
        gathered.append(sum(str(event) == "unshard embedding" for event in backward))
        return loss.detach()

    def shard(unshard_in_backward: bool) -> Callable[[nn.Module], None]:
        def apply(model: Any) -> None:
            embedding = fully_shard(model.get_submodule("embedding"))
            embedding.set_unshard_in_backward(unshard_in_backward)
            shard_layers(model, fully_shard)

        return apply

    check_parity(task.build, play, shard=shard(False), steps=5)
    assert gathered[:5] == [0] * 5
    gathered.clear()
    check_parity(task.build, play, shard=shard(True), steps=2)
    assert gathered[:2] == [1] * 2


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Chain(6, 2), Chain(6, 2)])
        self.code = nn.Linear(6, 6)
        self.decode_bias = nn.Parameter(torch.zeros(6))

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.code(self.layers[0](x)) * scale

    def decode(self, code: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": self.layers[1](code) + self.decode_bias}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.code(self.layers[0](x))) + self.decode_bias


class Nesting(Autoencoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))["x"] + self.decode_bias


def play_methods(model: Any, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    code = model.encode(x, scale=0.5)
    loss = (model.decode(code)["x"] - x).square().mean()
    if step % 2:
        loss = loss + model(x).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.behaviour("C-08")
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("kind", [Autoencoder, Nesting])
@on_ranks(2)
def test_registered_forward_methods_train_like_forward_which_may_call_them(
    kind: type[Autoencoder], reshard_after_forward: bool | None
) -> None:
    def shard(model: nn.Module) -> None:
        shard_layers(model, fully_shard, reshard_after_forward=reshard_after_forward)
        for method in ("encode", "decode"):
            register_fsdp_forward_method(model, method)

    check_parity(seeded(kind), play_methods, shard=shard)


@pytest.mark.behaviour("C-08")
def test_registering_a_forward_method_asks_for_one_and_ignores_plain_modules() -> None:
    plain = Transformer(tied=False)
    register_fsdp_forward_method(plain, "forward")
    assert "forward" not in vars(plain)
