"""Rows about gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp import clip_grad_norm_
from tests.helpers.comparison.rows import Library, batch, compare_gradients, row, seeded

SECTION = "Gradients"


class Branches(nn.Module):
    """A trunk, and a branch that runs on request."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.branch = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        x = self.trunk(x)
        return self.branch(x) + x if branch else x


def is_ours(library: Library) -> bool:
    return bool(library.__name__ == "composable_fsdp")


@row(
    "`set_gradient_divide_factor(3.0)` on gloo, 2 ranks",
    torch="backward raises: gloo has no premultiplied sum",
    torch_reports=r"RuntimeError: .*PREMUL_SUM",
    here="divides after the sum where the backend cannot premultiply",
    reason="The setter's meaning does not depend on the backend.",
)
def divides_on_gloo(library: Library, mesh: DeviceMesh) -> str:
    ratio = _ratio_to_the_sum(library, mesh, 3.0, force_sum=False)
    return "right" if math.isclose(ratio, 1 / 3, rel_tol=1e-6) else "wrong"


@row(
    "`set_gradient_divide_factor(2.0)` with `set_force_sum_reduction_for_comms(True)`, on one rank",
    torch="divides twice",
    torch_reports=r"^0\.25 times the sum$",
    here="divides once",
    our_reports=r"^0\.5 times the sum$",
    reason="A factor of 2 divides by 2 on any number of ranks.",
    ranks=1,
)
def divides_on_one_rank(library: Library, mesh: DeviceMesh) -> str:
    return f"{_ratio_to_the_sum(library, mesh, 2.0, force_sum=True):g} times the sum"


def _ratio_to_the_sum(library: Library, mesh: DeviceMesh, factor: float, *, force_sum: bool) -> float:
    model: Any = library.fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)
    model.set_gradient_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(force_sum)
    model(torch.full((1, 4), 8.0)).sum().backward()
    ratio = model.weight.grad.full_tensor() / (8.0 * dist.get_world_size())
    return float(ratio.unique().item())


@row(
    "`register_hook` on a sharded parameter",
    torch="the hook never fires",
    torch_reports=r"^0 calls \| 0 calls$",
    here="the hook gets the reduced gradient, and may replace it",
    our_reports=r"^1 calls \| 1 calls$",
    reason="`register_hook` on an unsharded parameter fires.",
)
def hook_on_a_sharded_parameter(library: Library, mesh: DeviceMesh) -> str:
    model = library.fully_shard(nn.Linear(4, 4), mesh=mesh)
    seen: list[torch.Tensor] = []
    model.weight.register_hook(seen.append)
    model(torch.ones(2, 4)).sum().backward()
    return f"{len(seen)} calls"


@row(
    "`reset_iter_state()` before the first forward",
    torch="`AttributeError`",
    torch_reports=r"AttributeError",
    here="does nothing",
    reason="A program that recovers from errors may call it at any time.",
)
def reset_before_the_first_forward(library: Library, mesh: DeviceMesh) -> str:
    library.fully_shard(nn.Linear(4, 4), mesh=mesh).reset_iter_state()
    return "right"


@row(
    "`model.zero_grad()` in an accumulation under `set_requires_gradient_sync(False)`",
    torch="keeps the accumulated gradients; torch 2.15 documents that `zero_grad()` leaves pending ones as they are",
    torch_reports=r"^wrong: gradient of trunk.weight",
    here="drops them; `optimizer.zero_grad()` cannot, since the `grad` of the sharded parameters is `None`",
    reason="`zero_grad` zeroes all gradients of an unsharded model.",
)
def zero_grad_in_an_accumulation(library: Library, mesh: DeviceMesh) -> str:
    rank = dist.get_rank()
    model = library.fully_shard(seeded(Branches), mesh=mesh)
    model.set_requires_gradient_sync(False)
    model(100 * batch(5, rank)).sum().backward()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model(batch(0, rank)).sum().backward()
    return compare_gradients(model, seeded(Branches), lambda m, r: m(batch(0, r)).sum())


