"""Test all-gather extensions: tensor subclasses that choose the tensors to send."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from composable_fsdp import CommunicationPolicy, Int8, MixedPrecisionPolicy, fully_shard
from composable_fsdp.errors import ParameterError
from tests._internals import Collective, ExtendedBucket, state_of
from tests.helpers.extension_tensors import Pair, Scaled, batch_of, calls, with_weights
from tests.helpers.model_parallel import PAIRS, Pairs, named_mesh, parallelize_pairs
from tests.helpers.models import seeded, shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import expected_shard
from tests.helpers.sharding import sharded as fsdp

STEPS = 5


def build(width: int) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))


def sharded(model: Any, **options: Any) -> Any:
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def gather_value(parameter: Any) -> torch.Tensor:
    """Return the full value of a sharded parameter. Its local tensor may be a ``Pair``."""
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
    # Both halves of a pair get the step, so the learning rate of a half is half as large.
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
        torch.testing.assert_close(gather_value(p), q.detach(), msg=f"{name}, width {width}, {reshard}")


@pytest.mark.behaviour("E-01", "E-03", "E-04", "E-05")
@pytest.mark.parametrize("world_size", [1, 4])
def test_a_two_tensor_subclass_trains_with_parity(world_size: int) -> None:
    for width in (8, 7, 3):
        for reshard in (True, False, None):
            run_ranks(train_pairs, world_size, width, reshard)


@pytest.mark.behaviour("E-02", "E-03")
@on_ranks(2)
def test_hooks_get_the_documented_arguments_and_build_the_tensor_once() -> None:
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
    assert local.dtype == torch.float32


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
    kinds = [isinstance(b, ExtendedBucket) for b in state_of(model[0]).group.buckets]
    assert sorted(kinds) == [False, True]  # one bucket of the bias and one of the weight


def _like(sharded_parameter: Any, full: torch.Tensor) -> Any:
    return distribute_tensor(full.detach(), sharded_parameter.device_mesh, sharded_parameter.placements)


@pytest.mark.behaviour("E-04", "E-06", "E-07")
@pytest.mark.parametrize("world_size", [1, 4])
def test_hooks_on_local_tensors_quantize_uneven_rows_and_scales(world_size: int) -> None:
    for width, mixed in ((8, False), (7, False), (3, True)):
        run_ranks(patch_after_to_empty, world_size, width, mixed)


@pytest.mark.behaviour("E-07")
@on_ranks(2)
def test_all_packed_tensors_of_a_group_share_one_message() -> None:
    model: Any = with_weights(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, dtype=torch.bfloat16)), Pair)
    fully_shard(model)
    group = state_of(model).group
    sent: list[int] = []
    original = group.process_groups[0].gather.launch

    def counting(kind: Any, transfers: Any, label: str = "", *op: Any) -> Any:
        if kind is Collective.ALL_GATHER and not label.startswith("comparison of"):
            sent.append(len(transfers))
        return original(kind, transfers, label, *op)

    group.process_groups[0].gather.launch = counting  # type: ignore[assignment,method-assign]
    model.unshard()
    assert len(group.buckets) == 3
    assert sent == [1]


asked: list[tuple[DeviceMesh, tuple[int, ...], tuple[int, ...]]] = []
"""The mesh, outer size and outer strides that the hooks received."""


class Watched(Pair):
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> Any:
        asked.append((mesh, tuple(outer_size), tuple(outer_stride)))
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


def parallel_weights(model: nn.Module) -> dict[str, DTensor]:
    found = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor) and p.ndim == 2}
    return {name: p for name, p in found.items() if "layers" in name}


def make_pairs(model: nn.Module) -> None:
    for name, weight in parallel_weights(model).items():
        half = weight.to_local().detach() / 2
        local: Any = Watched(half, half.clone())
        placed = DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(placed))


def assert_gradients(model: nn.Module, reference: nn.Module, what: str) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        gradient: Any = p.grad
        torch.testing.assert_close({f"{name}, {what}": gradient.full_tensor()}, {f"{name}, {what}": q.grad})


def compare_gradients(model: nn.Module, reference: nn.Module, rank: int, step: int, what: str) -> None:
    """Run one forward and backward on data-parallel rank ``rank`` of two and compare the gradients."""
    loss = PAIRS.loss(model, PAIRS.batch_of(step, rank))
    losses = [PAIRS.loss(reference, PAIRS.batch_of(step, other)) for other in range(2)]
    torch.testing.assert_close(loss, losses[rank], msg=lambda text: f"{what}: {text}")
    loss.backward()
    torch.stack(losses).mean().backward()
    assert_gradients(model, reference, what)


@pytest.mark.behaviour("A-06", "E-01", "E-02", "E-03", "E-05", "E-07")
@on_ranks(4)
def test_hooks_with_tensor_parallelism_get_the_shard_axis_and_the_local_shard() -> None:
    mesh = named_mesh(dp=2, tp=2)
    rank, tp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    for reshard in (True, False, None):
        asked.clear()
        model, reference = PAIRS.build(), PAIRS.build()
        parallelize_pairs(model, mesh["tp"])
        make_pairs(model)
        shard_layers(model, fully_shard, mesh=mesh["dp"], reshard_after_forward=reshard)
        halves = [p for p in model.parameters() if isinstance(getattr(p, "_local_tensor", None), Pair)]
        assert len(halves) == 4
        others = [p for p in model.parameters() if all(p is not half for half in halves)]
        optimizer = torch.optim.SGD([{"params": halves, "lr": 0.05}, {"params": others, "lr": 0.1}], foreach=False)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(STEPS):
            compare_gradients(model, reference, rank, step, f"{reshard}, step {step}")
            for each in (optimizer, plain):
                each.step()
                each.zero_grad()
        assert all(each is mesh["dp"] or each == mesh["dp"] for each, _, _ in asked)
        assert {each.ndim for each, _, _ in asked} == {1}
        up, down = (7, 5), (5, 7)  # sizes in the first layer; those in the second layer are (1, 5) and (5, 1)
        parts = [expected_shard(torch.empty(up), tp_rank, 2, 0), expected_shard(torch.empty(down), tp_rank, 2, 1)]
        parts += [torch.empty(1 - tp_rank, 5), torch.empty(5, 1 - tp_rank)]
        assert {size for _, size, _ in asked} == {tuple(part.shape) for part in parts}
        assert {stride for _, size, stride in asked if size == parts[0].shape} == {(5, 1)}


def round_by_row(part: torch.Tensor) -> torch.Tensor:
    scale = part.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return (part / scale).round() * scale


@pytest.mark.behaviour("A-06", "E-03", "E-06", "E-07")
@on_ranks(4)
def test_hooks_on_local_tensors_compose_with_tensor_parallelism() -> None:
    """Train with scales for the rows of each rank's part, which has all columns or a slice of them."""
    mesh = named_mesh(dp=2, tp=2)
    for reshard in (True, False):
        model, reference = seeded(Pairs, hidden=(7, 3))(), seeded(Pairs, hidden=(7, 3))()
        parallelize_pairs(model, mesh["tp"])
        shard_layers(model, fully_shard, mesh=mesh["dp"], reshard_after_forward=reshard)
        names = parallel_weights(model)
        for weight in names.values():
            Scaled(cast(Any, weight)._local_tensor).hang_on()
        assert len(names) == 4
        for name in names:
            dim = 1 if "down" in name else 0
            value = reference.get_parameter(name).data
            value.copy_(torch.cat([round_by_row(part) for part in value.chunk(2, dim)], dim))
        for step in range(2):  # the second step fills the full tensors again
            model.zero_grad()
            reference.zero_grad()
            compare_gradients(model, reference, mesh.get_local_rank("dp"), step, f"{reshard}, step {step}")


