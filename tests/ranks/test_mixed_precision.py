"""Test mixed precision: dtypes of computation, communication, reduction and storage, compared bitwise."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from composable_fsdp import CommunicationPolicy, Int8, MixedPrecisionPolicy, fully_shard, no_sync, unsharded_params
from tests.helpers.counted_collectives import counted_collectives
from tests.helpers.models import TASKS, seeded, shard_layers
from tests.helpers.rank_process import RanksError
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.training import OPTIMIZERS, assert_equal_runs, copy_on_cpu, local_shard, play_task, train
from tests.helpers.transports import SOCKETS

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
IS_2_15 = TorchVersion(torch.__version__) >= "2.15"
"""True if FSDP2 reduces in the dtype of the sharded gradient by default, and not in that of the computation."""

POLICIES: tuple[dict[str, Any], ...] = (
    {"param_dtype": BF16, "reduce_dtype": FP32},
    {"param_dtype": BF16},
    {"param_dtype": FP16, "reduce_dtype": FP16, "output_dtype": FP32},
    {"param_dtype": FP16, "reduce_dtype": FP32, "output_dtype": BF16},
    {"reduce_dtype": BF16},
    {"param_dtype": BF16, "reduce_dtype": BF16, "cast_forward_inputs": False},
)


class CastingLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [x.dtype, self.weight.dtype]
        return torch.tanh(F.linear(x.to(self.weight.dtype), self.weight))


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([CastingLayer(9, 7), CastingLayer(7, 5)])
        self.offset: torch.Tensor
        self.register_buffer("offset", torch.full((5,), 0.1))
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, index: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        self.seen += [x.dtype, mask.dtype, self.table.dtype]
        for layer in self.layers:
            x = layer(x)
        assert self.offset.dtype == FP32
        assert index.dtype == torch.int64
        return {"out": x * mask.to(x.dtype), "index": self.table[index], "half": (x + self.offset.to(x.dtype),)}


def inputs_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {
        "x": torch.randn(4, 9, generator=generator),
        "index": torch.randint(6, (4,), generator=generator),
        "mask": torch.rand(4, 5, generator=generator),
    }


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    out = model(**inputs_of(step, rank))
    return out["out"].float().square().mean() + out["half"][0].float().mean()


def check_dtypes(options: dict[str, Any]) -> None:
    policy = MixedPrecisionPolicy(**options)
    model = shard_layers(seeded(Casting)(), fully_shard, mp_policy=policy)
    computing = policy.param_dtype or FP32
    taken = policy.input_dtype or FP32
    out = model(**inputs_of(0, dist.get_rank()))
    assert model.seen == [taken, taken, torch.int64]
    first, second = (layer.seen for layer in model.layers if isinstance(layer, CastingLayer))
    between = policy.input_dtype or policy.output_dtype or computing
    assert (first, second) == ([taken, computing], [between, computing])
    assert out["out"].dtype == out["half"][0].dtype == (policy.output_dtype or computing)
    assert out["index"].dtype == torch.int64
    (out["out"].float().mean() + out["half"][0].float().mean()).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.int64 if name == "table" else FP32)
        assert parameter.grad is None or parameter.grad.dtype == FP32
    assert {t.dtype for state in optimizer.state.values() for t in state.values()} == {FP32}
    assert model.offset.dtype == FP32
    saved = model.state_dict()
    assert {name: value.dtype for name, value in saved.items()} == {
        name: value.dtype for name, value in Casting().state_dict().items()
    }
    for name, parameter in model.named_parameters():
        assert torch.equal(saved[name].to_local(), copy_on_cpu(parameter).to_local())  # type: ignore[attr-defined]
    model.load_state_dict(saved)


def reduce_explicitly(model: nn.Module, policy: MixedPrecisionPolicy) -> dict[str, torch.Tensor]:
    """Compute each rank's gradients separately. Return them cast, summed in rank order and divided."""
    world_size = dist.get_world_size()
    totals: dict[str, torch.Tensor] = {}
    computing = policy.param_dtype or FP32
    reducing = policy.reduce_dtype or (FP32 if IS_2_15 else computing)
    # fp16 is divided in two parts: before the sum, so that it does not overflow, and after it.
    before = 2 if reducing == FP16 else 1
    for rank in range(world_size):
        plain = seeded(Casting)()
        plain.load_state_dict(model.state_dict())
        offset = plain.get_buffer("offset").clone()
        plain.to(computing)
        plain.register_buffer("offset", offset)
        for layer in plain.get_submodule("layers").children():
            layer.register_forward_pre_hook(lambda _, args: tuple(to_dtype(x, policy.input_dtype) for x in args))
            layer.register_forward_hook(lambda _, args, output: to_dtype(output, policy.output_dtype))
        out = plain(**{name: to_dtype(value, policy.input_dtype) for name, value in inputs_of(0, rank).items()})
        first, second = (to_dtype(value, policy.output_dtype).float() for value in (out["out"], out["half"][0]))
        (first.square().mean() + second.mean()).backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                sent = parameter.grad.to(reducing) / before
                totals[name] = sent if rank == 0 else totals[name] + sent
    return {name: (total / (world_size / before)).float() for name, total in totals.items()}


