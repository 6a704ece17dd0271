"""Test tensor-parallel parameters: the placement of their shards, and training compared with the plain model.

Ranks of one tensor-parallel group get the same data, data-parallel ranks different data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as peer
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard
from torch.testing import assert_close
from torch.torch_version import TorchVersion

from composable_fsdp import (
    CommunicationPolicy,
    DataParallelMeshDims,
    Int8,
    MixedPrecisionPolicy,
    fully_shard,
    get_total_norm,
    no_sync,
)
from composable_fsdp.errors import MeshError
from tests.helpers.model_parallel import (
    DECODER,
    PAIRS,
    Pairs,
    assert_cut,
    assert_trains_like,
    cut_pairs,
    named_mesh,
    parallelize_decoder,
    parallelize_pairs,
    play,
)
from tests.helpers.models import seeded, shard_layers
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, values_of
from tests.helpers.training import OPTIMIZERS, Run, assert_equal_runs, train


def sharded_pairs(mesh: DeviceMesh, *data: str, build: Callable[[], nn.Module] = PAIRS.build, **options: object) -> Any:
    model = build()
    parallelize_pairs(model, mesh["tp"])
    return shard_layers(model, fully_shard, mesh=mesh[data], **options)


def train_pairs(dp: int, tp: int) -> None:
    mesh = named_mesh(dp=dp, tp=tp)
    for reshard, optimizer in [(True, "adam-foreach"), (False, "sgd"), (None, "adamw-fused")]:
        model, reference = sharded_pairs(mesh, "dp", reshard_after_forward=reshard), PAIRS.build()
        cuts = {name: [*cut, ("dp", 0)] for name, cut in cut_pairs(reference).items()}
        assert_cut(model, values_of(reference), mesh, cuts)
        up, down, head = (model.get_parameter(f"{n}.weight") for n in ("layers.0.up", "layers.0.down", "head"))
        assert up.placements == (Shard(0) if tp == 1 else _StridedShard(0, split_factor=tp), Shard(0))
        assert down.placements == (Shard(0), Shard(1))
        assert up.device_mesh.mesh_dim_names == down.device_mesh.mesh_dim_names == ("dp", "tp")
        assert head.placements == (Shard(0),)
        assert head.device_mesh == mesh["dp"]
        what = f"{reshard}, {optimizer}"
        rank = mesh.get_local_rank("dp")
        assert_trains_like(model, reference, rank, dp, play(PAIRS), OPTIMIZERS[optimizer], what=what, steps=3)


@pytest.mark.behaviour("A-06", "C-02", "C-03")
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)])
def test_column_and_row_wise_parallel_layers_of_uneven_sizes_train_with_parity(dp: int, tp: int) -> None:
    run_ranks(train_pairs, dp * tp, dp, tp)


@pytest.mark.behaviour("A-06", "A-07", "C-02")
@on_ranks(4)
def test_a_hybrid_mesh_with_tensor_parallelism_trains_with_parity() -> None:
    for replicate, shard in [(2, 1), (1, 2)]:
        mesh = named_mesh(replicate=replicate, shard=shard, tp=2)
        model, reference = sharded_pairs(mesh, "replicate", "shard"), PAIRS.build()
        cuts = {name: [*cut, ("shard", 0)] for name, cut in cut_pairs(reference).items()}
        assert_cut(model, values_of(reference), mesh, cuts)
        up = model.get_parameter("layers.0.up.weight")
        assert up.placements == (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
        rank = mesh.get_local_rank("replicate" if replicate == 2 else "shard")
        assert_trains_like(model, reference, rank, 2, play(PAIRS), what=f"{replicate}x{shard}", steps=3)


def last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(-1)


@pytest.mark.behaviour("A-05", "A-06")
@on_ranks(4)
def test_a_tensor_parallel_parameter_may_be_sharded_on_another_dim() -> None:
    mesh = named_mesh(dp=2, tp=2)
    model, reference = sharded_pairs(mesh, "dp", shard_placement_fn=last_dim), PAIRS.build()
    dims = {name: value.ndim - 1 for name, value in values_of(reference).items()}
    cuts = {name: [*cut, ("dp", dims[name])] for name, cut in cut_pairs(reference).items()}
    assert_cut(model, values_of(reference), mesh, cuts)
    down = model.get_parameter("layers.0.down.weight")
    assert down.placements == (_StridedShard(1, split_factor=2), Shard(1))
    assert_trains_like(model, reference, mesh.get_local_rank("dp"), 2, play(PAIRS))


@pytest.mark.behaviour("A-05", "A-06", "C-01")
@on_ranks(4)
def test_uneven_tensor_parallel_parameters_can_be_gathered_from_fewer_ranks_in_backward() -> None:
    """Gather from a smaller mesh in backward. The registered parameters do not change in between."""
    mesh = named_mesh(dp=4, tp=1)
    build = seeded(Pairs, hidden=(7, 3))
    for placement in (None, last_dim):
        model = sharded_pairs(mesh, "dp", build=build, reshard_after_forward=2, shard_placement_fn=placement)
        values, rank = values_of(model), mesh.get_local_rank("dp")
        loss = PAIRS.loss(model, PAIRS.batch_of(0, rank))
        for name, value in values_of(model).items():
            assert_exact(value, values[name], f"{name} between forward and backward")
        loss.backward()
        model.zero_grad()
        assert_trains_like(model, build(), rank, 4, play(PAIRS), what=f"{placement}", steps=3)


@pytest.mark.behaviour("C-02", "C-13", "C-16")
@on_ranks(4)
def test_partial_gradients_of_sequence_parallelism_are_summed_with_and_without_checkpointing() -> None:
    mesh, seen = named_mesh(dp=2, tp=2), set[object]()
    rank = mesh.get_local_rank("dp")
    for checkpointed in ("", "inside", "outside"):
        model, reference = DECODER.build(), DECODER.build()
        parallelize_decoder(model, mesh["tp"])
        for each, data_mesh in ((model, mesh["dp"]), (reference, None)):
            layers = each.get_submodule("layers")
            for name, layer in list(layers.named_children()):
                if checkpointed == "inside" and data_mesh is not None:
                    fully_shard(layer, mesh=data_mesh)
                if checkpointed:  # also on the reference, so that the names are equal
                    setattr(layers, name, checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT))
                if checkpointed != "inside" and data_mesh is not None:
                    fully_shard(layers.get_submodule(name), mesh=data_mesh)
        fully_shard(model, mesh=mesh["dp"])

        def watchdog(module: nn.Module, _: object) -> None:
            module.get_parameter("weight").register_hook(lambda gradient: seen.update(gradient.placements))

        model.get_submodule("norm").register_forward_pre_hook(watchdog)
        assert_trains_like(model, reference, rank, 2, play(DECODER), what=f"checkpointing {checkpointed}", steps=3)
    assert Partial() in seen, "no gradient was partial, so the test checks nothing"


class Summed(nn.Module):
    """Has a parameter replicated over tensor-parallel ranks, whose gradient is a pending sum over these ranks."""

    def __init__(self, tensor_mesh: DeviceMesh, placements: list[Placement]) -> None:
        super().__init__()
        self.pending = [Partial() if name == "tp" else Replicate() for name in tensor_mesh.mesh_dim_names or ()]
        self.weight = nn.Parameter(distribute_tensor(torch.zeros(64), tensor_mesh, placements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return (weight.to_local(grad_placements=self.pending) * x).sum()


class Beside(Summed):
    def __init__(self, tensor_mesh: DeviceMesh, placements: list[Placement]) -> None:
        super().__init__(tensor_mesh, placements)
        self.plain = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.plain.sum()


@pytest.mark.behaviour("C-02", "C-16", "D-01", "J-02")
@on_ranks(4)
def test_pending_sums_over_tensor_parallel_ranks_are_made_in_the_reduce_dtype() -> None:
    """Add 256 from one tensor-parallel rank and 1 from the other: 257 in float32, 256 in bfloat16."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    flat, hybrid = named_mesh(dp=2, tp=2), named_mesh(replicate=2, shard=1, tp=2)

    def check(what: str, model: Any, expected: float = 257.0, rtol: float = 0.0) -> None:
        gradient = model.get_parameter("weight").grad
        assert gradient.dtype is torch.float32
        assert_close(
            gradient.full_tensor(), torch.full((64,), expected), rtol=rtol, atol=0, msg=lambda m: f"{what}: {m}"
        )

    x = torch.full((64,), 1.0 if flat.get_local_rank("tp") else 256.0)
    model: Any = fully_shard(Beside(flat["tp"], [Replicate()]), mesh=flat["dp"], mp_policy=policy)
    model(x).backward()
    check("beside a plain parameter", model)
    model = fully_shard(Summed(flat["tp"], [Replicate()]), mesh=flat["dp"], mp_policy=policy)
    model(x).backward()
    check("alone", model)
    model.zero_grad()
    with no_sync(model):
        model(x).backward()
    model(x).backward()
    check("accumulated", model, 514.0)
    model = fully_shard(Summed(hybrid["tp"], [Replicate()]), mesh=hybrid["replicate", "shard"], mp_policy=policy)
    model(x).backward()
    check("hybrid", model)
    dims = DataParallelMeshDims(shard="dp")
    model = fully_shard(Summed(flat, [Replicate(), Replicate()]), mesh=flat, dp_mesh_dims=dims, mp_policy=policy)
    model(x).backward()
    check("full mesh", model)
    encoded = CommunicationPolicy(reduce_scatter=Int8(), min_numel=0)
    model = Summed(flat["tp"], [Replicate()])
    fully_shard(model, mesh=flat["dp"], mp_policy=policy, comm_policy=encoded)
    model(x).backward()
    check("encoded", model, rtol=1e-5)

    theirs: Any = peer.fully_shard(Summed(flat["tp"], [Replicate()]), mesh=flat["dp"], mp_policy=as_torch(policy))
    theirs(x).backward()
    check("torch's FSDP2", theirs, 256.0 if TorchVersion(torch.__version__) < "2.15" else 257.0)

    gradient = DTensor.from_local(x.bfloat16(), flat["tp"], [Partial()], run_check=False)
    assert_close(get_total_norm(gradient), torch.tensor(257.0 * 8))


