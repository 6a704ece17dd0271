"""Test that ``Muon`` on sharded parameters is bitwise torch's Muon and AdamW on the unsharded model."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from composable_fsdp import CommunicationPolicy, CPUOffloadPolicy, Int8, Muon, clip_grad_norm_, fully_shard
from composable_fsdp.checkpoint import load, save
from tests._internals import Exchange
from tests.helpers.model_parallel import PAIRS, named_mesh, sharded_pairs
from tests.helpers.models import seeded
from tests.helpers.run_ranks import on_ranks, run_ranks
from tests.helpers.sharding import assert_exact, full_value
from tests.helpers.simulated_offload import simulated_offload

LR, DECAY = 0.02, 0.1


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(11, 3 * 9)
        self.out = nn.Linear(27, 13)
        self.experts = nn.Parameter(torch.randn(3, 13, 7) * 0.2)
        self.head = nn.Linear(7, 2, bias=False)
        self.frozen = nn.Linear(11, 11)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.out(torch.tanh(self.qkv(self.frozen(x)))))
        return self.head(torch.einsum("bi,eij->bj", x, self.experts))


build = seeded(Mixed)


MATRICES: dict[str, Any] = {"qkv.weight": True, "experts": range(3), "out.weight": True, "unused": True}


def matrices(name: str, parameter: torch.Tensor) -> Any:
    """Return the indices of the matrices: experts are cut into each of them. The head is AdamW's."""
    return MATRICES.get(name)


def muon(model: nn.Module, **options: Any) -> Muon:
    groups = [
        {"params": [(n, p) for n, p in model.named_parameters() if (n in MATRICES) == is_muon], "algorithm": algorithm}
        for algorithm, is_muon in (("muon", True), ("adamw", False))
    ]
    return Muon(groups, lr=LR, weight_decay=DECAY, **options)


class Reference:
    """The unsharded model with torch's optimizers, a parameter for each matrix that ``matrices`` cuts out."""

    def __init__(self, model: nn.Module, cut: Callable[[str, torch.Tensor], Any], **options: Any) -> None:
        self.model, self.cuts = model, dict[str, Any]()
        self.parts: dict[str, list[nn.Parameter]] = {}
        for name, p in model.named_parameters():
            cuts = cut(name, p)
            self.cuts[name] = [...] if cuts is True else list(cuts or ())
            self.parts[name] = [nn.Parameter(p.detach()[index].clone()) for index in self.cuts[name]]
        self.others = [p for name, p in model.named_parameters() if not self.parts[name]]
        all_parts = [part for parts in self.parts.values() for part in parts]
        self.optimizers: list[Optimizer] = [torch.optim.Muon(all_parts, lr=LR, weight_decay=DECAY, **options)]
        if self.others:
            self.optimizers.append(torch.optim.AdamW(self.others, lr=LR, weight_decay=DECAY))

    def step(self, gradients: dict[str, torch.Tensor | None]) -> None:
        for name, p in self.model.named_parameters():
            p.grad = gradients[name]
            for index, part in zip(self.cuts[name], self.parts[name], strict=True):
                part.grad = None if p.grad is None else p.grad[index].clone()
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                for index, part in zip(self.cuts[name], self.parts[name], strict=True):
                    p[index] = part


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else full_value(p.grad) for n, p in model.named_parameters()}


def assert_same(model: nn.Module, reference: nn.Module, what: str) -> None:
    for (name, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_exact(full_value(p), expected.detach(), f"{what} {name}")


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randn(4, 11, generator=generator)).square().mean().backward()