def to_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def check_reduction(options: dict[str, Any]) -> None:
    policy, rank = MixedPrecisionPolicy(**options), dist.get_rank()
    model = shard_layers(seeded(Casting)(), fully_shard, mp_policy=policy)
    loss_of(model, 0, rank).backward()
    expected = reduce_explicitly(seeded(Casting)(), policy)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():  # two summands have one order
        torch.testing.assert_close(gradient.to_local(), local_shard(expected[name], gradient), rtol=0, atol=0)


@pytest.mark.behaviour("D-01")
@on_ranks(2)
def test_dtypes_are_as_asked_for_and_the_reduction_is_exact() -> None:
    for options in POLICIES:
        check_dtypes(options)
        check_reduction(options)


@pytest.mark.behaviour("D-01")
@pytest.mark.parametrize("reshard_after_forward", [True, None])
@on_ranks(2)
def test_training_in_mixed_precision_is_bitwise_that_of_torch(reshard_after_forward: bool | None) -> None:
    """Compare five steps under each policy with torch's FSDP2, bitwise."""
    rank = dist.get_rank()
    policies: tuple[dict[str, Any], ...] = (POLICIES[0], POLICIES[1], POLICIES[4])
    for options in policies:
        for task in ("mlp", "tied"):
            runs = [
                train(
                    shard_layers(
                        TASKS[task].build(), shard, mp_policy=policy, reshard_after_forward=reshard_after_forward
                    ),
                    play_task(task),
                    OPTIMIZERS["adamw-foreach"],
                    ranks=[rank],
                    watched=rank,
                )
                for shard, policy in (
                    (fully_shard, MixedPrecisionPolicy(**options)),
                    (peer.fully_shard, peer.MixedPrecisionPolicy(**options)),
                    (fully_shard, peer.MixedPrecisionPolicy(**options)),
                )
            ]
            if not (IS_2_15 and task == "tied" and options == {"reduce_dtype": BF16}):
                assert_equal_runs(runs[0], runs[1], what=f"{task}, {options}", exact=True)
            assert_equal_runs(runs[2], runs[0], what=f"{task}, {options}, torch's policy", exact=True)


