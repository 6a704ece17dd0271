"""Compares the peak that ``plan`` predicts with the resident memory of two real ranks.

    OMP_NUM_THREADS=1 python benchmarks/plan_resident.py

The ranks train a GPT of 40 M parameters with AdamW over gloo, on sockets, with each of ``SETTINGS`` in processes of
their own. The memory is the largest proportional set size in the steps beyond that before the model was built
(``resident.py``). A small model has been trained before, so that it does not include what torch imports at first use.
The C library returns freed memory of 64 KiB or more to the system at once.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from models import Gpt
from report import SHARED_MEMORY, parser, publish
from resident import Peak, pss_mb, trim
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable_fsdp import fully_shard
from composable_fsdp.plan import plan
from composable_fsdp.wrap import every_module, transformer_blocks

RANKS, STEPS = 2, 3
BATCH = (2, 64)
LAYERS = 6
TRIMMED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SETTINGS: dict[str, dict[str, Any]] = {
    "blocks": {"policy": transformer_blocks},
    "blocks, kept after forward": {"policy": transformer_blocks, "reshard_after_forward": False},
    "blocks, recomputed": {"policy": transformer_blocks, "recompute": True},
    "blocks, kept and recomputed": {"policy": transformer_blocks, "reshard_after_forward": False, "recompute": True},
    "one group": {},
    "every module": {"policy": every_module},
}
COLUMNS = ["settings", "predicted MB", "PSS MB", "predicted/PSS", "error"]


def build() -> nn.Module:
    return Gpt(8192, 640, LAYERS)


def options_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of ``fully_shard``, with a policy in place of the function that makes one."""
    options = {name: value for name, value in settings.items() if name != "recompute"}
    return options | ({"policy": options["policy"]()} if "policy" in options else {})


def train(build: Callable[[], nn.Module], settings: dict[str, Any]) -> float:
    """Return the most megabytes of this rank in steps beyond those before the model was built."""
    before = pss_mb()
    model: Any = fully_shard(build(), **options_of(settings))
    if settings.get("recompute"):
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randint(0, model.embedding.num_embeddings, BATCH)
    gc.collect()
    trim()  # the unsharded model, which existed before sharding
    with Peak() as peak:
        for _ in range(STEPS):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return peak.mb - before


def on_rank(name: str) -> None:
    """Run on each rank's process. The first rank prints the mean as its last line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train(lambda: Gpt(64, 64, LAYERS), SETTINGS[name])
    gc.collect()
    trim()
    held = torch.tensor(train(build, SETTINGS[name]))
    dist.all_reduce(held)
    if dist.get_rank() == 0:
        print(json.dumps(held.item() / RANKS))
    dist.barrier()
    dist.destroy_process_group()


def in_processes(name: str) -> float:
    """Return the megabytes of ranks that are started for ``name`` only."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = os.environ | TRIMMED | {"OMP_NUM_THREADS": "1", SHARED_MEMORY: "0"}
    command = [*torchrun, __file__, "--settings", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def predicted(settings: dict[str, Any]) -> float:
    made = plan(
        build,
        "x".join(map(str, BATCH)),
        mesh=str(RANKS),
        device="cpu",
        recompute=settings.get("recompute", False),
        **options_of(settings),
    )
    return made.peak_bytes / 1e6


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--settings", default="", help="be one rank that trains with them (torchrun starts those)")
    arguments = options.parse_args()
    if arguments.settings:
        on_rank(arguments.settings)
        return
    rows: list[dict[str, Any]] = []
    for name in list(SETTINGS)[:1] if arguments.quick else SETTINGS:
        ours, held = predicted(SETTINGS[name]), in_processes(name)
        ratio = ours / held
        row = {"settings": name, "predicted MB": ours, "PSS MB": held, "predicted/PSS": ratio, "error": abs(ratio - 1)}
        rows.append(row)
        print(name, ours, held, flush=True)
    publish("predicted peaks and resident memory", {"ranks": RANKS}, COLUMNS, rows, arguments.out)


if __name__ == "__main__":
    main()
