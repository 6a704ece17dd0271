"""safetensors files of sharded models, written and read by several ranks."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from composable_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from composable_fsdp.checkpoint import load_safetensors, save, save_safetensors
from composable_fsdp.errors import CheckpointError
from tests._internals import safetensors_files as stored
from tests.helpers.checkpoint_worlds import all_ranks_raise, local
from tests.helpers.experts import sharded_mixture
from tests.helpers.model_parallel import PAIRS, named_mesh, parallelize_pairs
from tests.helpers.models import TASKS, seeded, shard_layers
from tests.helpers.run_ranks import on_ranks
from tests.helpers.sharding import assert_exact

library = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install '.[checkpoint]'")
pytestmark = pytest.mark.behaviour("F-11")

MAX_FILE_BYTES = 150
BLOCK_BYTES = 64
"""So small that most tensors are read and written in several pieces."""


class Mixed(nn.Module):
    """Has ignored parameters, buffers of several dtypes, a tied pair, one row, a scalar and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 1)])
        self.ignored = nn.Linear(3, 2)
        self.twin = nn.Linear(3, 2)
        self.twin.weight = self.ignored.weight
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("halves", torch.randn(3, 5, dtype=torch.bfloat16))


def mixed() -> nn.Module:
    model: Any = seeded(Mixed)()
    ignored = {model.ignored.weight, model.ignored.bias, model.twin.bias}
    return shard_layers(model, fully_shard, ignored_params=ignored)