@row(
    "A parameter without rows gets a gradient",
    torch="backward raises in `_chunk_cat`",
    torch_reports=r"RuntimeError: .*_chunk_cat expects non-empty tensor",
    here="trains",
    reason="A gradient without elements needs no reduction.",
)
def parameter_without_rows(library: Library, mesh: DeviceMesh) -> str:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.empty = nn.Parameter(torch.ones(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).sum() + self.empty.sum()

    model = library.fully_shard(Model(), mesh=mesh)
    model(torch.ones(2, 4)).backward()
    return "right" if model.empty.grad.shape == (0, 4) else "wrong"


@row(
    "Ranks use different parameters of one group",
    torch="message sizes differ between ranks: gloo aborts the process, or ranks hang",
    torch_reports=r"died of SIGABRT",
    here="message sizes never differ; all ranks get the same gradient",
    reason="Routed models (experts, multi-task heads) choose parameters by their data.",
)
def ranks_use_different_parameters(library: Library, mesh: DeviceMesh) -> str:
    rank = dist.get_rank()
    model = library.fully_shard(seeded(Branches), mesh=mesh)
    model(batch(0, rank), branch=rank == 0).sum().backward()
    return compare_gradients(model, seeded(Branches), lambda m, r: m(batch(0, r), branch=r == 0).sum())


@row(
    "`clip_grad_norm_` with `norm_type=inf` where a rank has an empty shard",
    torch="raises on the rank with the empty shard; the others hang",
    torch_reports=r"Timed out|Connection closed",
    here="`composable_fsdp.clip_grad_norm_` gives the norm of the full gradient on every rank",
    reason="A bias with fewer elements than ranks has empty shards.",
)
def infinite_norm_of_an_empty_shard(library: Library, mesh: DeviceMesh) -> str:
    model = library.fully_shard(nn.Linear(4, 1, bias=False), mesh=mesh)
    model(torch.full((1, 4), 2.0)).sum().backward()
    clip: Any = clip_grad_norm_ if is_ours(library) else torch.nn.utils.clip_grad_norm_
    norm = clip(model.parameters(), 1.0, norm_type=float("inf"))
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return "right" if norm.item() == 2.0 else f"wrong: {norm.item()}"


@row(
    "`clip_grad_norm_` over parameters on different meshes",
    torch="raises",
    torch_reports=r"RuntimeError",
    here="`composable_fsdp.clip_grad_norm_` gives one norm",
    reason="Experts and dense layers have different meshes.",
)
def norm_over_two_meshes(library: Library, mesh: DeviceMesh) -> str:
    other = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, its_mesh in zip(model, (mesh, other), strict=True):
        library.fully_shard(layer, mesh=its_mesh)
        layer(torch.full((1, 4), 2.0)).sum().backward()
    clip: Any = clip_grad_norm_ if is_ours(library) else torch.nn.utils.clip_grad_norm_
    norm = clip(model.parameters(), 1.0)
    return "right" if abs(float(norm) - 32**0.5 * 2) < 1e-5 else f"wrong: {norm}"


@row(
    "Trainable parameters of one group have two dtypes",
    torch="an assertion about uniform dtypes, at the first forward",
    torch_reports=r"AssertionError: FSDP expects uniform original parameter dtype",
    here="each dtype has its own messages in the group",
    reason="Adapters and norms in fp32 beside bf16 weights are common.",
)
def two_dtypes_in_a_group(library: Library, mesh: DeviceMesh) -> str:
    class TwoDtypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single, self.double_ = nn.Linear(6, 6), nn.Linear(6, 6, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.double_(self.single(x).double())
            return out.sum()

    model, reference = seeded(TwoDtypes), seeded(TwoDtypes)
    library.fully_shard(model, mesh=mesh)
    model(batch(0, dist.get_rank())).backward()
    return compare_gradients(model, reference, lambda m, r: m(batch(0, r)))


@row(
    "A module's output is a view, and is changed in place before the loss",
    torch="the hook of the output is lost: backward computes with freed parameters",
    torch_reports=r"RuntimeError|wrong",
    here="the gradient of the unsharded model",
    reason="`out[:, 0] += 1` is legal in autograd.",
)
def view_output_changed_in_place(library: Library, mesh: DeviceMesh) -> str:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second(torch.tanh(self.first(x)))
            return out.view(-1)

    def loss(m: nn.Module, rank: int) -> torch.Tensor:
        out = m(batch(0, rank))
        out += 1
        return out.square().sum()

    def build() -> nn.Module:
        return nn.Sequential(View())

    model, reference = seeded(build), seeded(build)
    library.fully_shard(model[0], mesh=mesh)
    library.fully_shard(model, mesh=mesh)
    loss(model, dist.get_rank()).backward()
    return compare_gradients(model, reference, loss)


@row(
    "A module is skipped by all ranks in its first step, with `set_reduce_scatter_unused_params(True)`",
    torch="`grad` is `None`; in later steps it is zeros",
    torch_reports=r"^none \| none$",
    here="`grad` is zeros in every step",
    our_reports=r"^zeros \| zeros$",
    reason="With the setting every trainable parameter has a gradient, so an optimizer treats all steps alike.",
    since="2.13",
)
def module_that_all_ranks_skip(library: Library, mesh: DeviceMesh) -> str:
    model = seeded(Branches)
    library.fully_shard(model.branch, mesh=mesh)
    library.fully_shard(model, mesh=mesh)
    model.set_reduce_scatter_unused_params(True)
    model(batch(0, dist.get_rank()), branch=False).sum().backward()
    gradient = model.branch.weight.grad
    if gradient is None:
        return "none"
    return "zeros" if not gradient.to_local().any() else "something else"


@row(
    "A weight is used three times in one forward, with `reduce_dtype=torch.bfloat16`: 256 + 1 + 1",
    torch="from 2.15 on each is cast to bf16 before they are summed: 256; as here before",
    torch_reports=r"^256 \| 256$",
    here="summed in fp32, in which the gradients were computed, then cast: 258",
    our_reports=r"^258 \| 258$",
    reason="`reduce_dtype` is the dtype of sums over ranks. Tied embeddings have two gradients.",
    since="2.15",
)
def three_uses_of_a_weight(library: Library, mesh: DeviceMesh) -> str:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, *inputs: float) -> torch.Tensor:
            return torch.stack([(self.weight * value).sum() for value in inputs]).sum()

    policy = library.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model: Any = library.fully_shard(Thrice(), mesh=mesh, mp_policy=policy)
    model(1.0, 1.0, 256.0).backward()
    return f"{model.weight.grad.to_local()[0].item():g}"


@row(
    "`nn.Embedding(sparse=True)`",
    torch="`NotImplementedError` about an operator of torch in backward, which names no parameter",
    torch_reports=r"^NotImplementedError: Could not run '(fsdp::chunk_cat|aten::as_strided)' with .* 'SparseCPU'",
    here="trains, with dense gradients",
    reason="A message has the elements of all parameters. `SparseAdam` refuses dense gradients.",
)
def sparse_embedding(library: Library, mesh: DeviceMesh) -> str:
    def build(*, sparse: bool) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(9, 6, sparse=sparse), nn.Linear(6, 2))

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        return model(torch.tensor([rank, 3, 3])).square().sum()

    model, reference = library.fully_shard(build(sparse=True), mesh=mesh), build(sparse=False)
    loss(model, dist.get_rank()).backward()
    return compare_gradients(model, reference, loss)


