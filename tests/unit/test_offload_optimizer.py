"""Optimizer state that rests in files, on one rank: bits, memory, state dicts, and what happens when a disk fails."""

from __future__ import annotations

import copy
import errno
import gc
import mmap
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from composable_fsdp import (
    Muon,
    fully_shard,
    local_optimizer,
    offload_optimizer,
    owner_step,
    reload_optimizer,
)
from composable_fsdp.checkpoint import load, save
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, StorageError
from tests._internals import optimizer_offloads
from tests.helpers.sharding import assert_exact, full_value, single_rank

BUCKET = 3000
"""Bytes of a bucket: some parameters share one, and some are larger."""


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    with single_rank():
        yield


def build(*, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 3)).to(dtype)
    model.frozen = nn.Linear(5, 5).requires_grad_(False)
    return fully_shard(model)


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        if p.requires_grad:
            value = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = torch.zeros_like(p)
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            local.copy_(value)


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(4)) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of all parameters, and of all tensors of the state."""
    found = {name: full_value(p).clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for path, value in pytree.tree_flatten_with_path(dict(optimizer.state.get(p, {})))[0]:
            key = f"{name}{pytree.keystr(path)}"
            found[key] = full_value(value).clone() if isinstance(value, torch.Tensor) else value
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert_exact(found[name], value, name)
        else:
            assert found[name] == value, name


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    "adamw-foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "adamw-fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, amsgrad=True),
    "adamw-local": lambda m: local_optimizer(torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "rprop": lambda m: local_optimizer(torch.optim.Rprop(m.parameters(), lr=0.1)),
    "muon": lambda m: Muon(m.named_parameters(), lr=0.1),
    "adafactor": lambda m: owner_step(torch.optim.Adafactor(m.parameters(), lr=0.1)),
}


@pytest.mark.behaviour("C-01", "D-02")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_offloaded_state_gives_the_bits_of_the_plain_step(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    expected, model = build(dtype=dtype), build(dtype=dtype)
    plain = OPTIMIZERS[kind](expected)
    optimizer = offload_optimizer(OPTIMIZERS[kind](model), tmp_path, bucket_bytes=BUCKET)
    for step in range(5):
        for each, of in ((expected, plain), (model, optimizer)):
            train(each, of, range(step, step + 1))
        assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))
    assert os.listdir(tmp_path) == []


def buckets_of(optimizer: Optimizer) -> Any:
    return optimizer_offloads[optimizer]._buckets


def rests_of(optimizer: Optimizer) -> list[Any]:
    return [bucket.rest for bucket in buckets_of(optimizer) if bucket.rest is not None]


def squares(count: int, numel: int = 64) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(count))


def test_buckets_are_cut_by_the_bytes_of_their_state(tmp_path: Path) -> None:
    model = squares(12)
    optimizer = offload_optimizer(torch.optim.Adam(model, amsgrad=True), tmp_path, bucket_bytes=2048)
    train(model, optimizer)
    assert [bucket.nbytes for bucket in buckets_of(optimizer)] == [1536] * 6  # two parameters each, not four


# -- memory


@pytest.mark.behaviour("C-03", "D-02")
@pytest.mark.parametrize("kind", ["adamw", "muon", "adafactor"])
def test_a_bucket_of_whole_matrices_has_one_for_each_rank(kind: str, tmp_path: Path) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    model = fully_shard(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(32)), nn.Embedding(640, 64)))
    *weights, table = model.parameters()
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": [table], "algorithm": "adamw"}]
    if kind == "muon":
        optimizer: Optimizer = Muon(groups)
    elif kind == "adamw":
        optimizer = torch.optim.AdamW(groups)
    else:
        optimizer = owner_step(torch.optim.Adafactor(weights))
    offload_optimizer(optimizer, tmp_path, bucket_bytes=1)
    fewest = 1 if kind == "adamw" else 8
    assert [len(bucket.members) for bucket in buckets_of(optimizer)[:4]] == [fewest] * 4


def test_a_step_on_the_host_copies_no_state(tmp_path: Path) -> None:
    model, seen = squares(16, 1 << 14), list[int]()  # 128 KiB of state each
    rests: list[Any] = []

    class Watched(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            mapped = {rest.flat.untyped_storage().data_ptr() for rest in rests}
            storages = [v.untyped_storage() for entry in self.state.values() for v in entry.values() if v.ndim]
            seen.append(sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in mapped}.values()))
            return cast(Any, torch.optim.AdamW).step.__wrapped__(self, closure)

    optimizer = offload_optimizer(Watched(model), tmp_path, bucket_bytes=1 << 18)
    train(model, optimizer, range(1))
    rests += rests_of(optimizer)
    seen.clear()
    train(model, optimizer, range(3))
    assert seen == [0] * 8 * 3  # all state is in the mappings of the files
    assert optimizer_offloads[optimizer]._slots == {}
    files = {rest.flat.untyped_storage().data_ptr() for rest in rests}
    at_rest = {v.untyped_storage().data_ptr() for entry in optimizer.state.values() for v in entry.values() if v.ndim}
    assert at_rest == files


MEASURE_MEMORY = """
import sys, torch
from torch import nn
from composable_fsdp import offload_optimizer

