"""Where values come from before training: other ranks, a function per module, or the module itself."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_fsdp import ParameterError, broadcast, fully_shard, to_empty
from composable_fsdp.testing import run_ranks
from tests.ranks._models import TASKS, shard_layers
from tests.ranks._sharding import assert_sharded, exactly, initialise, train_alike, values_of, whole


class Buffered(nn.Module):
    """Everything that must travel: many dtypes, an expanded and a strided parameter, buffers, some not persistent."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.weight = nn.Parameter(random(5, 3))
        self.narrow = nn.Parameter(random(3).bfloat16())
        self.strided = nn.Parameter(random(3, 4).t())
        self.expanded = nn.Parameter(random(1, 3).expand(4, 3), requires_grad=False)
        self.flags = nn.Parameter(random(5) > 0, requires_grad=False)
        self.phases = nn.Parameter(torch.complex(random(3), random(3)), requires_grad=False)
        self.empty = nn.Parameter(random(0, 3))
        self.tied = self.weight
        self.register_buffer("mean", random(3))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("table", random(7), persistent=False)
        self.register_buffer("nothing", None)
        self.left = nn.Linear(3, 3)
        with torch.no_grad():
            self.left.weight.fill_(seed)
        self.left.register_buffer("own", torch.tensor(float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (x @ self.weight.t()).sum() + self.get_buffer("mean").sum()
        return out


def synchronised(shape: tuple[int, ...], message_bytes: int) -> None:
    rank = dist.get_rank()
    module, first = Buffered(seed=10 + rank), Buffered(seed=10)
    parameters = {n: p.detach() for n, p in first.named_parameters() if not n.startswith("left")}
    ignored = {n: p.detach().clone() for n, p in module.left.named_parameters()}
    mesh = init_device_mesh("cpu", shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "MESSAGE_BYTES", message_bytes)
        fully_shard(module, mesh=mesh, sync_module_states=True, ignored_modules=[module.left])
    for name, value in parameters.items():
        exactly(whole(module.get_parameter(name)), value, name)
    assert module.tied is module.weight
    for name in ("mean", "count", "table"):
        exactly(module.get_buffer(name), first.get_buffer(name), name)
    for name, value in ignored.items():
        exactly(module.left.get_parameter(name), value, name)
    assert module.left.get_buffer("own") == 10 + rank
    module(torch.randn(2, 3)).backward()


@pytest.mark.behaviour("A-15", "A-11")
@pytest.mark.parametrize(("shape", "message_bytes"), [((2,), 1 << 20), ((2,), 1), ((2, 2), 40), ((1,), 40)], ids=str)
def test_all_ranks_start_from_the_first_ones_values(shape: tuple[int, ...], message_bytes: int) -> None:
    run_ranks(synchronised, prod(shape), shape, message_bytes)


def trains_from_other_seeds() -> None:
    """A nested unit's own call synchronises its own parameters; the root's leaves them."""
    mesh = init_device_mesh("cpu", (2,))
    model, reference = TASKS["mlp"].build(), TASKS["mlp"].build()
    if dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    shard_layers(model, fully_shard, mesh=mesh, sync_module_states=True)
    assert_sharded(model, values_of(reference), mesh)
    train_alike(model, reference, TASKS["mlp"])


@pytest.mark.behaviour("A-15")
def test_ranks_that_start_apart_train_as_one() -> None:
    run_ranks(trains_from_other_seeds, 2)


def count_messages() -> int:
    sent, original = [], dist.broadcast

    def counted(*args: object, **kwargs: object) -> object:
        sent.append(args)
        return original(*args, **kwargs)  # type: ignore[arg-type]

    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(50)], nn.Linear(4, 4, dtype=torch.bfloat16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", counted)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), sync_module_states=True)
    return len(sent)


@pytest.mark.behaviour("A-15")
def test_small_tensors_share_one_message_per_dtype() -> None:
    assert run_ranks(count_messages, 2) == [2, 2]


def nothing_to_send() -> str:
    with torch.device("meta"):
        model = Buffered(0)
    with pytest.raises(ParameterError) as error:
        fully_shard(model, sync_module_states=True)
    return str(error.value)


@pytest.mark.behaviour("A-15")
def test_meta_tensors_cannot_be_synchronised_and_are_named() -> None:
    first, second = run_ranks(nothing_to_send, 2)
    assert first == second
    assert "these of Buffered are on the meta device and have no values to send: ['weight', 'narrow'," in first
    assert "Pass param_init_fn" in first


def from_init_function(task: str, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape)
    reference = TASKS[task].build()
    values = values_of(reference)
    with torch.device("meta"):
        model = TASKS[task].build()
    names = {module: name for name, module in model.named_modules()}
    called = []

    def init(module: nn.Module) -> None:
        called.append(names[module])
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for name, parameter in module.named_parameters(names[module], recurse=False):
                # Only the first rank has the values: the others get them by synchronisation.
                parameter.copy_(values[name]) if dist.get_rank() == 0 else parameter.zero_()

    shard_layers(model, fully_shard, mesh=mesh, param_init_fn=init, sync_module_states=True)
    assert len(called) == len(set(called)), "each module once"
    assert all(next(iter(model.get_submodule(n)._parameters), None) for n in called), "only those with their own"
    assert_sharded(model, values, mesh)
    train_alike(model, reference, TASKS[task])


@pytest.mark.behaviour("A-12", "A-15")
@pytest.mark.parametrize(("task", "shape"), [("mlp", (2,)), ("tied", (2,)), ("mlp", (2, 2))], ids=str)
def test_an_init_function_and_synchronisation_train_with_parity(task: str, shape: tuple[int, ...]) -> None:
    run_ranks(from_init_function, prod(shape), task, shape)


def emptied(shape: tuple[int, ...]) -> None:
    mesh, task = init_device_mesh("cpu", shape), TASKS["tied"]
    reference = task.build()
    with torch.device("meta"):
        model = task.build()
    model.register_buffer("frequencies", torch.arange(3.0), persistent=False)
    shard_layers(model, fully_shard, mesh=mesh)
    assert to_empty(model, device="cpu") is model
    exactly(model.get_buffer("frequencies"), torch.arange(3.0), "frequencies")
    assert all(isinstance(p, DTensor) and not p.is_meta for p in model.parameters())
    values = values_of(reference)
    initialise(model, values)
    to_empty(model, device="cpu")
    assert_sharded(model, values, mesh)
    train_alike(model, reference, task)


@pytest.mark.behaviour("A-12")
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_to_empty_materialises_sharded_parameters_and_keeps_what_is_real(shape: tuple[int, ...]) -> None:
    run_ranks(emptied, prod(shape), shape)


def ignoring() -> None:
    """Ignored modules train as plain ones, each rank for itself."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 3))
    plain = model[1]
    objects = dict(plain.named_parameters())
    fully_shard(model, mesh=mesh, ignored_modules=[plain])
    model(torch.randn(4, 3) * (dist.get_rank() + 1)).sum().backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) == (not name.startswith("1.")), name
    for name, parameter in plain.named_parameters():
        assert parameter is objects[name]
        assert type(parameter.grad) is torch.Tensor
    with torch.no_grad():
        others = [torch.empty(3) for _ in range(2)]
        dist.all_gather(others, plain.get_buffer("1.running_var"))
    assert not torch.equal(*others), "nobody synchronised what ranks saw of their own batches"


@pytest.mark.behaviour("A-11")
def test_ignored_modules_are_neither_sharded_nor_reduced() -> None:
    run_ranks(ignoring, 2)
