"""Test initial values: broadcast from a rank, by a function per module, by seed, or by the module."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

from composable_fsdp import DivergenceError, fully_shard, initialize, sharded_rng, unsharded_params
from composable_fsdp.errors import ConfigurationError, LifecycleError, ParameterError, UnsupportedError
from tests._internals import process_groups, reset_parameters
from tests.helpers.model_parallel import Pairs, parallelize_pairs
from tests.helpers.peak_memory import Peak
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, full_value
from tests.helpers.transports import SOCKETS


class Buffered(nn.Module):
    """Has tensors of many kinds: several dtypes, expanded and strided parameters, persistent and other buffers."""

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
        self.register_buffer("column", random(5, 2)[:, 1])
        self.register_buffer("repeated", random(1).expand(4))
        self.register_buffer("one", random(4)[::2][:1])
        self.register_buffer("nothing", None)
        self.left = nn.Linear(3, 3)
        with torch.no_grad():
            self.left.weight.fill_(seed)
        self.left.register_buffer("own", torch.tensor(float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.t()).sum() + self.get_buffer("mean").sum()


@pytest.mark.behaviour("A-15", "A-11")
@pytest.mark.parametrize(("shape", "message_bytes"), [((2,), 1 << 20), ((2,), 1), ((2, 2), 40), ((1,), 40)], ids=str)
@on_ranks("shape")
def test_all_ranks_start_from_the_values_of_rank_0(shape: tuple[int, ...], message_bytes: int) -> None:
    rank = dist.get_rank()
    module, first = Buffered(seed=10 + rank), Buffered(seed=10)
    parameters = {n: p.detach() for n, p in first.named_parameters() if not n.startswith("left")}
    ignored = {n: p.detach().clone() for n, p in module.left.named_parameters()}
    mesh = init_device_mesh("cpu", shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "MESSAGE_BYTES", message_bytes)
        fully_shard(module, mesh=mesh, sync_module_states=True, ignored_modules=[module.left])
    for name, value in parameters.items():
        assert_exact(full_value(module.get_parameter(name)), value, name)
    assert module.tied is module.weight
    for name in ("mean", "count", "table", "column", "repeated", "one"):
        assert_exact(module.get_buffer(name), first.get_buffer(name), name)
    for name, value in ignored.items():
        assert_exact(module.left.get_parameter(name), value, name)
    assert module.left.get_buffer("own") == 10 + rank
    module(torch.randn(2, 3)).backward()


@pytest.mark.behaviour("A-15")
@on_ranks(2)
def test_small_tensors_share_one_message() -> None:
    sent, original = [], dist.broadcast

    def counted(*args: object, **kwargs: object) -> object:
        sent.append(args)
        return original(*args, **kwargs)  # type: ignore[arg-type]

    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(50)], nn.Linear(4, 4, dtype=torch.bfloat16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", counted)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), sync_module_states=True)
    assert len(sent) == 1


@pytest.mark.behaviour("A-15")
@on_ranks(2)
def test_meta_tensors_cannot_be_synchronised_and_are_named() -> None:
    with torch.device("meta"):
        model = Buffered(0)
    with pytest.raises(ParameterError) as error:
        fully_shard(model, sync_module_states=True)
    found = str(error.value)
    assert "these of Buffered are on the meta device and have no values to send: ['weight', 'narrow'," in found
    assert "Pass param_init_fn" in found


@pytest.mark.behaviour("A-11")
@on_ranks(2)
def test_ignored_modules_are_neither_sharded_nor_reduced() -> None:
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
    assert not torch.equal(*others), "statistics of different batches are not synchronised"


SEED = 5


class Zoo(nn.Module):
    """Modules that initialise parameters in slices, initialise other modules' parameters, or need full matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6, padding_idx=2)
        self.layer = nn.TransformerEncoderLayer(6, 2, 7, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.conv = nn.Conv2d(3, 5, 3)
        self.lstm = nn.LSTM(3, 5)
        self.head = nn.Linear(6, 13, bias=False)
        self.left = nn.Linear(3, 3)


def zoo(mesh: DeviceMesh, *, on_meta: bool, tied: bool, dim: int) -> Zoo:
    with torch.device("meta" if on_meta else "cpu"):
        model = Zoo()
    if tied:
        model.head.weight = model.embedding.weight

    def placed(parameter: nn.Parameter) -> Shard | None:
        return Shard(dim) if parameter.ndim > dim else None

    options: dict[str, Any] = {"mesh": mesh, "shard_placement_fn": placed, "ignored_modules": [model.left]}
    fully_shard(model.layer, **options)
    return fully_shard(model, **options)


def initialise_orthogonally(module: nn.Module) -> None:
    """Initialise full matrices, and the children's parameters in their parent as transformers does."""
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        module.weight[1:2].mul_(2)
    elif isinstance(module, nn.TransformerEncoderLayer):
        nn.init.normal_(module.linear2.weight, std=0.1)
        module.linear2.bias.data.normal_()


def construct_zoo() -> Zoo:
    torch.manual_seed(SEED)
    return Zoo()


def apply_seeded(model: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    torch.manual_seed(SEED)
    with torch.no_grad():
        return model.apply(fn)


def assert_values(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_exact(full_value(ours), theirs.detach(), name)
    for (name, buffer), expected in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert_exact(buffer, expected, name)


def initialise_by_seed(shapes: Sequence[tuple[int, ...]]) -> None:
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape)
        for on_meta, tied, dim in ((True, False, 0), (False, False, 1), (True, True, 1)):
            model = zoo(mesh, on_meta=on_meta, tied=tied, dim=dim)
            reference = construct_zoo()
            if tied:
                reference.head.weight = reference.embedding.weight
                initialize(reference, seed=SEED)
            state = torch.get_rng_state()
            with CommDebugMode() as communication:
                assert initialize(model, seed=SEED) is model
            assert torch.equal(state, torch.get_rng_state())
            if on_meta and not tied:
                assert communication.get_total_counts() == 0
            assert_values(model, reference)
            assert (model.head.weight is model.embedding.weight) == tied
            initialize(model, initialise_orthogonally, seed=SEED)
            assert_values(model, apply_seeded(reference, initialise_orthogonally))


@pytest.mark.behaviour("J-01", "A-12")
@pytest.mark.parametrize("shapes", [[(1,)], [(2,), (2, 1), (1, 2)], [(3,)], [(4,), (2, 2)]], ids=str)
def test_values_by_seed_are_those_of_the_unsharded_model(shapes: list[tuple[int, ...]]) -> None:
    run_ranks(initialise_by_seed, prod(shapes[0]), shapes)


def reset_values(module: nn.Module) -> None:
    if isinstance(module, Pairs):
        nn.init.trunc_normal_(module.scale)
    else:
        reset_parameters(module)


@pytest.mark.behaviour("J-01", "A-06")
@on_ranks(4)
def test_values_by_seed_of_a_tensor_parallel_model_are_those_of_the_unsharded_one() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = Pairs()
    parallelize_pairs(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    initialize(model, reset_values, seed=SEED)
    reference = apply_seeded(Pairs(), reset_values)
    assert_values(model, reference)
    with sharded_rng(model, SEED):
        draw(model)
    with sharded_rng(reference, SEED):
        draw(reference)
    assert_values(model, reference)


@torch.no_grad()
def draw(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.trunc_normal_(parameter)
        nn.init.trunc_normal_(parameter, mean=0.5, std=3.0)  # uses another algorithm
        parameter.add_(torch.randn_like(parameter))
        noise = torch.empty_like(parameter.data).exponential_()
        parameter.data.mul_(noise).add_(torch.randint_like(noise, 5))
        if parameter.ndim > 1:
            nn.init.kaiming_uniform_(parameter)


def compare_draws(shapes: Sequence[tuple[int, ...]]) -> None:
    for shape in shapes:
        mesh, reference = init_device_mesh("cpu", shape), Zoo()
        model = zoo(mesh, on_meta=False, tied=False, dim=0)
        state = torch.get_rng_state()
        with sharded_rng(model, SEED):
            draw(model)
            outside = torch.rand(3)
        assert torch.equal(state, torch.get_rng_state())
        with sharded_rng(reference, SEED):
            draw(reference)
            assert_exact(outside, torch.rand(3), "a plain tensor")
        assert_values(model, reference)
        weight = cast(DTensor, model.lstm.weight_hh_l0)
        with torch.no_grad(), sharded_rng(model, SEED):
            for local in (weight.to_local(), weight.to_local()[1:], weight.to_local().detach()):
                with pytest.raises(UnsupportedError, match="aten::normal_ was called on the local tensor of a shard"):
                    local.normal_()
            assert_exact(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(SEED)), "generator state")
            with pytest.raises(UnsupportedError, match=r"sharded_rng: aten::bernoulli was called on a sharded tensor"):
                torch.bernoulli(weight)


@pytest.mark.behaviour("J-01")
@pytest.mark.parametrize("shapes", [[(2,)], [(4,), (2, 2)]], ids=str)
def test_random_operations_on_shards_are_slices_of_those_on_full_parameters(shapes: list[tuple[int, ...]]) -> None:
    run_ranks(compare_draws, prod(shapes[0]), shapes)


@pytest.mark.behaviour("J-01")
@on_ranks(4, environment=SOCKETS)
def test_initialisation_takes_memory_for_the_shards_and_one_module() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    gc.collect()
    with Peak() as peak:
        initialize(model, seed=SEED)
    shards = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    largest, bias = max(p.nbytes for p in model.parameters()), 256 * 4
    assert shards < peak.bytes < shards + largest + shards // 8 + 2 * bias + 4096, (peak.bytes, shards, largest)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def reset_or_fill_with_ones(module: nn.Module) -> None:
    if isinstance(module, Scaled):
        module.scale.fill_(1)
        module.get_buffer("table").fill_(1)
    else:
        reset_parameters(module)


@pytest.mark.behaviour("J-01")
@on_ranks(2)
def test_initialisation_names_what_it_cannot_give_values() -> None:
    texts = []

    def refused(kind: type[Exception], model: nn.Module, *args: Any, seed: int = 0) -> None:
        with pytest.raises(kind) as error:
            initialize(model, *args, seed=seed)
        texts.append(str(error.value))

    with torch.device("meta"):
        model = fully_shard(Scaled())
    refused(ConfigurationError, model)
    assert all(p.is_meta for p in model.parameters())
    refused(ParameterError, model, lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)

    def shrink(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias = nn.Parameter(torch.ones(3))

    refused(ParameterError, model, shrink)
    with unsharded_params(model):
        refused(LifecycleError, model, print)
    initialize(model, reset_or_fill_with_ones, seed=dist.get_rank())
    with pytest.raises(DivergenceError) as error:
        model(torch.ones(2, 4))
    texts.append(str(error.value))
    initialize(model, reset_or_fill_with_ones, seed=1)
    model(torch.ones(2, 4)).sum().backward()
    no_method, left_out, other_shape, unsharded, other_seed = texts
    assert "these have no such method: the model (Scaled). Pass a function of a module" in no_method
    assert "and fn gave them no values: ['scale', 'table']. Pass an fn that does" in left_out
    assert "fn left parameter 'layer.bias' of shape (4,) as (3,). It must keep shapes" in other_shape
    assert unsharded.startswith("initialize was called for")
    assert other_seed.startswith("Ranks have started from different values: parameter 'layer.weight'")