MIB = 1 << 20

def resident():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return sum(int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile"))

class Watched(torch.optim.AdamW):
    most = 0
    def step(self, closure=None):
        torch.optim.AdamW.step.__wrapped__(self, closure)
        Watched.most = max(Watched.most, resident())

parameters = [nn.Parameter(torch.ones(MIB // 4)) for _ in range(64)]  # 1 MiB each, 128 MiB of state
for p in parameters:
    p.grad = torch.ones_like(p)
torch.optim.AdamW([nn.Parameter(torch.ones(4))], fused=True).step()
before = resident()
optimizer = offload_optimizer(Watched(parameters, fused=True), sys.argv[1], bucket_bytes=8 * MIB)
optimizer.step()
first, Watched.most = Watched.most, 0
optimizer.step()
optimizer.step()
print((first - before) / MIB, (Watched.most - before) / MIB)
"""


class Replacing(Optimizer):
    """Has a new tensor as state after each step. ``alive`` counts at each update those of the update before."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.alive.append(sum(each() is not None for each in self.made))
        self.made.clear()
        for parameter in self.param_groups[0]["params"]:
            new = self.state[parameter].get("sum", 0) + parameter.grad
            self.state[parameter] = {"sum": new}
            self.made.append(weakref.ref(new))


def test_replaced_state_is_freed_before_the_next_update(tmp_path: Path) -> None:
    model = squares(5)
    optimizer = offload_optimizer(Replacing(model), tmp_path, bucket_bytes=256)
    train(model, optimizer, range(3))
    assert optimizer.alive == [0] * 5 * 3


def test_the_system_counts_two_buckets_of_memory(tmp_path: Path) -> None:
    # glibc would keep some memory of freed tensors otherwise.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", MEASURE_MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    first, later = map(float, done.stdout.split())
    assert 7 < first < 2 * 8 + 8  # MiB, of 128: the new state of a bucket, and its copy
    assert 7 < later < 2 * 8 + 8  # the pages of the bucket that is stepped, and of the next one


def test_files_are_read_ahead_into_the_page_cache_only(tmp_path: Path) -> None:
    model = squares(4, 1 << 18)  # 2 MiB of state each
    optimizer = offload_optimizer(torch.optim.AdamW(model), tmp_path, bucket_bytes=8 << 20)
    train(model, optimizer, range(1))
    (rest,) = rests_of(optimizer)
    is_cached, pages = offload_optimizer.__globals__["_is_cached"], rest.flat.split(mmap.PAGESIZE)
    os.fsync(rest._file.fileno())
    os.posix_fadvise(rest._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(rest.flat):
        pytest.skip("the file system of temporary files is in memory")
    before = resident_pages()
    rest.read_ahead()
    assert all(map(is_cached, pages))
    assert resident_pages() - before < len(pages) // 2


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_kept_bytes_stay_and_the_rest_moves(tmp_path: Path) -> None:
    model, expected = squares(8), squares(8)  # 512 bytes of state each
    plain = torch.optim.AdamW(expected)
    optimizer = offload_optimizer(torch.optim.AdamW(model), tmp_path, bucket_bytes=1024, keep_bytes=1600)
    train(expected, plain)
    train(model, optimizer)
    assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))
    assert len(rests_of(optimizer)) == 3  # of five parameters, after three that are kept
    files = {rest.flat.untyped_storage().data_ptr() for rest in rests_of(optimizer)}
    in_files = [optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() in files for p in model]
    assert in_files == [False] * 3 + [True] * 5
    optimizer.load_state_dict(plain.state_dict())
    assert len(rests_of(optimizer)) == 3
    assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))


def test_a_reloaded_optimizer_has_its_state_in_memory(tmp_path: Path) -> None:
    expected, model = build(), build()
    plain = OPTIMIZERS["adamw"](expected)
    optimizer = offload_optimizer(OPTIMIZERS["adamw"](model), tmp_path, bucket_bytes=BUCKET)
    train(expected, plain)
    train(model, optimizer, range(2))
    files = [weakref.ref(rest) for rest in rests_of(optimizer)]
    assert reload_optimizer(optimizer) is optimizer
    gc.collect()
    assert [file() for file in files] == [None] * len(files)
    assert rests_of(optimizer) == []
    train(model, optimizer, range(2, 4))
    assert rests_of(optimizer) == []
    assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))


