"""Test encoded gradients: the exact result on every rank, and the number of bytes sent."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from composable_fsdp import (
    Cast,
    CommunicationPolicy,
    CPUOffloadPolicy,
    ErrorFeedback,
    Float8,
    Int4,
    Int8,
    MixedPrecisionPolicy,
    fully_shard,
)
from composable_fsdp.trace import Operation, Recorder
from tests._internals import Collective, Encoder, GradientCodec, state_of
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.transports import SOCKETS

EXACT = Cast(torch.float32)
CODECS: tuple[GradientCodec, ...] = (
    *(EXACT, Cast(), Cast(torch.float16), Int8(), Int8(block=7), Int4(), Float8(per_row=True)),
    ErrorFeedback(Int8()),
)


def build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 5))


def batch_of(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(97 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    output: torch.Tensor = model(batch_of(rank, step))
    return output.float().square().mean()


def sharded(model: nn.Module, policy: CommunicationPolicy | None, **options: Any) -> Any:
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, comm_policy=policy, **options)
    return fully_shard(model, comm_policy=policy, **options)


def gradients_of(model: nn.Module, rank: int, step: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    loss_of(model, rank, step).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def split_into_rows(gradient: torch.Tensor, num_shards: int, dim: int) -> torch.Tensor:
    """Return the flattened pieces of all ranks, padded to the size of the first piece and to 16 bytes."""
    pieces = torch.chunk(gradient, num_shards, dim)
    rows = torch.zeros(num_shards, -(-pieces[0].numel() // 4) * 4)
    for rank, piece in enumerate(pieces):
        rows[rank, : piece.numel()] = piece.reshape(-1)
    return rows


def sum_encoded(codec: GradientCodec, per_rank: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    num_shards = len(per_rank)
    all_rows = [split_into_rows(gradient, num_shards, dim) for gradient in per_rank]
    if isinstance(codec, Float8):
        codec = codec.for_parameter(torch.chunk(per_rank[0], num_shards, dim)[0].shape)
    numel = all_rows[0].size(1)
    encoder = Encoder(codec, num_shards, numel)
    payloads = []
    for rows in all_rows:
        payloads.append(torch.empty(num_shards, encoder.row_bytes, dtype=torch.uint8))
        Encoder(codec, num_shards, numel).encode(rows, payloads[-1])
    out = []
    for shard, piece in enumerate(torch.chunk(per_rank[0], num_shards, dim)):
        total = torch.zeros(numel)
        encoder.decode_sum(torch.stack([payload[shard] for payload in payloads]), total)
        out.append((total / num_shards)[: piece.numel()].view(piece.shape))
    return torch.cat(out, dim)


def compare(codec: GradientCodec, dim: int, reduce_dtype: torch.dtype | None, reshard: bool | None) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    reference = build()
    model = sharded(
        copy.deepcopy(reference),
        CommunicationPolicy(reduce_scatter=codec, min_numel=100),
        shard_placement_fn=lambda p: Shard(dim if p.ndim == 2 else 0),
        mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        reshard_after_forward=reshard,
    )
    per_rank = [gradients_of(reference, r) for r in range(world_size)]
    results = []
    for _ in range(2):
        model.zero_grad()
        loss_of(model, rank).backward()
        results.append([p.grad.full_tensor() for p in model.parameters()])
        if isinstance(codec, ErrorFeedback):
            break  # the second step would add the residuals of the first one
    for k, actual in enumerate(results[0]):
        of_all = [gradients[k] for gradients in per_rank]
        is_small = actual.numel() < 100
        expected = sum_encoded(EXACT if is_small else codec, of_all, dim if actual.ndim == 2 else 0)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        for again in results[1:]:
            assert torch.equal(again[k], actual), "runs must be bitwise equal"


@pytest.mark.behaviour("E-09")
@on_ranks(2, 4)
def test_gradients_computed_in_16_bits_are_sent_in_16_bits_without_loss() -> None:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policies = (CommunicationPolicy(reduce_scatter=Cast(torch.bfloat16), min_numel=0), None)
    narrow, wide = (sharded(build(), policy, mp_policy=precision) for policy in policies)
    narrow_gradients, wide_gradients = (gradients_of(model, dist.get_rank()) for model in (narrow, wide))
    for in_16_bits, in_32_bits in zip(narrow_gradients, wide_gradients, strict=True):
        assert torch.equal(in_16_bits.to_local(), in_32_bits.to_local())  # type: ignore[attr-defined]


@pytest.mark.behaviour("E-09")
@on_ranks(4)
def test_gradients_are_the_sum_in_rank_order_of_what_each_rank_encoded_to_the_bit() -> None:
    for codec in CODECS:
        compare(codec, 0, None, None)
    compare(Int8(), 1, None, True)
    compare(Int4(), -1, torch.bfloat16, False)
    compare(EXACT, 0, torch.float16, True)


def compare_on_hybrid(policy: CommunicationPolicy, tolerance: float) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    reference = build()
    model = sharded(copy.deepcopy(reference), policy, mesh=mesh)
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        per_rank = [[g.clone() for g in gradients_of(reference, r, step)] for r in range(world_size)]
        for k, parameter in enumerate(model.parameters()):
            local = parameter.grad.to_local()
            copies = [torch.empty_like(local) for _ in range(2)]
            dist.all_gather(copies, local.contiguous(), group=mesh.get_group("replicate"))
            assert torch.equal(*copies), "replicas must be equal"
            full = parameter.grad.full_tensor()
            mean = torch.stack([gradients[k] for gradients in per_rank]).mean(0)
            error = ((full - mean).norm() / mean.norm()).item()
            assert error <= (tolerance if full.numel() >= 100 else 1e-6), (k, error)
            assert full.numel() < 100 or error > 0, "nothing was encoded"


@pytest.mark.behaviour("E-09")
def test_sums_of_encoded_gradients_are_reduced_over_the_replicate_axis() -> None:
    for codec, tolerance in ((Int8(), 0.03), (ErrorFeedback(Cast(torch.bfloat16)), 0.01)):
        run_ranks(compare_on_hybrid, 4, CommunicationPolicy(reduce_scatter=codec, min_numel=100), tolerance)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.maybe, self.never = (nn.Parameter(torch.randn(6, 5)) for _ in range(3))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = x @ self.always
        return y + x @ self.maybe if use else y


@pytest.mark.behaviour("E-09", "C-17")
@on_ranks(2, 4)
def test_ranks_agree_on_used_parameters_with_encoded_gradients() -> None:
    rank = dist.get_rank()
    model: Any = Sometimes()
    alone = copy.deepcopy(model)
    fully_shard(model, comm_policy=CommunicationPolicy(reduce_scatter=Int8(), min_numel=1))
    model(batch_of(rank), rank == 1).square().mean().backward()
    alone(batch_of(1), True).square().mean().backward()
    assert model.never.grad is None
    expected = alone.maybe.grad / dist.get_world_size()
    torch.testing.assert_close(model.maybe.grad.full_tensor(), expected, rtol=0.05, atol=expected.abs().max() / 100)
    model.zero_grad()
    model(batch_of(rank), False).square().mean().backward()
    assert model.maybe.grad is None


def train(options: dict[str, Any]) -> None:
    model = sharded(build(), CommunicationPolicy(Int8(), ErrorFeedback(Int8()), min_numel=100), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, losses = dist.get_rank(), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_of(model, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5, losses


@pytest.mark.behaviour("E-09")
def test_encoded_gradients_train_in_bf16_from_offloaded_shards_and_on_one_rank() -> None:
    run_ranks(train, 2, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)})
    run_ranks(train, 2, {"offload_policy": CPUOffloadPolicy()})
    run_ranks(train, 4, {"reshard_after_forward": 2})
    run_ranks(train, 1, {})


OVER_SHARDS = {
    Collective.ALL_GATHER: "all-gather",
    Collective.BARRIER: "all-gather",
    Collective.REDUCE_SCATTER: "reduce-scatter",
    Collective.ALL_TO_ALL: "reduce-scatter",
}


def count_bytes(policy: CommunicationPolicy | None, replicate: int) -> int:
    """Compare the bytes sent with those of the trace, and return their sum."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicate, world_size // replicate))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 70))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, comm_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, comm_policy=policy)
    model.set_schedule(max_fused_bytes=0)
    sent = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}

    def count(communicator: Any, directions: Mapping[Collective, str]) -> None:
        original, size = communicator.launch, communicator.size

        def counting(kind: Collective, transfers: Any, *args: Any) -> Any:
            largest = [max(transfer, key=torch.Tensor.numel) for transfer in transfers]
            weight = 2 if kind is Collective.ALL_REDUCE else 1
            for tensor in largest:
                sent[directions[kind]] += weight * tensor.nbytes * (size - 1) // size
            return original(kind, transfers, *args)

        communicator.launch = counting

    loss_of_model = model(torch.randn(4, 64)).square().mean()  # completes lazy initialization
    loss_of_model.backward()
    process_groups = [state_of(module).group.process_groups[0] for module in (model, model[0], model[2])]
    for communicator in {id(pgs.axes.shard): pgs.axes.shard for pgs in process_groups}.values():
        count(communicator, OVER_SHARDS)
    replicas = {id(pgs.replicate): pgs.replicate for pgs in process_groups}
    for communicator in replicas.values() if replicate > 1 else ():
        count(communicator, dict.fromkeys(Collective, "all-reduce"))
    with Recorder() as recorder:
        model(torch.randn(4, 64)).square().mean().backward()
    shards, told = int(mesh.size(1)), dict.fromkeys(OVER_SHARDS.values(), 0)
    for event in recorder:
        if event.operation in (Operation.UNSHARD, Operation.REDUCE):
            direction = "all-gather" if event.operation is Operation.UNSHARD else "reduce-scatter"
            told[direction] += event.bytes * (shards - 1) // shards
    assert told == {direction: sent[direction] for direction in told}
    return sum(sent.values())


