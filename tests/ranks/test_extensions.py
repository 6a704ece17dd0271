"""All-gather extensions: tensors that decide by themselves how they travel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp import MixedPrecisionPolicy, ParameterError, fully_shard
from composable_fsdp.runtime.extended import ExtendedBucket
from composable_fsdp.runtime.unit import unit_of
from composable_fsdp.testing import run_ranks
from tests.ranks._extensions import Pair, Scaled, calls, with_weights

STEPS = 5


def build(width: int) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(model: Any, **options: Any) -> Any:
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def whole(parameter: Any) -> torch.Tensor:
    """The value of a sharded parameter whose local tensor is a pair, or of any other."""
    local = parameter._local_tensor
    if not isinstance(local, Pair):
        plain: torch.Tensor = parameter.full_tensor().detach()
        return plain
    pieces: list[Any] = [None] * parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
    mine = (local.left + local.right).detach()
    dist.all_gather_object(pieces, mine, group=parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1))
    return torch.cat(pieces)


def train_pairs(width: int, reshard: bool | int | None, replicate: int = 1) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicate, world_size // replicate))
    reference = build(width)
    model = sharded(with_weights(copy.deepcopy(reference), Pair), mesh=mesh, reshard_after_forward=reshard)
    # A pair's halves both get the step, so that the sum moves by twice as much.
    halves = [p for p in model.parameters() if isinstance(p._local_tensor, Pair)]
    others = [p for p in model.parameters() if not isinstance(p._local_tensor, Pair)]
    optimizer = torch.optim.SGD([{"params": halves, "lr": 0.05}, {"params": others, "lr": 0.1}], foreach=False)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = model(batch_of(step, rank)).square().mean()
        expected = [reference(batch_of(step, other)).square().mean() for other in range(world_size)]
        torch.testing.assert_close(loss, expected[rank])
        loss.backward()
        torch.stack(expected).mean().backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q.detach(), msg=f"{name}, width {width}, {reshard}")


@pytest.mark.behaviour("E-01", "E-03", "E-04", "E-05")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_tensor_made_of_two_trains_with_parity(world_size: int) -> None:
    for width in (8, 7, 3):
        for reshard in (True, False, None):
            run_ranks(train_pairs, world_size, width, reshard)


@pytest.mark.behaviour("E-01", "E-05")
def test_a_tensor_made_of_two_trains_in_hybrid_sharding_and_from_a_smaller_mesh() -> None:
    run_ranks(train_pairs, 4, 7, None, 2)
    run_ranks(train_pairs, 4, 8, 2)
    run_ranks(train_pairs, 4, 7, 2)


def watch_hooks() -> None:
    calls.clear()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded(with_weights(build(8), Pair), mp_policy=policy)
    for step in range(2):
        model(batch_of(step, dist.get_rank())).sum().backward()
    first = [c for c in calls if "8, 6" in c or "post" in c]
    assert first[0] == "pre 1-d (8, 6) (6, 1) FSDPLinear"
    assert first[1] == "post makes torch.bfloat16"
    assert set(first[2:]) <= {"pre 1-d (8, 6) (6, 1) FSDPLinear", "post fills torch.bfloat16", first[1]}
    assert calls.count("post makes torch.bfloat16") == 2  # once for each parameter
    local: Any = model[0].weight._local_tensor
    assert isinstance(local, Pair)
    assert local.dtype == torch.float32


@pytest.mark.behaviour("E-02", "E-03")
def test_hooks_get_what_they_are_promised_and_make_the_tensor_once() -> None:
    run_ranks(watch_hooks, 2)


def patch_after_to_empty(width: int, mixed: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = build(width)
    with torch.device("meta"):
        model: Any = sharded(build(width))
    model.to_empty(device="cpu")
    model.load_state_dict(
        {n: _like(p, q) for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True)}
    )
    for layer in (model[0], model[2]) if not mixed else (model[0],):
        Scaled(layer.weight._local_tensor).hang_on()
    out = model(batch_of(0, rank))
    for layer in (0, 2) if not mixed else (0,):
        weight = reference.get_parameter(f"{layer}.weight").data
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        weight.copy_((weight / scale).round() * scale)
    torch.testing.assert_close(out, reference(batch_of(0, rank)))
    out.square().mean().backward()
    torch.stack([reference(batch_of(0, r)).square().mean() for r in range(world_size)]).mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    kinds = [isinstance(b, ExtendedBucket) for b in unit_of(model[0]).group.buckets]
    assert sorted(kinds) == [False, True]  # the bias beside the weight


def _like(sharded_parameter: Any, full: torch.Tensor) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.detach(), sharded_parameter.device_mesh, sharded_parameter.placements)


@pytest.mark.behaviour("E-04", "E-06", "E-07")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_hooks_hung_on_local_tensors_quantize_with_uneven_rows_and_scales(world_size: int) -> None:
    for width, mixed in ((8, False), (7, False), (3, True)):
        run_ranks(patch_after_to_empty, world_size, width, mixed)


def gather_mixed() -> None:
    """Plain fp32, plain bf16 and extended parameters of one group."""
    model: Any = with_weights(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, dtype=torch.bfloat16)), Pair)
    fully_shard(model)
    group = unit_of(model).group
    sent: list[int] = []
    original = group.channels[0].gather.all_gather

    def counting(transfers: Any) -> Any:
        sent.append(len(transfers))
        return original(transfers)

    group.channels[0].gather.all_gather = counting  # type: ignore[method-assign]
    model.unshard()
    assert len(group.buckets) == 3
    assert sent == [1]


@pytest.mark.behaviour("E-07")
def test_all_that_is_packed_in_a_group_shares_one_message() -> None:
    run_ranks(gather_mixed, 2)


class Padded(Pair):
    """Wants its shard as long as that of the first rank."""

    fsdp_pads_shards = True

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        calls.append(f"padded to {tuple(self.shape)}")
        return (self.left,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        (gathered,) = outputs
        calls.append(f"gathered {tuple(gathered.shape)}")
        full = gathered[:7] * 2
        if out is None:
            return full, (full,)
        out.copy_(full)
        return None


def pad() -> None:
    calls.clear()
    model: Any = nn.Linear(2, 7, bias=False)
    exact = model.weight.detach().clone()
    model.weight = nn.Parameter(Padded(exact / 2, exact / 2))
    fully_shard(model)
    model.unshard()
    rows = -(-7 // dist.get_world_size())
    assert calls == [f"padded to {(rows, 2)}", f"gathered {(rows * dist.get_world_size(), 2)}"]
    assert torch.equal(model.weight.detach(), exact)


@pytest.mark.behaviour("E-04")
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_class_that_wants_padded_shards_gets_them(world_size: int) -> None:
    run_ranks(pad, world_size)


# -- what makes no sense


class OnlyPre(Pair):
    fsdp_post_all_gather = property()


def refuse() -> None:
    half = torch.ones(4, 2)

    class Three(Pair):
        def fsdp_pre_all_gather(self, mesh: Any, one: Any, two: Any) -> Any:  # type: ignore[override]
            return (), None

    class Unfit(Pair):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            return (torch.ones(2, 2 + dist.get_rank()),), None

    class Wrong(Pair):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            return torch.ones(2)

    def linear(kind: Any) -> Any:
        module = nn.Linear(2, 4)
        module.weight = nn.Parameter(kind(half, half))
        return module

    with pytest.raises(ParameterError, match=r"'weight' .Three. takes 3 arguments beside self.*outer_stride, module"):
        fully_shard(linear(Three))
    with pytest.raises(ParameterError, match=r"'weight' \(OnlyPre\) defines fsdp_pre_all_gather but not fsdp_post_all"):
        fully_shard(linear(OnlyPre))
    unfit = fully_shard(linear(Unfit))
    with pytest.raises(ParameterError, match=r"'weight' returned inputs on some ranks that do not fit.*dim 0 only"):
        unfit(torch.ones(1, 2))
    wrong = fully_shard(linear(Wrong))
    with pytest.raises(ParameterError, match=r"'weight' must return \(tuple of tensors, metadata\), not Tensor"):
        wrong(torch.ones(1, 2))


@pytest.mark.behaviour("E-01", "E-02", "E-04")
def test_hooks_that_make_no_sense_are_errors_on_every_rank() -> None:
    run_ranks(refuse, 2)