def test_an_offloaded_optimizer_is_freed_with_its_files(tmp_path: Path) -> None:
    model = build()
    optimizer = offload_optimizer(OPTIMIZERS["adamw"](model), tmp_path)
    train(model, optimizer, range(2))
    objects = [weakref.ref(optimizer), *(weakref.ref(rest) for rest in rests_of(optimizer))]
    gc.disable()
    try:
        del optimizer
        assert [each() for each in objects] == [None] * 2
    finally:
        gc.enable()


def test_state_of_parameters_in_host_memory_stays_there() -> None:
    expected, model = build(), build()
    plain = OPTIMIZERS["adamw"](expected)
    optimizer = offload_optimizer(OPTIMIZERS["adamw"](model), "cpu")
    train(expected, plain)
    train(model, optimizer)
    assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))
    assert buckets_of(optimizer) == []


# -- what other code sees


class Counting(Optimizer):
    """Counts calls in its groups, and keeps nested state, numbers, and a new tensor in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            group["last"] = group.get("last", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["calls"] = state.get("calls", 0) + 1
                    state["sum"] = state.get("sum", 0) + parameter.grad
                    state.setdefault("nested", {"list": [torch.zeros(2, 3).T, "text"]})["list"][0].add_(1)
                    parameter.sub_(state["sum"], alpha=group["lr"] * scale)


def test_settings_and_state_of_any_form_are_those_of_one_step(tmp_path: Path) -> None:
    expected, model = squares(7), squares(7)
    optimizers = []
    for each in (expected, model):
        groups = [{"params": list(each)[:4]}, {"params": list(each)[4:], "lr": 0.25}]
        optimizers.append(Counting(groups))
    plain, optimizer = optimizers
    offload_optimizer(optimizer, tmp_path, bucket_bytes=600)
    for step in range(3):
        for each, of in ((expected, plain), (model, optimizer)):
            set_gradients(each, step)
            of.step(scale=0.5)
        assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))
    for group, other in zip(optimizer.param_groups, plain.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
    nested = optimizer.state[model[6]]["nested"]["list"]
    assert nested[0].tolist() == [[3, 3]] * 3
    assert nested[0].stride() == (1, 3)
    assert nested[1] == "text"


def test_hooks_closures_and_schedulers_see_one_step(tmp_path: Path) -> None:
    expected, model = build(), build()
    calls: list[tuple[str, int]] = []
    optimizers = [OPTIMIZERS["adamw-local"](expected), OPTIMIZERS["adamw-local"](model)]
    offload_optimizer(optimizers[1], tmp_path, bucket_bytes=BUCKET)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda o, *_: calls.append(("before", len(o.param_groups[0]["params"]))))
        optimizer.register_step_post_hook(lambda o, *_: calls.append(("after", len(o.param_groups[0]["params"]))))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    seen = []
    for each, optimizer, scheduler in zip((expected, model), optimizers, schedulers, strict=True):
        calls.clear()
        for step in range(2):

            def closure(each: nn.Module = each, optimizer: Optimizer = optimizer, step: int = step) -> float:
                optimizer.zero_grad()
                set_gradients(each, step)
                calls.append(("closure", torch.is_grad_enabled()))
                return 3.5

            assert optimizer.step(closure) == 3.5
            scheduler.step()
        seen.append(list(calls))
    assert seen[0] == seen[1]
    assert_same(tensors_of(model, optimizers[1]), tensors_of(expected, optimizers[0]))


def test_changes_by_others_between_steps_are_followed(tmp_path: Path) -> None:
    """Write to state in place, replace it, delete it, add parameters, and load a state dict around the hooks."""
    pairs = []
    for offload in (False, True):
        model = build()
        optimizer = OPTIMIZERS["adamw"](model)
        if offload:
            offload_optimizer(optimizer, tmp_path, bucket_bytes=BUCKET)
        train(model, optimizer, range(2))
        first, second, third = [p for p in model.parameters() if p.requires_grad][:3]
        optimizer.state[first]["exp_avg"].mul_(2)
        optimizer.state[second]["exp_avg_sq"] = torch.ones_like(second, requires_grad=False)
        del optimizer.state[third]
        train(model, optimizer, range(2, 3))
        model.added = nn.Parameter(torch.ones(3, 4))
        optimizer.add_param_group({"params": [model.added], "lr": 0.25})
        train(model, optimizer, range(3, 5))
        pairs.append((model, optimizer))
    (expected, plain), (model, optimizer) = pairs
    assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))


def test_a_failed_update_leaves_all_state_at_rest(tmp_path: Path) -> None:
    model, expected = squares(6), squares(6)
    plain, optimizer = torch.optim.AdamW(expected), torch.optim.AdamW(model)
    offload_optimizer(optimizer, tmp_path, bucket_bytes=1024)
    train(expected, plain, range(2))
    train(model, optimizer, range(2))
    set_gradients(model, 2)
    model[3].grad = torch.ones(64).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [6]
    files = {rest.flat.untyped_storage().data_ptr() for rest in rests_of(optimizer)}
    assert {optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() for p in model} == files
    set_gradients(expected, 2)
    for p in list(expected)[2:]:
        p.grad = None
    plain.step()
    for step in range(2, 4):
        for each, of in ((expected, plain), (model, optimizer)):
            set_gradients(each, step)
            for p in list(each)[:2] if step == 2 else ():
                p.grad = None
            of.step()
    found, wanted = tensors_of(model, optimizer), tensors_of(expected, plain)
    assert_same({k: v for k, v in found.items() if k[0] in "0145"}, {k: v for k, v in wanted.items() if k[0] in "0145"})


# -- state dicts


@pytest.mark.behaviour("F-07", "F-08")
@pytest.mark.parametrize("kind", ["adamw", "adamw-fused", "muon", "adafactor"])
def test_state_dicts_and_checkpoints_are_those_of_the_plain_optimizer(kind: str, tmp_path: Path) -> None:
    expected, model = build(), build()
    plain = OPTIMIZERS[kind](expected)
    optimizer = offload_optimizer(OPTIMIZERS[kind](model), tmp_path / "state", bucket_bytes=BUCKET)
    train(expected, plain, range(2))
    train(model, optimizer, range(2))
    save(tmp_path / "run", model, optimizer, step=2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    sharded = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    train(expected, plain, range(2, 4))
    wanted = tensors_of(expected, plain)
    train(model, optimizer, range(2, 4))
    assert_same(tensors_of(model, optimizer), wanted)

    def load_ours(new: nn.Module, into: Optimizer) -> None:
        load(tmp_path / "run", new, into)

    def load_file(new: nn.Module, into: Optimizer) -> None:
        saved = torch.load(tmp_path / "file.pt", weights_only=False)
        new.load_state_dict(saved["model"])
        into.load_state_dict(saved["optimizer"])

    def load_torchs(new: nn.Module, into: Optimizer) -> None:
        load(tmp_path / "run", new)
        set_optimizer_state_dict(new, into, copy.deepcopy(sharded))

    for load_into in (load_ours, load_file, load_torchs):
        fresh = build()
        into_fresh = offload_optimizer(OPTIMIZERS[kind](fresh), tmp_path / "state", bucket_bytes=BUCKET)
        for each, into in ((fresh, into_fresh), (model, optimizer)):  # also into one that has state
            load_into(each, into)
            assert all(rest is not None for rest in (bucket.rest for bucket in buckets_of(into)[:1]))
            train(each, into, range(2, 4))
            assert_same(tensors_of(each, into), wanted)


def test_loading_copies_nothing_to_the_device_and_nothing_is_shared(tmp_path: Path) -> None:
    model, other = squares(3), squares(3)
    plain = torch.optim.AdamW(other)
    train(other, plain)
    optimizer = offload_optimizer(torch.optim.AdamW(model), tmp_path)
    seen: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.extend(state["state"][0].values()))
    saved = plain.state_dict()
    optimizer.load_state_dict(saved)
    assert not any(isinstance(value, torch.Tensor) and value.ndim for value in seen)
    assert all(v.ndim == 0 or isinstance(v, torch.Tensor) for v in saved["state"][0].values())
    before = plain.state[other[0]]["exp_avg"].clone()
    optimizer.state[model[0]]["exp_avg"].zero_()
    assert_exact(plain.state[other[0]]["exp_avg"], before, "the loaded state dict")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_a_copy_is_an_ordinary_optimizer_with_the_same_state(copied: Callable[[Any], Any], tmp_path: Path) -> None:
    model = squares(5)
    optimizer = offload_optimizer(torch.optim.AdamW(model), tmp_path, bucket_bytes=1024)
    train(model, optimizer, range(2))
    other = copied(optimizer)
    assert other not in optimizer_offloads
    parameters = other.param_groups[0]["params"]
    for p, q in zip(model, parameters, strict=True):
        assert_exact(other.state[q]["exp_avg"], optimizer.state[p]["exp_avg"].clone(), "exp_avg")
        q.grad = torch.ones_like(q)
    other.step()
    train(model, optimizer, range(2, 3))


# -- disks that are full, and files that are damaged


def fail_writes(after: int) -> Any:
    """Have the disk full after ``after`` bytes, in the middle of a bucket."""
    written = 0
    original = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        nonlocal written
        room = min(len(data), after - written)
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += room
        return original(fd, data[:room], offset)

    return mock.patch.object(os, "pwrite", pwrite)


@pytest.mark.behaviour("H-05")
@pytest.mark.parametrize("after", [0, 700, 2100])
def test_a_full_disk_keeps_the_state_in_memory(after: int, tmp_path: Path) -> None:
    model, expected = squares(8), squares(8)
    plain, optimizer = torch.optim.AdamW(expected), torch.optim.AdamW(model)
    folder = tmp_path / "state"
    offload_optimizer(optimizer, folder, bucket_bytes=1024)
    train(expected, plain, range(5))
    text = rf"\d file\(s\) of optimizer state in '{folder}' could not be written: .*No space left.* Free some space"
    stepped: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(None))
    with fail_writes(after):
        for step in range(2):
            set_gradients(model, step)
            with pytest.raises(StorageError, match=text):
                optimizer.step()
    assert len(stepped) == 2  # the library counts steps so too: kept parameters are gathered again
    train(model, optimizer, range(2, 3))
    assert {type(rest).__name__ for rest in rests_of(optimizer)} == {"_InFile"}
    saved = tmp_path / "run"
    with fail_writes(after):
        train(model, optimizer, range(3, 4))  # the files that there are need no more space
        save(saved, model, optimizer)  # while nothing can be written to the other disk
        load(saved, model, optimizer)  # the step says so, which writes again
        set_gradients(model, 4)
        with pytest.raises(StorageError, match=text):
            optimizer.step()
    assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))


LIMITED = """
import resource, sys, torch
from torch import nn
from composable_fsdp import offload_optimizer
from composable_fsdp.errors import StorageError