@pytest.mark.behaviour("E-08", "E-09")
@pytest.mark.parametrize(("world_size", "replicate"), [(2, 1), (4, 2)])
def test_the_trace_counts_the_bytes_given_to_the_process_group(world_size: int, replicate: int) -> None:
    plain, *_ = run_ranks(count_bytes, world_size, None, replicate, environment=SOCKETS)
    policy = CommunicationPolicy(Int8(), ErrorFeedback(Int4()), min_numel=4000)
    assert max(run_ranks(count_bytes, world_size, policy, replicate, environment=SOCKETS)) < 0.45 * plain


@pytest.mark.behaviour("E-09")
@on_ranks(2)
def test_freezing_parameters_resets_residuals() -> None:
    """Check that freezing a parameter, which moves the others in the message, resets the residuals."""
    policy = CommunicationPolicy(reduce_scatter=ErrorFeedback(Int4()), min_numel=1)
    model = sharded(build(), policy)
    loss_of(model, dist.get_rank()).backward()
    model[0].weight.requires_grad_(False)
    model.zero_grad()
    loss_of(model, dist.get_rank(), 1).backward()
    assert model[0].weight.grad is None
    fresh = sharded(build(), policy)
    fresh[0].weight.requires_grad_(False)
    loss_of(fresh, dist.get_rank(), 1).backward()
    assert torch.equal(model[0].bias.grad.full_tensor(), fresh[0].bias.grad.full_tensor())


