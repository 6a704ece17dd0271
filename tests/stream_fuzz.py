"""Train the fuzzer's programs on the simulated accelerator: no races, and the same bits in other orders.

    python -m tests.stream_fuzz --programs 5000 --orders 5 --state runs/stream-fuzz.jsonl

Each program runs in one process as one of its 2 or 4 ranks. Collectives give that rank what all ranks would send if
they had its data, so a program needs no other process. Results are compared with those of the host's order, not with
the unsharded model's: ``tests/parity/test_fuzz.py`` does that with real ranks.

``--variant nccl2`` communicates over that stand-in for NCCL instead, and a rule that a program breaks is a problem.

The state file has a line for each program. A run with the same file leaves these out. Several runs at a time take a
part each: ``--part 0/2`` and ``--part 1/2``, with a file each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hypothesis import settings
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.helpers.fuzz.programs import Program
from tests.helpers.fuzz.run import mesh_of, train_sharded, training_factories
from tests.parity.test_fuzz import DrawnPrograms
from tests.simulation import simulated_accelerator
from tests.simulation.nccl import VARIANTS, alone_backend, stands_in

DRAW_SIZE = 250
"""The number of programs that are drawn from one seed, and that run in one process."""
IN_FOUR = 4
"""One in so many draws is for 4 ranks, the others for 2."""

Meshes = dict[tuple[object, ...], DeviceMesh]


@contextmanager
def alone(world_size: int, rank: int) -> Iterator[Meshes]:
    """Be one of ``world_size`` ranks, of which no other exists. Use it once in a process: ``DTensor`` caches meshes."""
    dist.init_process_group(alone_backend(), store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield {}
    finally:
        dist.destroy_process_group()


def problems_of(program: Program, meshes: Meshes, orders: int) -> list[str]:
    """Train ``program``. Return its races, and what differs in ``orders`` other orders. Losses have no tangents here:
    the simulated accelerator follows memory, and forward-mode derivatives are made of zeros without any."""
    program = replace(program, steps=tuple(replace(step, tangents=False) for step in program.steps))
    key = program.mesh, program.placing
    if key not in meshes:
        meshes[key] = mesh_of(program, 0)
    with simulated_accelerator(records=orders > 0) as device:
        run = train_sharded(training_factories(program, meshes[key]))
    found = [str(race) for race in device.races]
    for seed in range(orders):
        found += [f"order {seed}: {difference}" for difference in device.run_late(seed)]
    del run  # its values are in use until then
    return found


def run_draw(draw: int, numbers: Sequence[int], orders: int, state: Path, end: float, variant: str = "") -> None:
    """Run the programs of a draw with these numbers until a time, and write a line for each. ``variant``: that of a
    stand-in for NCCL, or an empty text for the backend of the simulated accelerator."""
    settings.register_profile("default", deadline=None)  # as in tests/conftest.py: a busy machine draws slowly
    settings.load_profile("default")
    world_size = 4 if draw % IN_FOUR == IN_FOUR - 1 else 2
    drawn = list(DrawnPrograms(DRAW_SIZE, world_size, seed=draw).map_drawn())
    over = stands_in(variant, alone=True) if variant else nullcontext()
    with over, alone(world_size, rank=draw % world_size) as meshes, state.open("a") as lines:
        for number in numbers:
            if time.monotonic() > end:
                break
            program = drawn[number % DRAW_SIZE]
            try:
                problems = problems_of(program, meshes, orders)
            except Exception:
                problems = [traceback.format_exc()]
            result: dict[str, Any] = {"program": number, "orders": orders, "problems": problems}
            lines.write(json.dumps(result if not problems else result | {"text": repr(program)}) + "\n")
            lines.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--orders", type=int, default=5, help="other orders for each program; 0: find races only")
    parser.add_argument("--state", type=Path, default=Path("runs/stream-fuzz.jsonl"))
    parser.add_argument("--variant", default="", choices=["", *VARIANTS], help="over this stand-in for NCCL")
    parser.add_argument("--part", default="0/1", help="take one program in so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    options.state.parent.mkdir(parents=True, exist_ok=True)
    options.state.touch()
    done, end = _lines(options.state), time.monotonic() + options.seconds
    known = {line["program"] for line in done}
    context = multiprocessing.get_context("spawn")
    for draw in range(-(-options.programs // DRAW_SIZE)):
        numbers = range(draw * DRAW_SIZE, min((draw + 1) * DRAW_SIZE, options.programs))
        chosen = [number for number in numbers if number % parts == part and number not in known]
        if chosen and time.monotonic() < end:
            process = context.Process(
                target=run_draw, args=(draw, chosen, options.orders, options.state, end, options.variant)
            )
            process.start()
            process.join()
    done = _lines(options.state)
    failed = [line["program"] for line in done if line["problems"]]
    orders = sum(line["orders"] for line in done)
    sys.stdout.write(f"{len(done)} programs, {orders} other orders, {len(failed)} with problems: {failed[:20]}\n")


def _lines(state: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in state.read_text().splitlines()]


if __name__ == "__main__":
    main()