model = nn.ParameterList(nn.Parameter(torch.ones(1 << 16)) for _ in range(4))
expected = nn.ParameterList(nn.Parameter(torch.ones(1 << 16)) for _ in range(4))
plain = torch.optim.AdamW(expected)
optimizer = offload_optimizer(torch.optim.AdamW(model), sys.argv[1], bucket_bytes=1 << 20)
for p in (*model, *expected):
    p.grad = torch.ones_like(p)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
for _ in range(3):
    plain.step()
    try:
        optimizer.step()
    except StorageError as error:
        print(error)
for p, q in zip(model, expected, strict=True):
    assert torch.equal(p, q)
    assert torch.equal(optimizer.state[p]["exp_avg"], plain.state[q]["exp_avg"])
"""


def test_a_limit_of_the_system_on_files_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("File too large") == 3


def damage(optimizer: Optimizer, how: str, number: int = 1) -> None:
    file = rests_of(optimizer)[number]._file.fileno()
    if how == "truncated":
        os.truncate(file, 100)
    elif how == "one bit":
        (byte,) = os.pread(file, 1, 400)
        os.pwrite(file, bytes([byte ^ 4]), 400)
    elif how == "zeros":
        os.pwrite(file, bytes(256), 256)
    else:
        os.pwrite(file, os.pread(rests_of(optimizer)[0]._file.fileno(), 1024, 0), 0)


@pytest.mark.behaviour("F-12", "H-05")
@pytest.mark.parametrize("action", ["step", "state_dict", "save", "reload"])
@pytest.mark.parametrize("how", ["truncated", "one bit", "zeros", "another bucket"])
def test_a_damaged_file_is_named_and_never_taken_for_state(how: str, action: str, tmp_path: Path) -> None:
    model, expected = squares(8), squares(8)
    plain, optimizer = torch.optim.AdamW(expected), torch.optim.AdamW(model)
    offload_optimizer(optimizer, tmp_path / "state", bucket_bytes=1024)
    train(expected, plain, range(4))
    train(model, optimizer, range(2))
    save(tmp_path / "run", model, optimizer, step=2)
    damage(optimizer, how)
    set_gradients(model, 2)
    actions: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,
        "state_dict": optimizer.state_dict,
        "save": lambda: save(tmp_path / "run", model, optimizer, step=3),
        "reload": lambda: reload_optimizer(optimizer),
    }
    found = "it has 100 bytes, not 1024" if how == "truncated" else "its checksum differs"
    text = rf"a file of optimizer state in '{tmp_path / 'state'}' is damaged: {found}.*load the newest checkpoint"
    with pytest.raises(StorageError, match=text):
        actions[action]()
    assert [p in optimizer.state for p in model] == [True] * 2 + [False] * 2 + [True] * 4
    for later in actions.values():
        with pytest.raises(StorageError, match=text):
            later()
    load(tmp_path / "run", model, optimizer)
    train(model, optimizer, range(2, 4))
    assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))


def test_damage_is_found_also_after_somebody_has_written_to_the_state(tmp_path: Path) -> None:
    model = squares(4)
    optimizer = offload_optimizer(torch.optim.AdamW(model), tmp_path, bucket_bytes=1024)
    train(model, optimizer, range(1))
    optimizer.state[model[2]]["exp_avg"].mul_(2)
    train(model, optimizer, range(1, 2))
    damage(optimizer, "one bit")
    set_gradients(model, 2)
    with pytest.raises(StorageError, match="its checksum differs"):
        optimizer.step()


class NeedsGradients(torch.optim.SGD):
    """It cannot update a parameter without a gradient."""

    def step(self, closure: Any = None) -> Any:
        if any(p.grad is None for group in self.param_groups for p in group["params"]):
            raise TypeError("a gradient is missing")
        return super().step(closure)


def test_damage_is_named_also_by_an_update_that_needs_gradients(tmp_path: Path) -> None:
    model = squares(4)
    optimizer = offload_optimizer(NeedsGradients(model, momentum=0.5), tmp_path, bucket_bytes=512)
    train(model, optimizer, range(2))
    damage(optimizer, "truncated")
    set_gradients(model, 2)
    with pytest.raises(StorageError, match="is damaged: it has 100 bytes") as raised:
        optimizer.step()
    assert str(raised.value.__cause__) == "a gradient is missing"
    assert all(p.grad is not None for p in model)


@pytest.mark.parametrize("readable", [0, 300])
def test_an_error_of_the_disk_names_the_folder(readable: int, tmp_path: Path) -> None:
    model = squares(4)
    optimizer = offload_optimizer(torch.optim.AdamW(model), tmp_path, bucket_bytes=1024)
    train(model, optimizer, range(2))
    set_gradients(model, 2)
    text = rf"in '{tmp_path}' is damaged: .*Input/output error.*Check the disk, and load the newest checkpoint"
    read: list[Any] = [readable] * bool(readable)
    read += [OSError(errno.EIO, os.strerror(errno.EIO))] * 9
    with (
        mock.patch.dict(offload_optimizer.__globals__, _advise=lambda *_: errno.EFAULT),
        mock.patch.object(os, "preadv", side_effect=read),
        pytest.raises(StorageError, match=text),
    ):
        optimizer.step()
    assert len(optimizer.state) == 2  # of four parameters: the first bucket's is lost


def test_pages_that_the_system_refuses_are_named(tmp_path: Path) -> None:
    model = squares(2)
    optimizer = offload_optimizer(torch.optim.AdamW(model), tmp_path)
    train(model, optimizer, range(1))
    with (
        mock.patch.dict(offload_optimizer.__globals__, _advise=lambda *_: errno.ENOMEM),
        pytest.raises(StorageError, match="is damaged: its pages cannot be used: Cannot allocate memory"),
    ):
        optimizer.step()


def test_systems_without_the_advice_have_the_same_results(tmp_path: Path) -> None:
    model, expected = squares(6), squares(6)
    plain, optimizer = torch.optim.AdamW(expected), torch.optim.AdamW(model)
    offload_optimizer(optimizer, tmp_path, bucket_bytes=1024)
    with mock.patch.dict(offload_optimizer.__globals__, _libc=None):
        train(expected, plain)
        train(model, optimizer)
        assert_same(tensors_of(model, optimizer), tensors_of(expected, plain))
        damage(optimizer, "one bit")
        with pytest.raises(StorageError, match="its checksum differs"):
            optimizer.step()


def test_the_number_of_a_file_system_is_that_of_stat(tmp_path: Path) -> None:
    done = subprocess.run(["stat", "-f", "-c", "%t", str(tmp_path)], capture_output=True, text=True, check=True)
    assert offload_optimizer.__globals__["_file_system_of"](tmp_path) == int(done.stdout, 16)


@pytest.mark.behaviour("F-12", "H-05")
def test_runs_that_are_killed_in_a_step_resume_from_their_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.kill_offloaded", str(tmp_path), "50", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    kills, in_steps = (int(word) for word in done.stdout.replace(",", "").split() if word.isdecimal())
    assert kills == in_steps == 50


# -- errors


@pytest.mark.behaviour("H-02")
def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    model = squares(2)
    with pytest.raises(ArgumentTypeError, match=r"^offload_optimizer takes an optimizer, .* not 3\.$"):
        offload_optimizer(cast(Any, 3))
    optimizer = torch.optim.AdamW(model)
    text = r"^bucket_bytes must be positive and keep_bytes at least 0, not 0 and 0\.$"
    with pytest.raises(ConfigurationError, match=text):
        offload_optimizer(optimizer, bucket_bytes=0)
    with pytest.raises(ConfigurationError, match=r"not 1 and -1\.$"):
        offload_optimizer(optimizer, bucket_bytes=1, keep_bytes=-1)
    with pytest.raises(ConfigurationError, match=r"^LBFGS steps all parameters together"):
        offload_optimizer(torch.optim.LBFGS(model))
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigurationError, match=r"^no file can be made in the folder '.*/file': .*Name one on a local"
    ):
        offload_optimizer(optimizer, tmp_path / "file")
    with (
        mock.patch.dict(offload_optimizer.__globals__, _file_system_of=lambda _: 0x9123683E),
        pytest.raises(
            ConfigurationError, match=r"is on btrfs, which needs .* on a full disk, .* such as ext4 or XFS\.$"
        ),
    ):
        offload_optimizer(optimizer, tmp_path)
    with pytest.raises(ConfigurationError, match=r"^this AdamW is not offloaded\. Call offload_optimizer first\.$"):
        reload_optimizer(optimizer)
    scheduled = torch.optim.AdamW(model)
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.5)
    text = r"^the step of this AdamW has been replaced already, .* Call offload_optimizer before anything else"
    with pytest.raises(ConfigurationError, match=text):
        offload_optimizer(scheduled, tmp_path)
    offload_optimizer(optimizer, tmp_path)
    with pytest.raises(ConfigurationError, match=r"^this AdamW is offloaded already\. Call offload_optimizer once\.$"):
        offload_optimizer(optimizer, tmp_path)
