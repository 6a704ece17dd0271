"""Measures the memory of ranks that load and save a safetensors checkpoint, against the way that FSDP2 documents.

    OMP_NUM_THREADS=1 python benchmarks/load_memory.py

A model is sharded on the meta device, allocated, loaded from files in a temporary directory, and saved to another
directory. The method for FSDP2 is ``safetensors.torch.load_file`` on rank 0, then
``set_model_state_dict(..., StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))``, and
``get_model_state_dict(..., StateDictOptions(full_state_dict=True, cpu_offload=True))``, then ``save_file`` on rank 0.

Each variant runs in its own processes, several times in turn. The result is the largest peak resident set size
(``VmHWM``) of all ranks, minus the memory before the model was built and the rank's shard. It includes pages of mapped
files. The system could reclaim those that ``load_file`` maps.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from libraries import LIBRARIES, shard
from report import interleaved, parser, publish, ratios, spread
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as peer
from torch.distributed.device_mesh import init_device_mesh

from composable_fsdp.checkpoint import load_safetensors, save_safetensors

RANKS = 2
OPERATIONS = ("load", "save")
MB = 1e6


def build(layers: int, rows: int) -> nn.Sequential:
    """A model of ``layers`` matrices, each twice as high as wide."""
    return nn.Sequential(*(nn.Linear(rows // 2, rows) for _ in range(layers)))


def make_checkpoint(folder: Path, layers: int, rows: int) -> None:
    """Write random values to a file for each layer, and an index."""
    weight_map = {}
    for layer in range(layers):
        values = {f"{layer}.{name}": value.detach() for name, value in nn.Linear(rows // 2, rows).named_parameters()}
        file = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        save_file(values, folder / file)
        weight_map |= dict.fromkeys(values, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def fsdp2_load(model: nn.Module, folder: Path) -> None:
    values: dict[str, Any] = {}
    if dist.get_rank() == 0:
        for file in sorted(folder.glob("*.safetensors")):
            values |= load_file(file)
    options = peer.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    peer.set_model_state_dict(model, values, options=options)


def fsdp2_save(model: nn.Module, folder: Path) -> None:
    options = peer.StateDictOptions(full_state_dict=True, cpu_offload=True)
    values = peer.get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        folder.mkdir()
        save_file(values, folder / "model.safetensors")
    dist.barrier()


WAYS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "ours": (load_safetensors, save_safetensors),
    "fsdp2": (fsdp2_load, fsdp2_save),
}


def resident(field: str = "VmRSS") -> float:
    """Return this process's memory in megabytes: now, or with ``VmHWM`` the peak since :func:`forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / MB
    raise OSError(f"/proc/self/status has no line {field!r}. Linux is needed.")


def forget_peak() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def check(model: nn.Sequential, folder: Path) -> None:
    """Check that the last layer has its values."""
    name = f"{len(model) - 1}.weight"
    local = model.get_parameter(name).to_local()  # type: ignore[operator]
    with safe_open(sorted(folder.glob("*.safetensors"))[-1], "pt") as file:
        own = file.get_slice(name)[dist.get_rank() * len(local) : (dist.get_rank() + 1) * len(local)]
        assert torch.equal(local, own)


def run(library: str, folder: Path, layers: int, rows: int) -> list[float]:
    """Return megabytes above the shard at the peak, and seconds, of this rank by operation."""
    load, save = WAYS[library]
    mesh = init_device_mesh("cpu", (RANKS,))
    dist.barrier()
    with torch.device("meta"):
        model = build(layers, rows)
    forget_peak()
    before = resident()
    shard(LIBRARIES[library], model, list(model), mesh, bf16=False)
    model.to_empty(device="cpu")
    own = sum(p.to_local().nbytes for p in model.parameters()) / MB  # type: ignore[operator]
    figures = []
    for action in (partial(load, model, folder / "made"), partial(save, model, folder / f"saved-{library}")):
        begin = time.perf_counter()
        action()
        seconds = time.perf_counter() - begin
        figures += [resident("VmHWM") - before - own, seconds]
        if action.func is load:
            check(model, folder / "made")
        forget_peak()
    return figures


def rank_main(library: str, folder: Path, layers: int, rows: int) -> None:
    """Run on each rank's process. The first rank prints the largest figures as its last line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = torch.tensor(run(library, folder, layers, rows))
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps(figures.tolist()))
    dist.barrier()
    dist.destroy_process_group()


def in_processes(library: str, folder: Path, layers: int, rows: int) -> list[float]:
    """Return the figures of :func:`run` from ranks that are started only for this variant."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    sizes = ["--layers", str(layers), "--rows", str(rows)]
    ranks = [*torchrun, __file__, "--library", library, "--folder", str(folder), *sizes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(ranks, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    for file in folder.glob(f"saved-{library}/*"):
        file.unlink()
    (folder / f"saved-{library}").rmdir()
    return [float(value) for value in json.loads(done.stdout.splitlines()[-1])]


def measure(layers: int, rows: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each of ``OPERATIONS``."""
    with TemporaryDirectory(prefix="load-memory-") as name:
        folder = Path(name)
        (folder / "made").mkdir()
        make_checkpoint(folder / "made", layers, rows)
        variants = {library: partial(in_processes, library, folder, layers, rows) for library in LIBRARIES}
        taken = interleaved(variants, rounds, warm_up=0)
    rows_of_table = []
    largest = rows * (rows // 2) * 4 / MB
    for i, operation in enumerate(OPERATIONS):
        row: dict[str, Any] = {"operation": operation, "shard MB": layers * largest / RANKS}
        row["largest parameter + 64 MiB, MB"] = largest + (64 << 20) / MB
        peaks = {library: [sample[2 * i] for sample in samples] for library, samples in taken.items()}
        row |= {f"{library} MB above shard": spread(values) for library, values in peaks.items()}
        row["ours/fsdp2"] = ratios(peaks["ours"], peaks["fsdp2"])
        seconds = {library: spread([s[2 * i + 1] for s in samples]) for library, samples in taken.items()}
        rows_of_table.append(row | {f"{library} s": values for library, values in seconds.items()})
    return rows_of_table


COLUMNS = [
    *("operation", "shard MB", "largest parameter + 64 MiB, MB", "ours MB above shard", "fsdp2 MB above shard"),
    *("ours/fsdp2", "ours s", "fsdp2 s"),
]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--library", choices=LIBRARIES, help="be one rank that uses it (torchrun starts those)")
    options.add_argument("--folder", type=Path)
    options.add_argument("--layers", type=int, default=16)
    options.add_argument(
        "--rows", type=int, default=8192, help="of each layer's matrix, which has half as many columns"
    )
    options.add_argument("--rounds", type=int, default=3)
    arguments = options.parse_args()
    if arguments.library:
        rank_main(arguments.library, arguments.folder, arguments.layers, arguments.rows)
        return
    layers, rows, rounds = (4, 512, 1) if arguments.quick else (arguments.layers, arguments.rows, arguments.rounds)
    rows_of_table = measure(layers, rows, rounds)
    publish("memory to load and save", {"ranks": RANKS}, COLUMNS, rows_of_table, arguments.out)


if __name__ == "__main__":
    main()