@row(
    "`loss.backward(inputs=[p])`, with `p` from a list that was made before the forward",
    torch="returns, and `p.grad` is `None`",
    torch_reports=r"^wrong: 0.weight has no gradient",
    here="`p.grad` is the gradient over all ranks, and no other parameter gets one",
    reason="The list may be that of an optimizer.",
)
def backward_at_listed_parameters(library: Library, mesh: DeviceMesh) -> str:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    model, reference = library.fully_shard(build(), mesh=mesh), build()
    listed = list(model.parameters())
    model(batch(0, dist.get_rank())).square().sum().backward(inputs=listed)
    return compare_gradients(model, reference, lambda m, r: m(batch(0, r)).square().sum())


@row(
    "`torch.autograd.grad(loss, p)`, with `p` from a list that was made before the forward",
    torch="`RuntimeError` that proposes `allow_unused=True`, which returns `None`",
    torch_reports=r"^RuntimeError: .*Set allow_unused=True",
    here="`ParameterError` that names the parameter and the ways that work",
    our_reports=r"^ParameterError: torch.autograd.grad was called at parameters '0.weight' of 'root'",
    reason="Modules compute with the unsharded parameters. Their gradients on one rank are not those of all ranks.",
)
def gradient_at_a_listed_parameter(library: Library, mesh: DeviceMesh) -> str:
    model = library.fully_shard(nn.Sequential(nn.Linear(6, 6)), mesh=mesh)
    listed = model[0].weight
    torch.autograd.grad(model(batch(0, dist.get_rank())).sum(), listed)
    return "a gradient"