def as_torch(policy: MixedPrecisionPolicy) -> peer.MixedPrecisionPolicy:
    """Return the dtypes of ``policy`` as torch's own policy, which has no ``grad_dtype`` yet."""
    return peer.MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype)


@pytest.mark.behaviour("A-06", "C-02", "D-01")
@on_ranks(4)
def test_placements_and_training_are_bitwise_those_of_torch() -> None:
    """Compare with torch's FSDP2. It requires even sizes if a dim other than the first is sharded twice."""
    mesh = named_mesh(dp=2, tp=2)
    rank = mesh.get_local_rank("dp")
    policies = [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)]
    for ours in policies:
        runs: list[Run] = []
        for shard, policy in ((fully_shard, ours), (peer.fully_shard, as_torch(ours))):
            model: Any = seeded(Pairs, width=5, hidden=(8, 4))()
            parallelize_pairs(model, mesh["tp"])
            shard_layers(model, shard, mesh=mesh["dp"], mp_policy=policy)
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            runs.append(train(model, play(PAIRS), OPTIMIZERS["adamw-foreach"], ranks=[rank], watched=rank))
        parameters: list[Any] = [run.parameters for run in runs]
        for name, parameter in parameters[0].items():
            other = parameters[1][name]
            assert parameter.placements == other.placements, name
            assert parameter.device_mesh == other.device_mesh, name
        assert_equal_runs(runs[0], runs[1], what=f"{ours}", exact=True)