@pytest.mark.behaviour("D-01", "C-07")
@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_gradients_accumulate_in_the_reduce_dtype(sharded: bool) -> None:
    """Sum three bf16 microbatches in fp32, in full or by shards: two ranks, so each sum has one order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    task = TASKS["mlp"]
    model = shard_layers(task.build(), fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
    for i in range(3):
        with no_sync(model, sharded=sharded) if i < 2 else nullcontext():
            task.loss(model, task.batch_of(i, rank)).backward()
    # In full, each rank sums its microbatches; by shards, the sums over the ranks are added.
    pairs = [(r, i) for r in range(world_size) for i in range(3)]
    groups = [[pair for pair in pairs if pair[sharded] == k] for k in range(3 if sharded else world_size)]
    totals: dict[str, torch.Tensor] = {}
    for group in groups:
        summed: dict[str, torch.Tensor] = {}
        for r, i in group:
            plain = task.build().to(BF16)
            x, target = task.batch_of(i, r)
            task.loss(plain, (x.to(BF16), target)).backward()
            for name, p in plain.named_parameters():
                summed[name] = p.grad.float() + summed.get(name, 0)
        totals = {name: value + totals.get(name, 0) for name, value in summed.items()}
    for name, parameter in model.named_parameters():
        expected = local_shard(totals[name] / world_size, parameter.grad)
        torch.testing.assert_close(parameter.grad.to_local(), expected, rtol=0, atol=0)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(9, 7), nn.BatchNorm1d(3)),
            nn.Sequential(nn.Linear(7, 5), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def signals(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 3, 9, generator=torch.Generator().manual_seed(10 * step + rank))


def normalize(dtype: torch.dtype, wraps_norms: bool) -> None:
    """Compare with a reference whose linear layers compute in 16 bits and whose norms have fp32 parameters."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32)
    model: Any = seeded(Normalized)()
    references = [seeded(Normalized)() for _ in range(world_size)]
    for block in model.blocks:
        if wraps_norms:
            fully_shard(block[1], mp_policy=policy)
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    seen: list[torch.dtype] = []
    for block in model.blocks:
        block[1].register_forward_pre_hook(lambda m, args: seen.extend((args[0].dtype, m.weight.dtype)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2):
        losses = []
        for other, reference in enumerate(references):
            reference.zero_grad()
            cast = {n: p.to(dtype) for n, p in reference.named_parameters() if n.endswith((".0.weight", ".0.bias"))}
            assert len(cast) == 4
            out = torch.func.functional_call(reference, cast, signals(step, other).to(dtype))
            losses.append(out.float().square().mean())
            (losses[-1] / world_size).backward()
        out = model(signals(step, rank))
        assert out.dtype == dtype
        assert torch.equal(out.float().square().mean(), losses[rank])
        out.float().square().mean().backward()
        for (name, p), *others in zip(model.named_parameters(), *(r.parameters() for r in references), strict=True):
            expected = torch.stack([q.grad for q in others]).sum(0)
            torch.testing.assert_close({name: p.grad.full_tensor()}, {name: expected}, rtol=2e-2, atol=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, *others in zip(model.parameters(), *(r.parameters() for r in references), strict=True):
                full = p.full_tensor()
                for q in others:
                    q.copy_(full)
    for one, same in zip(model.buffers(), references[rank].buffers(), strict=True):
        assert torch.equal(one, same)
    assert seen == [dtype, FP32] * 4
    model.eval()
    with torch.no_grad():
        assert model(signals(3, rank)).dtype == dtype


def normalize_in_16_bits() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    model: Any = fully_shard(seeded(Normalized)(), mp_policy=policy)
    for block in model.blocks:
        block[1].to(BF16)
    assert model(signals(0, dist.get_rank())).dtype == BF16
    assert [block[1].weight.dtype for block in model.blocks] == [BF16, BF16]


@pytest.mark.behaviour("D-01")
def test_normalizations_with_running_statistics_compute_in_the_dtype_of_these() -> None:
    for dtype, wraps_norms in ((BF16, False), (FP16, True)):
        run_ranks(normalize, 2, dtype, wraps_norms)
    run_ranks(normalize_in_16_bits, 2)


class Packed(nn.Parameter):
    """Has values packed into bytes of any dtype and the scale to unpack them, like bitsandbytes' ``Params4bit``."""

    scale: float

    def __new__(cls, data: torch.Tensor, scale: float) -> Packed:
        packed = torch.Tensor._make_subclass(cls, data, False)
        packed.scale = scale
        return packed


class Unpacking(nn.Module):
    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        every_byte = torch.arange(256, dtype=torch.uint8)
        every_pair = torch.stack([every_byte.repeat(8), every_byte.flip(0).repeat_interleave(8)], 1).view(-1)
        self.weight = Packed(every_pair.view(storage).view(-1, 1), 0.5)
        self.adapter = nn.Linear(4, 4)
        self.seen: list[tuple[type, float, torch.dtype, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.weight
        self.seen.append((type(found), found.scale, found.dtype, found.detach().view(torch.uint8).clone()))
        unpacked = found.detach().view(torch.uint8).view(-1)[:16].view(4, 4)
        return self.adapter(x) + x @ unpacked.to(x.dtype) * found.scale


def keep_packed(storage: torch.dtype) -> None:
    def assert_kept(module: Any) -> None:
        assert module.weight.scale == 0.5
        assert not module.weight.requires_grad
        assert torch.equal(module.weight.detach().view(torch.uint8), exact)

    exact = Unpacking(storage).weight.detach().view(torch.uint8).clone()
    policy = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32)
    codecs = CommunicationPolicy(all_gather=Int8(), min_numel=1)
    x = torch.randn(3, 4)
    for reshard in (True, False):
        model: Any = fully_shard(
            Unpacking(storage), mp_policy=policy, comm_policy=codecs, reshard_after_forward=reshard
        )
        assert isinstance(model.weight, DTensor)
        assert model.weight.dtype == storage
        for _ in range(2):
            model(x).float().sum().backward()
            assert model.adapter.weight.grad is not None
            assert model.weight.grad is None
        for kind, scale, dtype, found in model.seen:
            assert (kind, scale, dtype) == (Packed, 0.5, storage)
            assert torch.equal(found, exact)
        with unsharded_params(model):
            assert_kept(model)
        copied = copy.deepcopy(model)
        copied.unshard()
        assert_kept(copied)


@pytest.mark.behaviour("A-16", "D-01")
def test_a_subclass_of_parameter_keeps_its_class_and_its_packed_bytes() -> None:
    for storage in (torch.uint8, BF16, FP32):
        run_ranks(keep_packed, 2, storage)


class Gate(nn.Module):
    """Computes with its matrix and its scale in the dtypes that they have, and casts between them."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(64, 64, bias=False)
        self.scale = nn.Parameter(torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.matrix(x)
        return torch.sin(y.to(self.scale.dtype) * self.scale)


def original_of_vectors(parameter: nn.Parameter) -> torch.dtype | None:
    return parameter.dtype if parameter.ndim == 1 else None


def bf16_of_matrices(parameter: nn.Parameter) -> torch.dtype:
    return BF16 if parameter.ndim == 2 else FP32


OVERRIDES: dict[str, Any] = {
    "original or None": MixedPrecisionPolicy(BF16, FP32, param_dtype_override_fn=original_of_vectors),
    "original or param_dtype": MixedPrecisionPolicy(BF16, FP32, param_dtype_override_fn=bf16_of_matrices),
    "output": MixedPrecisionPolicy(BF16, FP32, BF16, param_dtype_override_fn=original_of_vectors),
}


def gradients_of_all_ranks(
    gate: Gate, batches: list[torch.Tensor], policy: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs, and the gradients of the parameters of the unsharded ``gate``, averaged over the ranks."""
    outputs, sums = [], [torch.zeros(()), torch.zeros(())]  # of the scale and of the matrix
    for x in batches:
        scale, weight = gate.scale.detach().requires_grad_(), gate.matrix.weight.detach().to(BF16).requires_grad_()
        output = torch.func.functional_call(gate, {"scale": scale, "matrix.weight": weight}, (x.to(BF16),))
        output = output.to(policy.output_dtype or output.dtype)
        outputs.append(output.detach())
        gradients = torch.autograd.grad(output.float().square().mean(), (scale, weight))
        sums = [total + gradient.float() for total, gradient in zip(sums, gradients, strict=True)]
    return outputs, [total / len(batches) for total in sums]


@pytest.mark.behaviour("D-01")
@pytest.mark.parametrize(
    ("case", "mode"), [*((case, "call") for case in OVERRIDES), ("output", "policy"), ("original or None", "copy")]
)
@on_ranks(2, environment=SOCKETS)
def test_parameters_in_their_original_dtype_share_messages_and_train_as_the_unsharded_model(
    case: str, mode: str
) -> None:
    torch.manual_seed(0)
    policy, rank = OVERRIDES[case], dist.get_rank()
    asked: list[torch.Size] = []

    def answer(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(parameter.shape)
        return policy.param_dtype_override_fn(parameter)

    counting = dataclasses.replace(policy, param_dtype_override_fn=answer)
    reference = Gate()
    model: Any = nn.Sequential(copy.deepcopy(reference), nn.Identity())
    if mode == "policy":
        fully_shard(model, policy={Gate}, mp_policy=counting)
    else:
        fully_shard(model[0], mp_policy=counting)
        fully_shard(model)
    if mode == "copy":
        model = copy.deepcopy(model)
    gate = model[0]
    assert [p.dtype for p in model.parameters()] == [FP32, FP32], "shards keep their dtype"
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (reference, model)]
    for step in range(3):
        batches = [torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        expected, gradients = gradients_of_all_ranks(reference, batches, policy)
        with counted_collectives() as counts:
            output = model(batches[rank])
            output.float().square().mean().backward()
        assert (counts["all_gather"], counts["reduce_scatter"]) == (2, 1), str(counts)
        assert output.dtype == expected[rank].dtype
        assert torch.equal(output, expected[rank])
        for sharded, parameter, gradient in zip(gate.parameters(), reference.parameters(), gradients, strict=True):
            assert torch.equal(sharded.grad.full_tensor(), gradient)
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    gate.unshard()
    assert (gate.matrix.weight.dtype, gate.scale.dtype) == (BF16, FP32)
    assert sorted(asked) == [(64,), (64, 64)], "each parameter once"
    gate.reshard()
    other: Any = fully_shard(Gate(), mp_policy=policy)
    other.load_state_dict(gate.state_dict())
    for a, b in zip(gate.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())


def shard_with_other_answers() -> None:
    def function(parameter: nn.Parameter) -> torch.dtype | None:
        return original_of_vectors(parameter) if dist.get_rank() == 0 else None

    policy = MixedPrecisionPolicy(BF16, FP32, param_dtype_override_fn=function)
    fully_shard(Gate(), mp_policy=policy)(torch.randn(4, 64))


def test_ranks_whose_functions_answer_differently_are_told_the_parameter() -> None:
    with pytest.raises(RanksError, match=r"(?s)DivergenceError: .*'scale'.*param_dtype=torch\.(bfloat16|float32)"):
        run_ranks(shard_with_other_answers, 2, environment=SOCKETS)