@pytest.mark.behaviour("A-06", "E-08")
@on_ranks(4)
def test_codecs_beside_tensor_parallelism() -> None:
    """Check that each tensor-parallel rank encodes its own part and that replicated parameters stay equal."""
    mesh = named_mesh(dp=2, tp=2)
    for reshard in (True, False):
        model, reference = PAIRS.build(), PAIRS.build()
        parallelize_pairs(model, mesh["tp"])
        policy = CommunicationPolicy(all_gather=Int8(), min_numel=1)
        shard_layers(model, fully_shard, mesh=mesh["dp"], reshard_after_forward=reshard, comm_policy=policy)
        exact = {name: p.detach().clone() for name, p in reference.named_parameters()}
        modules = [*model.get_submodule("layers").children(), model]
        for module in modules:
            fsdp(module).unshard()
        for name, p in model.named_parameters():
            is_cut = "up" in name or "down.weight" in name
            assert_alike(getattr(p, "_local_tensor", p), mesh if not is_cut else mesh["dp"], name)
            decoded = p.full_tensor() if isinstance(p, DTensor) else p
            largest = max(value.abs().max() for value in exact.values())
            assert (decoded - exact[name]).abs().max() <= largest / 254 * 1.01, name
            if name in ("layers.0.up.weight", "layers.0.down.weight", "head.weight"):
                assert not torch.equal(decoded, exact[name]), name
            reference.get_parameter(name).data.copy_(decoded.detach())
        for module in modules:
            fsdp(module).reshard()
        for step in range(2):
            model.zero_grad()
            reference.zero_grad()
            compare_gradients(model, reference, mesh.get_local_rank("dp"), step, f"{reshard}, step {step}")


def assert_alike(local: Any, mesh: DeviceMesh, name: str) -> None:
    for axis in mesh.mesh_dim_names or ():
        copies = [torch.empty_like(local) for _ in range(mesh[axis].size())]
        dist.all_gather(copies, local.detach().contiguous(), group=mesh.get_group(axis))
        assert torch.equal(copies[0], copies[1]), f"{name} differs along {axis}"


class OnlyPre(Pair):
    fsdp_post_all_gather = property()


@pytest.mark.behaviour("E-01", "E-02", "E-04")
@on_ranks(2)
def test_invalid_hooks_are_errors_on_every_rank() -> None:
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

    class AllGatherInput(NamedTuple):  # as torch.distributed.fsdp.experimental has it
        tensor: torch.Tensor
        dim: int

    class Records(Pair):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            return (AllGatherInput(torch.ones(2), 0),), None

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
    with pytest.raises(ParameterError, match=r"'weight' must return \(tuple of tensors, metadata\), not tensor"):
        wrong(torch.ones(1, 2))
    with pytest.raises(ParameterError, match=r"not \(\(AllGatherInput.*return its tensor, and rearrange"):
        fully_shard(linear(Records))(torch.ones(1, 2))