@pytest.mark.behaviour("A-06", "F-01", "F-03", "F-04")
@on_ranks(4)
def test_state_dicts_of_tensor_parallel_models_hold_and_restore_the_trained_values() -> None:
    mesh = named_mesh(dp=2, tp=2)
    model, rank = sharded_pairs(mesh, "dp"), mesh.get_local_rank("dp")
    run = assert_trains_like(model, PAIRS.build(), rank, 2, play(PAIRS), what="before saving")
    trained = run.parameters

    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert list(state) == list(PAIRS.build().state_dict())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert full.keys() == state.keys()
    for name, value in trained.items():
        assert_exact(state[name].full_tensor(), value, f"state dict: {name}")
        plain = full[name]
        assert type(plain) is torch.Tensor
        assert_exact(plain, value, f"full state dict: {name}")

    for assign in (False, True):
        other = sharded_pairs(mesh, "dp")
        assert not torch.equal(values_of(other)["layers.0.up.weight"], trained["layers.0.up.weight"])
        other.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)
        check_loaded(other, trained, rank)


def check_loaded(model: nn.Module, values: dict[str, torch.Tensor], rank: int) -> None:
    for name, value in values_of(model).items():
        assert_exact(value, values[name], f"loaded {name}")
    plain = PAIRS.build()
    plain.load_state_dict(values)
    batch = PAIRS.batch_of(9, rank)
    assert_close(PAIRS.loss(model, batch), PAIRS.loss(plain, batch))


@pytest.mark.behaviour("A-06")
@on_ranks(4)
def test_meshes_that_share_an_axis_are_refused() -> None:
    mesh, other = named_mesh(dp=2, tp=2), named_mesh(dp=2, tp=2)
    for data, tensor in ((mesh["dp"], mesh["dp"]), (mesh["dp"], mesh), (mesh["dp"], other["dp"]), (other, mesh["tp"])):
        model = nn.Linear(3, 4)
        weight = nn.Parameter(distribute_tensor(model.weight.detach(), tensor, [Replicate()] * tensor.ndim))
        model.weight = weight
        with pytest.raises(MeshError, match=r"(?s)slices of one mesh.*mesh\['dp'\] and mesh\['tp'\].*Got .* and "):
            fully_shard(model, mesh=data)
        assert type(model) is nn.Linear
        assert model.weight is weight
