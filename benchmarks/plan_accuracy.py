"""Compares the peaks of memory that ``plan`` predicts with those that ``memory.py`` counts, and times a large plan.

    OMP_NUM_THREADS=1 python benchmarks/plan_accuracy.py [--large]

Each row of ``memory.py`` for this library is predicted by ``plan`` with the model, batch, mesh, dtypes and optimizer of
that row. Rows with ``waits`` ``host`` are counted by torch's profiler on real tensors. ``--large`` measures the time
and the memory of a process that plans a model of the shape of Llama 3 70B on 1024 ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from libraries import LIBRARIES, fake_ranks
from memory import MB, STEP, batch_of, on_streams_of, sharded
from models import CASES, LARGE_BLOCKS, SMALL_BLOCKS, Case
from report import parser, publish
from torch import nn

from composable_fsdp import MixedPrecisionPolicy, fully_shard
from composable_fsdp.plan import ACCELERATORS, Plan, plan

COLUMNS = ["case", "ranks", "waits", "dtype", "predicted MB", "counted MB", "predicted/counted", "error", "at"]
RESERVED = ["predicted reserved MB", "counted reserved MB"]
MANY = 4096

LARGE = """
import json, resource, time
import torch
from composable_fsdp import MixedPrecisionPolicy
from composable_fsdp.plan import plan
from composable_fsdp.wrap import transformer_blocks
from models import Decoder
begin = time.perf_counter()
made = plan(
    Decoder.llama_70b, "1x4096", mesh="1024", policy=transformer_blocks(),
    mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), recompute=RECOMPUTE,
)
seconds = time.perf_counter() - begin
print(json.dumps({
    "model": made.model, "parameters": made.parameters, "ranks": made.mesh, "recompute": RECOMPUTE,
    "fits an H100": made.fits, "peak GB": made.peak_bytes / 1e9, "step s": made.seconds, "plan s": seconds,
    "resident GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
}))
"""


def predicted(case: Case, ranks: int, *, waits: str, bf16: bool) -> Plan:
    """Return the plan of a row of ``memory.py``."""
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if bf16 else {}

    def build() -> nn.Module:
        model = case.build()
        for module in (*case.blocks(model), model):
            fully_shard(module, **options)
        return model

    return plan(
        build,
        batch_of(case, bf16=bf16),
        mesh=str(ranks),
        device=ACCELERATORS["h100-80gb" if waits == "streams" else "cpu"],
        optimizer=partial(torch.optim.SGD, lr=1e-4),
        loss=lambda output: output,
    )


def row_of(name: str, case: Case, *, waits: str, bf16: bool, reserves: bool = False) -> dict[str, Any]:
    """Return the predicted and the counted peak of a case on 8 ranks."""
    if waits == "streams":
        found = on_streams_of("ours", case, bf16=bf16, reserves=reserves)
        counted = found["ours peak MB"]
    else:
        with fake_ranks(8) as mesh:
            counted = sharded(LIBRARIES["ours"], case, mesh, bf16=bf16).held(STEP)[1] / MB
        found = {}
    made = predicted(case, 8, waits=waits, bf16=bf16)
    row = {"case": name, "ranks": 8, "waits": waits, "dtype": "bf16" if bf16 else "fp32"}
    row |= compared(made.peak_bytes / MB, counted) | {"at": made.peak_place}
    if reserves:
        row |= dict(zip(RESERVED, (made.peak_bytes / MB, found["ours reserved MB"]), strict=True))
    return row


def compared(ours: float, counted: float) -> dict[str, Any]:
    ratio = ours / counted
    return {
        "predicted MB": ours,
        "counted MB": counted,
        "predicted/counted": ratio,
        "error": abs(ratio - 1),
    }


def on_many_ranks(ranks: int) -> dict[str, Any]:
    """Return the row of the memory above idle memory with more ranks than most dims are long. Rank 0 is counted."""
    with fake_ranks(ranks) as mesh:
        before, peak, _ = sharded(LIBRARIES["ours"], SMALL_BLOCKS, mesh, bf16=False).held(STEP)
    made = predicted(SMALL_BLOCKS, ranks, waits="host", bf16=False)
    idle = next(row.bytes for row in made.rows if row.name == "parameters")
    name = "6.3 M parameters, above idle"
    row = {"case": name, "ranks": ranks, "waits": "host", "dtype": "fp32", "at": made.peak_place}
    return row | compared((made.peak_bytes - idle) / MB, (peak - before) / MB)


def large(*, recompute: bool) -> dict[str, Any]:
    """Plan a model of the shape of Llama 3 70B in a process of its own."""
    code = LARGE.replace("RECOMPUTE", str(recompute))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--large", action="store_true", help="time a plan of 70 B at 1024 ranks instead")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    if arguments.large:
        plans = [large(recompute=False), large(recompute=True)]
        publish("plans of a large model", {}, list(plans[0]), plans, arguments.out)
        return
    names = ["experts"] if arguments.quick else ["gpt-256", "gpt-32", "experts"]
    rows = [
        row_of(name, CASES[name], waits=waits, bf16=bf16)
        for name in names
        for waits in ("host", "streams")
        for bf16 in (False, True)
    ]
    rows.append(on_many_ranks(512 if arguments.quick else MANY))
    rows.append(row_of("large blocks", LARGE_BLOCKS, waits="streams", bf16=True, reserves=True))
    rows.append({"case": "largest error", "error": max(row["error"] for row in rows)})
    publish("predicted peaks of plan", {}, [*COLUMNS, *RESERVED], rows, arguments.out)


if __name__ == "__main__":
    main()