@pytest.mark.behaviour("J-03")
@on_ranks(2)
def test_a_step_by_hand_that_keeps_gradients_is_not_undone() -> None:
    model = sharded(build(), CommunicationPolicy(reduce_scatter=ErrorFeedback(Int4()), min_numel=1))
    for step in range(3):
        loss_of(model, dist.get_rank(), step).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.1)
                p.grad.zero_()
    bucket: Any = state_of(model[0]).group.buckets[0]
    before = bucket.reducer.own.encoder._residual.clone()
    loss_of(model, dist.get_rank(), 3).backward()
    next(model[-1].parameters()).requires_grad_(False)  # no step
    model.reset_iter_state()
    assert torch.equal(bucket.reducer.own.encoder._residual, before)


@pytest.mark.behaviour("E-09", "A-07")
@on_ranks(4)
def test_replicated_parameters_on_tensor_parallel_ranks_get_equal_gradients() -> None:
    """Check that gradients of tensor-parallel copies are not rounded together with those of shards."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], comm_policy=CommunicationPolicy(reduce_scatter=Int4(), min_numel=1))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))
    model(x).square().mean().backward()
    bias = model[1].bias.grad.to_local()
    others = [torch.empty_like(bias) for _ in range(2)]
    dist.all_gather(others, bias.contiguous(), group=mesh.get_group("tp"))
    assert torch.equal(*others)
    kinds: Any = {p.name: b.plan.reduce_kind for b in state_of(model).group.buckets for p in b.parameters}
    codecs = {name: kind.codec for name, kind in kinds.items()}
    assert codecs == {"0.weight": Int4(), "0.bias": Int4(), "1.weight": Int4(), "1.bias": EXACT}