@contextmanager
def counted(calls: list[int]) -> Iterator[None]:
    original = dist.all_to_all_single

    def counting(output: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append(output.numel())
        return original(output, *args, **options)

    with mock.patch.object(dist, "all_to_all_single", counting):
        yield


def most_bytes(exchange: Exchange) -> int:
    """Return the most bytes of messages that live at once: while a bucket is computed, and while its results leave."""
    most, buckets = 0, exchange.buckets
    for index, bucket in enumerate(buckets):
        before = buckets[index - 1] if index else None
        after = buckets[index + 1] if index + 1 < len(buckets) else None
        returning = before.results.nbytes + before.updates.nbytes if before else 0
        ahead = after.shards.nbytes + after.owned.nbytes if after else 0
        most = max(most, returning + bucket.owned.nbytes + bucket.results.nbytes + ahead)
    return most


def exchanges_of(optimizer: Muon) -> list[Exchange]:
    return [exchange for exchange, _ in optimizer._plans._exchanges]


def compare(shape: tuple[int, ...], bucket_bytes: int, options: dict[str, Any]) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", shape)
    model, reference = build(), Reference(build(), matrices, **options)
    for name in ("qkv", "out", ""):
        fully_shard(model.get_submodule(name), mesh=mesh)
    optimizer = muon(model, bucket_bytes=bucket_bytes, **options)
    calls: list[int] = []
    for step in range(3):
        backward(model, step)
        if step == 1:
            model.get_parameter("out.weight").grad = None
        reference.step(gradients_of(model))
        calls.clear()
        with counted(calls):
            optimizer.step()
        optimizer.zero_grad()
        assert_same(model, reference.model, f"step {step}")
    (exchange,) = exchanges_of(optimizer)
    largest = max(unit.largest for unit in exchange.units)
    assert len(calls) == (2 * len(exchange.buckets) if dist.get_world_size() > 1 else 0)
    assert most_bytes(exchange) <= 2 * max(bucket_bytes, 3 * largest * exchange.copies)
    for p in model.parameters():
        if p in optimizer.state:
            momentum = next(v for k, v in optimizer.state[p].items() if k in ("momentum_buffer", "exp_avg"))
            assert (momentum.placements, momentum.shape) == (p.placements, p.shape)
    return len(exchange.buckets), exchange.copies


@pytest.mark.behaviour("C-01", "C-05")
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_are_bitwise_those_of_the_unsharded_model(ranks: int) -> None:
    assert run_ranks(compare, ranks, (ranks,), 1 << 20, {}) == [(1, 1)] * ranks
    for buckets, _ in run_ranks(compare, ranks, (ranks,), 512, {"nesterov": False, "ns_steps": 3, "momentum": 0.5}):
        assert buckets > 1


@pytest.mark.behaviour("C-02")
def test_replicas_share_the_work_or_compute_it_alone_with_the_same_bits() -> None:
    assert run_ranks(compare, 4, (2, 2), 1 << 20, {"adjust_lr_fn": "match_rms_adamw"}) == [(1, 2)] * 4
    assert {copies for _, copies in run_ranks(compare, 4, (2, 2), 64, {})} == {1}
    assert run_ranks(compare, 4, (4, 1), 1 << 20, {}) == [(1, 4)] * 4


@pytest.mark.behaviour("C-02")
@on_ranks(4)
def test_tensor_parallel_matrices_that_no_rank_has_whole_rows_of() -> None:
    mesh = named_mesh(dp=2, tp=2)
    model = sharded_pairs(mesh)
    reference = Reference(PAIRS.build(), lambda name, p: p.ndim == 2)
    optimizer = Muon(model.parameters(), lr=LR, weight_decay=DECAY)
    for step in range(3):
        PAIRS.loss(model, PAIRS.batch_of(step, mesh.get_local_rank("dp"))).backward()
        reference.step(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
        assert_same(model, reference.model, f"step {step}")
    assert sorted(len(e.members.coordinates) for e in exchanges_of(optimizer)) == [2, 4]


@pytest.mark.behaviour("D-02", "E-08", "E-09")
@on_ranks(2)
def test_codecs_and_offload_change_nothing_in_the_step() -> None:
    with simulated_offload():
        model, reference = build(), Reference(build(), matrices)
        fully_shard(
            model,
            offload_policy=CPUOffloadPolicy(pin_memory=False),
            comm_policy=CommunicationPolicy(all_gather=Int8(), reduce_scatter=Int8(), min_numel=1),
        )
        optimizer = muon(model)
        for step in range(2):
            backward(model, step)
            reference.step(gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()
            assert_same(model, reference.model, f"step {step}")


@pytest.mark.behaviour("C-11")
@on_ranks(2)
def test_clipping_schedulers_scalers_and_averages() -> None:
    model, reference = build(), Reference(build(), matrices)
    fully_shard(model)
    optimizer = muon(model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, *reference.optimizers)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    averaged = AveragedModel(model)
    before = values(model)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 11, generator=generator) * (float("inf") if step == 1 else 1)
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        gradients = gradients_of(model)
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            reference.step(gradients)
        for scheduler in schedulers:
            scheduler.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        assert_same(model, reference.model, f"step {step}")
    assert {group["lr"] for group in optimizer.param_groups} == {LR / 8}
    assert not torch.equal(values(averaged.module)["experts"], before["experts"])


def make(values: int = 7) -> tuple[nn.Module, Muon]:
    model = seeded(Mixed)() if values == 7 else Mixed()
    fully_shard(model)
    return model, muon(model, bucket_bytes=700)


def set_gradients(model: nn.Module, step: int) -> None:
    """Set gradients that depend on the step only, so that any number of ranks trains alike."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        if p.requires_grad:
            full = torch.randn(p.shape, generator=generator)
            p.grad = full if not isinstance(p, DTensor) else _shard_like(p, full)


def _shard_like(p: DTensor, full: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(full, p.device_mesh, p.placements)


def train(steps: Iterable[int], model: nn.Module, optimizer: Muon) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full_value(p) for name, p in model.named_parameters()}


def train_and_be_killed(folder: Path) -> None:
    model, optimizer = make()
    train(range(2), model, optimizer)
    save(folder, model, optimizer, step=2)
    set_gradients(model, 2)
    if dist.get_rank() == 0:  # the others wait for it in the step
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()


def resume(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_world_size())
    model, optimizer = make(values=0)
    load(folder, model, optimizer)
    train(range(2, 4), model, optimizer)
    return values(model)


def train_alone() -> dict[str, torch.Tensor]:
    model, optimizer = make()
    train(range(4), model, optimizer)
    return values(model)


@pytest.mark.behaviour("F-07")
def test_a_killed_run_resumes_from_its_checkpoint_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    (expected,) = run_ranks(train_alone, 1)
    with pytest.raises(Exception, match="rank 0"):
        run_ranks(train_and_be_killed, 2, tmp_path, timeout=30)
    for ranks in (2, 4):
        for found in run_ranks(resume, ranks, tmp_path):
            for name, value in found.items():
                assert_exact(value, expected[name], f"{ranks} ranks, {name}")


@pytest.mark.behaviour("F-08")
@on_ranks(2)
def test_momentum_that_is_loaded_whole_is_placed_as_its_parameter() -> None:
    (model, optimizer), (other, loaded) = make(), make()
    train(range(1), model, optimizer)
    train(range(1), other, loaded)
    state = copy.deepcopy(optimizer.state_dict())
    for kept in state["state"].values():
        if "momentum_buffer" in kept:
            kept["momentum_buffer"] = kept["momentum_buffer"].full_tensor()
    loaded.load_state_dict(state)
    train(range(1, 3), model, optimizer)
    train(range(1, 3), other, loaded)
    for name, value in values(model).items():
        assert torch.equal(values(other)[name], value), name
