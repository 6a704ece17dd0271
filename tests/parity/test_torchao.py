"""Checks that training with torchao's unmodified tensors is bitwise equal to torch's FSDP2.

The recipes come from torchao's documentation. Matrix products are emulated or computed by torch's int8 kernels. Both
run on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import composable_fsdp as ours
from composable_fsdp.checkpoint import load, load_safetensors, save, save_safetensors
from tests._internals import ExtendedBucket, state_of
from tests.helpers.run_ranks import on_ranks

pytestmark = [
    pytest.mark.behaviour("E-11"),
    pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: make install"),
]

WIDTH = 256  # NF4 requires at least 64 * 256 values in every shard
STEPS = 4
BATCH = 24  # torch's int8 product requires more than 16 rows


def float8(model: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(model, config=config)


def precompute_float8_scales(model: nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def quantized_training(config: str, model: nn.Module, **options: object) -> nn.Module:
    from torchao.prototype import quantized_training as recipes
    from torchao.quantization import quantize_

    quantize_(model, getattr(recipes, config)(**options))
    return model


def int8_weights(model: nn.Module) -> nn.Module:
    return quantized_training("int8_weight_only_quantized_training", model)


def int8_mixed_precision(model: nn.Module) -> nn.Module:
    return quantized_training("int8_mixed_precision_training", model)


def int8_modules(model: nn.Module) -> nn.Module:
    return quantized_training("int8_mixed_precision_training", model, module_swap=True)


def bitnet(model: nn.Module) -> nn.Module:
    return quantized_training("bitnet_training", model)


def precompute_bitnet_scales(model: nn.Module) -> None:
    from torchao.prototype.quantized_training import precompute_bitnet_scale_for_fsdp

    precompute_bitnet_scale_for_fsdp(model)


class Adapted(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

        super().__init__()
        self.weight = nn.Parameter(to_nf4(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)
        self.product = linear_nf4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight) + self.bias + self.up(self.down(x))


def nf4_adapters(model: Any) -> nn.Module:
    for block in model:
        block[0] = Adapted(block[0])
    return model


def do_nothing(model: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Recipe:
    """One way to use torchao.

    Args:
        convert: a function that converts the model before it is sharded.
        rests_as: the name of the class of a converted shard.
        computes_as: the name of the class of a gathered parameter.
        after_step: a function that is called after each step of the optimizer.
        quantizes: if true, conversion changes the values of the model.
    """

    convert: Callable[[nn.Module], nn.Module]
    rests_as: str
    computes_as: str
    after_step: Callable[[nn.Module], None] = do_nothing
    quantizes: bool = True


CAST, INT8, MIXED = (
    "WeightWithDynamicFloat8CastTensor",
    "Int8QuantizedTrainingLinearWeight",
    "Int8MixedPrecisionTrainingLinearWeight",
)
BITNET, PACKED = "BitNetTrainingLinearWeight", "BitNetPacked2bitLinearWeight"
RECIPES = {
    "float8": Recipe(float8, CAST, "Float8TrainingTensor"),
    "float8, scales precomputed": Recipe(float8, CAST, "Float8TrainingTensor", precompute_float8_scales),
    "int8 weights": Recipe(int8_weights, INT8, INT8),
    # torchao 0.18 registers the int8 product of this class in a table that it never reads. The class computes with
    # plain weights on both libraries.
    "int8 mixed precision": Recipe(int8_mixed_precision, MIXED, MIXED, quantizes=False),
    "int8 mixed precision of modules": Recipe(int8_modules, "Tensor", "Parameter"),
    "bitnet": Recipe(bitnet, BITNET, PACKED),
    "bitnet, scales precomputed": Recipe(bitnet, BITNET, PACKED, precompute_bitnet_scales),
    "nf4 with adapters": Recipe(nf4_adapters, "NF4Tensor", "NF4Tensor"),
}


@dataclass
class Run:
    """The results of one rank: losses and gradient norms, the last step's gradients, and the tensors' classes."""

    numbers: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    rests_as: list[str] = field(default_factory=list)
    computes_as: list[str] = field(default_factory=list)


def build(hidden: int = WIDTH) -> nn.Module:
    torch.manual_seed(3)
    sizes = [(WIDTH, hidden), (hidden, WIDTH), (WIDTH, WIDTH)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in sizes))


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(library: Any, model: Any, **options: Any) -> Any:
    for block in model:
        library.fully_shard(block, **options)
    return library.fully_shard(model, **options)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, foreach=False)  # int8 weights do not support foreach


def play(
    model: Any,
    rank: int,
    recipe: Recipe,
    microbatches: int = 1,
    watched: Callable[[Any], Any] = lambda model: model[0][0],
) -> Run:
    run = Run()
    optimizer = adam([p for p in model.parameters() if p.requires_grad])
    watched(model).register_forward_pre_hook(lambda m, _: run.computes_as.append(type(_inner(m.weight)).__name__))
    torch.manual_seed(5 + rank)  # int8 weights are rounded stochastically
    for step in range(STEPS):
        optimizer.zero_grad()
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(microbatch == microbatches - 1)
            loss = model(batch_of(step + 100 * microbatch, rank)).float().square().mean()
            loss.backward()
            run.numbers.append(loss.item())
        run.gradients = [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
        run.numbers.append(ours.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        recipe.after_step(model)
    run.rests_as = [type(p._local_tensor).__name__ for p in model.parameters()]
    return run


def _inner(weight: Any) -> Any:
    return getattr(weight, "_local_tensor", weight)


def assert_same(mine: Run, theirs: Run, recipe: Recipe, what: str) -> None:
    assert all(map(torch.isfinite, map(torch.tensor, mine.numbers))), what
    assert mine.numbers == theirs.numbers, what
    for one, other in zip(mine.gradients, theirs.gradients, strict=True):
        assert (one is None) == (other is None), what
        assert one is None or other is None or torch.equal(one, other), what
    assert mine.rests_as == theirs.rests_as, what
    assert recipe.rests_as in mine.rests_as, what
    assert set(mine.computes_as) == set(theirs.computes_as) == {recipe.computes_as}, what


@pytest.mark.parametrize("name", RECIPES)
@on_ranks(2)
def test_torchao_trains_bitwise_like_fsdp2(name: str) -> None:
    recipe, rank = RECIPES[name], dist.get_rank()
    seen = set()
    for dtype, reshard in ((None, True), (torch.bfloat16, False)):
        runs: list[Run] = []
        for library in (ours, peer):
            policy = library.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
            model = sharded(library, recipe.convert(build()), mp_policy=policy, reshard_after_forward=reshard)
            runs.append(play(model, rank, recipe))
            if library is ours:
                kinds = [isinstance(b, ExtendedBucket) for b in state_of(model[0]).group.buckets]
                assert (True in kinds) == (recipe.rests_as != "Tensor")
        assert_same(runs[0], runs[1], recipe, f"{name}, {dtype}, reshard_after_forward={reshard}")
        seen.add(tuple(runs[0].numbers))
    plain = play(sharded(ours, build()), rank, Recipe(lambda m: m, "", ""))
    assert (tuple(plain.numbers) not in seen) == recipe.quantizes


def run_on_both(name: str, prepare: Callable[[Any, Any], tuple[Any, int]], **options: Any) -> tuple[Run, Run]:
    runs = [play(*prepare(library, RECIPES[name]), RECIPES[name], **options) for library in (ours, peer)]
    return runs[0], runs[1]


def checkpointed(library: Any, recipe: Recipe) -> tuple[Any, int]:
    model: Any = recipe.convert(build())
    for index, block in enumerate(model):
        model[index] = checkpoint_wrapper(block)
    return sharded(library, model), dist.get_rank()


def from_meta(library: Any, recipe: Recipe) -> tuple[Any, int]:
    with torch.device("meta"):
        model = sharded(library, recipe.convert(build()))
    model.to_empty(device="cpu")
    torch.manual_seed(8 + dist.get_rank())  # every rank initializes its own shards
    with torch.no_grad():
        for parameter in model.parameters():
            parameter._local_tensor.copy_(torch.rand(parameter._local_tensor.shape) / 5 - 0.1)
    return model, dist.get_rank()


def hybrid(library: Any, recipe: Recipe) -> tuple[Any, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return sharded(library, recipe.convert(build()), mesh=mesh), dist.get_rank()


def tensor_parallel(library: Any, recipe: Recipe) -> tuple[Any, int]:
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = recipe.convert(build())
    parallelize_module(model, mesh["tp"], {"0.0": Float8ColwiseParallel(), "1.0": Float8RowwiseParallel()})
    return sharded(library, model, mesh=mesh["dp"]), mesh.get_local_rank("dp")


@pytest.mark.parametrize("name", ["float8, scales precomputed", "int8 weights", "nf4 with adapters"])
@on_ranks(2)
def test_torchao_trains_with_activation_checkpointing_and_microbatches(name: str) -> None:
    runs = run_on_both(name, checkpointed, microbatches=2, watched=lambda m: m[0]._checkpoint_wrapped_module[0])
    assert_same(*runs, RECIPES[name], f"{name}, checkpointed")


@pytest.mark.parametrize("name", ["float8, scales precomputed", "int8 mixed precision", "bitnet"])
@on_ranks(2)
def test_torchao_parameters_are_materialised_from_the_meta_device(name: str) -> None:
    assert_same(*run_on_both(name, from_meta), RECIPES[name], f"{name}, from meta")


@pytest.mark.parametrize("name", ["float8, scales precomputed", "int8 weights", "nf4 with adapters"])
@on_ranks(4)
def test_torchao_trains_on_a_hybrid_mesh(name: str) -> None:
    assert_same(*run_on_both(name, hybrid), RECIPES[name], f"{name}, hybrid")


@on_ranks(4)
def test_float8_with_torchaos_tensor_parallel_styles() -> None:
    assert_same(*run_on_both("float8", tensor_parallel), RECIPES["float8"], "tensor-parallel")


@pytest.mark.parametrize("name", ["float8, scales precomputed", "int8 weights", "int8 mixed precision", "bitnet"])
@on_ranks(2)
def test_torchao_state_dicts_restore_the_saved_values(name: str) -> None:
    recipe, rank = RECIPES[name], dist.get_rank()
    model = sharded(ours, recipe.convert(build()))
    state: dict[str, Any] = {**get_model_state_dict(model)}
    state = {key: value.clone() for key, value in state.items()}
    with torch.no_grad():
        before = model(batch_of(0, rank))
    play(model, rank, recipe)
    with torch.no_grad():
        assert not torch.equal(model(batch_of(0, rank)), before)
    set_model_state_dict(model, state)
    recipe.after_step(model)
    with torch.no_grad():
        assert torch.equal(model(batch_of(0, rank)), before)


@on_ranks(2)
def test_torchao_checkpoints_restore_the_saved_values(tmp_path: Path) -> None:
    rank = dist.get_rank()
    for i, name in enumerate(("float8, scales precomputed", "int8 weights", "bitnet", "nf4 with adapters")):
        recipe = RECIPES[name]
        models = [sharded(ours, recipe.convert(build(hidden))) for hidden in (WIDTH, WIDTH)]
        with torch.no_grad():
            for parameter in models[1].parameters():
                parameter.mul_(0.5) if type(_inner(parameter)) is torch.Tensor else None
        play(models[0], rank, recipe)
        save(tmp_path / str(i), models[0])
        load(tmp_path / str(i), models[1])
        with torch.no_grad():
            outputs = [model(batch_of(0, rank)) for model in models]
        assert torch.equal(*outputs), name
        assert [type(_inner(p)) for p in models[1].parameters()] == [type(_inner(p)) for p in models[0].parameters()]


@pytest.mark.behaviour("F-11")
@on_ranks(2)
def test_torchao_safetensors_have_plain_values(tmp_path: Path) -> None:
    """Check that safetensors files of converted models hold plain values that other libraries can read."""
    plain = build()
    save_safetensors(plain, tmp_path / "plain")
    for name in ("float8", "int8 mixed precision", "bitnet", "int8 weights"):
        other = build()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.neg_()
        model = sharded(ours, RECIPES[name].convert(other))
        load_safetensors(model, tmp_path / "plain")
        assert type(model[0][0].weight.to_local()).__name__ == RECIPES[name].rests_as, name
        save_safetensors(model, tmp_path / name)
        again = build()
        load_safetensors(again, tmp_path / name)
        for one, two in zip(again.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-3 if name == "int8 weights" else 0)


@pytest.mark.parametrize("name", ["float8", "int8 weights"])
@on_ranks(2, 4)
def test_torchao_rows_may_be_uneven(name: str) -> None:
    """Check that shards with uneven rows are quantized like the full tensor.

    Int8 has one scale per row; float8 has one scale for all ranks. The last ranks may have no rows. Torchao's float8
    cannot compute the maximum of an empty tensor.
    """
    recipe, rank, world_size = RECIPES[name], dist.get_rank(), dist.get_world_size()
    for hidden in (251, 7, world_size - 1):
        model, reference = sharded(ours, recipe.convert(build(hidden))), recipe.convert(build(hidden))
        losses = [reference(batch_of(0, other)).square().mean() for other in range(world_size)]
        loss = model(batch_of(0, rank)).square().mean()
        torch.testing.assert_close(loss, losses[rank])
        loss.backward()
        torch.stack(losses).mean().backward()
        for (parameter_name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close({parameter_name: p.grad.full_tensor()}, {parameter_name: q.grad})
        play(model, rank, recipe)