def on_mesh(task: str, *shape: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: shard_layers(TASKS[task].build(), fully_shard, mesh=init_device_mesh("cpu", shape), **options)


def tensor_parallel(**sizes: int) -> nn.Module:
    mesh = named_mesh(**sizes)
    model = PAIRS.build()
    parallelize_pairs(model, mesh["tp"])
    return shard_layers(model, fully_shard, mesh=mesh["dp"])


def experts() -> nn.Module:
    return sharded_mixture(named_mesh(edp=2, ep=2), Shard(1))


def second_dim(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


SHARDED: dict[int, dict[str, Callable[[], nn.Module]]] = {
    1: {"one rank": on_mesh("tied", 1), "mixed": mixed},
    2: {
        "uneven": on_mesh("mlp", 2),
        "tied": on_mesh("tied", 2),
        "two dtypes": on_mesh("adapters", 2),
        "last dim": on_mesh("transformer", 2, shard_placement_fn=second_dim),
        "in host memory": on_mesh("mlp", 2, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "bf16 policy": on_mesh("mlp", 2, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        "mixed": mixed,
        "only tensor-parallel": lambda: parallelized(PAIRS.build()),
    },
    4: {
        "empty shards": on_mesh("mlp", 4),
        "hybrid": on_mesh("tied", 2, 2),
        "replicas": on_mesh("mlp", 4, 1),
        "tensor-parallel": lambda: tensor_parallel(dp=2, tp=2),
        "experts": experts,
        "mixed": mixed,
    },
}


def parallelized(model: nn.Module) -> nn.Module:
    parallelize_pairs(model, init_device_mesh("cpu", (2,)))
    return model


def clear(model: nn.Module) -> None:
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            local(value).zero_()


def spread(model: nn.Module) -> None:
    with torch.no_grad():
        for value in model.parameters():
            part = local(value)
            part.add_(torch.arange(part.numel()).view(part.shape) / 7)


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full state, gathered by DTensor and not by the library."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in model.state_dict().items()
    }


@contextmanager
def small_blocks() -> Iterator[list[int]]:
    """Set blocks of ``BLOCK_BYTES``, and return the sizes of the reads from files."""
    taken: list[int] = []
    real = stored.StoredTensor.blocks

    def counted(self: Any, boxes: Any) -> Iterator[tuple[Any, torch.Tensor]]:
        for box, values in real(self, boxes):
            taken.append(values.nbytes)
            yield box, values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored.StoredTensor, "blocks", counted)
        patch.setattr(stored, "BLOCK_BYTES", BLOCK_BYTES)
        yield taken


def own_bytes(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(local(tensor).nbytes for tensor in tensors)


def assert_files(path: Path, expected: dict[str, torch.Tensor], what: str) -> None:
    """Check that all files together have ``expected``, without the second names of tied parameters."""
    parts = [library.load_file(file) for file in sorted(path.glob("*.safetensors"))]
    found = {name: value for part in parts for name, value in part.items()}
    assert len(found) == sum(map(len, parts)), what
    assert len(parts) > 1, what
    tied = {"tied": {"head.weight"}, "mixed": {"twin.weight"}, "one rank": {"head.weight"}, "hybrid": {"head.weight"}}
    assert found.keys() == expected.keys() - tied.get(what, set()), what
    for name, value in found.items():
        assert_exact(value, expected[name], f"{what}: {name} in the files")


@pytest.mark.behaviour("F-13")
@pytest.mark.parametrize("num_ranks", SHARDED)
@on_ranks("num_ranks")
def test_round_trips_are_exact_and_ranks_read_only_their_shards(tmp_path: Path) -> None:
    for what, build in SHARDED[dist.get_world_size()].items():
        model, other = build(), build()
        spread(model)
        expected = full_state(model)
        path = tmp_path / what
        with small_blocks() as taken:
            save_safetensors(model, path, max_file_bytes=MAX_FILE_BYTES)
            assert_files(path, expected, what)
            clear(other)
            load_safetensors(other, path)
            assert sum(taken) == own_bytes(other), what
        for (name, value), loaded in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
            assert_exact(local(loaded), local(value), f"{what}: {name}")


def write_with_index(folder: Path, values: dict[str, torch.Tensor], files: int = 3) -> None:
    folder.mkdir(parents=True)
    names = sorted(values)
    weight_map = {name: f"part{i % files}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        part = {name: values[name].contiguous() for name in names if weight_map[name] == file}
        library.save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@on_ranks(4)
def test_an_index_of_several_files_in_bf16_fills_fp32_shards(tmp_path: Path) -> None:
    build = on_mesh("tied", 2, 2, shard_placement_fn=second_dim)
    model, rank = build(), dist.get_rank()
    spread(model)
    halves = {f"model.{name}": v.bfloat16() for name, v in full_state(model).items() if name != "head.weight"}
    if rank == 0:
        write_with_index(tmp_path / "index", halves)
    dist.barrier()
    other = build()
    for path in (tmp_path / "index", tmp_path / "index" / "model.safetensors.index.json"):
        clear(other)
        load_safetensors(other, path, key_map=lambda name: f"model.{name}", convert_dtype=True)
        for name, value in full_state(other).items():
            key = "embedding.weight" if name == "head.weight" else name
            assert_exact(value, halves[f"model.{key}"].float(), name)


@on_ranks(2)
def test_stages_of_a_pipeline_are_one_checkpoint(tmp_path: Path) -> None:
    """Give each rank another pipeline stage; both have the same norm."""
    rank = dist.get_rank()
    layers = [nn.Linear(3, 5), nn.Linear(5, 2)]
    model = nn.ModuleDict({f"stage{rank}": layers[rank], "norm": nn.LayerNorm(3)})
    spread(model)
    expected = full_state(model)
    save_safetensors(model, tmp_path)
    assert library.load_file(tmp_path / "model.safetensors").keys() == {
        f"{name}.{kind}" for name in ("stage0", "stage1", "norm") for kind in ("weight", "bias")
    }
    clear(model)
    assert load_safetensors(model, tmp_path) == ([], [])
    for name, value in model.state_dict().items():
        assert_exact(value, expected[name], name)
    del model["norm"]
    with all_ranks_raise(
        r"fit ModuleDict. Nothing was loaded.\n  unexpected \(2\):\n    norm\.bias: float32 \(3,\)\n.*\Z"
    ):
        load_safetensors(model, tmp_path)


@pytest.mark.behaviour("F-12")
@on_ranks(2)
def test_a_load_that_fails_on_one_rank_loads_on_none(tmp_path: Path) -> None:
    rank = dist.get_rank()
    model = on_mesh("tied", 2)()
    spread(model)
    before = full_state(model)
    good, bad = tmp_path / "good", tmp_path / f"bad{rank}"
    save_safetensors(on_mesh("tied", 2)(), good)
    content = (good / "model.safetensors").read_bytes()
    bad.mkdir()
    file = bad / "model.safetensors"

    file.write_bytes(content if rank == 0 else content[:-1])
    with all_ranks_raise(r"^load_safetensors: rank 1: .*bad1/model\.safetensors is damaged, or no safetensors file"):
        load_safetensors(model, bad)

    file.write_bytes(content if rank == 0 else content.replace(b"[23,12]", b"[12,23]"))
    with all_ranks_raise(
        r"of another shape \(1\):\n    embedding\.weight: \(12, 23\), expected \(23, 12\) \(on rank 1\)$"
    ):
        load_safetensors(model, bad)

    values = {"scratch": torch.ones(1 + rank), **library.load_file(good / "model.safetensors")}
    library.save_file(values, file)
    with all_ranks_raise("is not the same checkpoint on all ranks: rank 1 found other tensors than rank 0"):
        load_safetensors(model, file if rank else bad / "model.safetensors", strict=False)

    del values["scratch"]
    values["head.weight"] = values["embedding.weight"].clone()
    values["head.weight"][-1] += 1  # in the shard of rank 1
    library.save_file(values, file)
    with all_ranks_raise(r"different values in the files: embedding\.weight and head\.weight \(on rank 1\)$"):
        load_safetensors(model, file)

    def mapped(name: str) -> str:
        return {"norm.bias": "b"}[name] if rank else name

    with all_ranks_raise("^load_safetensors: rank 1: KeyError: 'embedding.weight'$"):
        load_safetensors(model, good, key_map=mapped)
    for name, value in full_state(model).items():
        assert_exact(value, before[name], name)

    with pytest.MonkeyPatch.context() as patch, all_ranks_raise("could not be read .* The model is loaded in part"):
        if rank:
            patch.setattr(stored, "_read_at", fails)
        load_safetensors(model, good)


def fails(*_: object) -> None:
    raise OSError("Input/output error")


@pytest.mark.behaviour("F-12")
@on_ranks(2)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_old_files(tmp_path: Path) -> None:
    rank = dist.get_rank()
    model, path = on_mesh("mlp", 2)(), tmp_path / "model"
    save_safetensors(model, path, max_file_bytes=MAX_FILE_BYTES)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    clear(model)

    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, unlimited[1]))
    try:
        with all_ranks_raise(r"^save_safetensors: OSError: .*File too large: '\S+/model\.safetensors'$"):
            save_safetensors(model, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    with (
        pytest.MonkeyPatch.context() as patch,
        open("/dev/full", "wb", buffering=0) as device,
        all_ranks_raise(
            r"^save_safetensors: rank 1: OSError: \[Errno 28\] No space left on device: '\S+/model\.safetensors'"
        ),
    ):
        if rank:
            patch.setattr(os, "pwrite", lambda *_: os.write(device.fileno(), b"x"))
        save_safetensors(model, path)

    with all_ranks_raise(
        r"^save_safetensors: rank 1: .*elsewhere is not the same directory here as .* made \.incomplete-\w+ there"
    ):
        save_safetensors(model, tmp_path / "elsewhere" if rank else path)

    one = nn.ModuleDict({"own": nn.Linear(2 + rank, 1, bias=False), "sharded": model if rank else nn.Module()})
    text = (
        r"^{}: ranks do not hold the parts of one model: {}own\.weight has another shape or dtype on rank 1 than on "
        r"rank 0; of {}sharded\.scale all ranks together have 1 instead of 3 elements"
    )
    with all_ranks_raise(text.format("save_safetensors", "", "")):
        save_safetensors(one, path)
    with all_ranks_raise(text.format("saving to .*", "model.", "model.")):
        save(tmp_path / "run", one)
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"^save_safetensors: rank 1 did not make this call within 0\.2 s"):
            save_safetensors(model, path, timeout=0.2)
    dist.barrier()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
