"""Compares the predicted times of steps with those of real steps on 2 and 4 ranks, over several networks.

    python benchmarks/schedule_prediction.py --cells FILE  # as root, for the slow networks

Ranks of one host communicate over shared memory, over loopback sockets, and over sockets between network namespaces
with a limited rate (``sim/lab.py``). Each round calls ``calibrate()``, which measures the costs in a few steps and
chooses settings by them, and then takes the time of steps with these settings: forward and backward, of the slowest
rank. Then nothing is fused or prefetched, and steps are taken again, which the same costs predict: no step with these
settings has been measured for them.

Ranks are started anew for each network, number of ranks and model. Their rows are appended to the file of ``--cells``
at once, with the load average of the host, and what the file has is not run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from libraries import LIBRARIES, shard
from models import Case, Chain, Gpt
from network import rows_over
from report import SHARED_MEMORY, parser, publish
from sim.lab import Link, lacking
from tables import spread, table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

SHARED, LOOPBACK = "shared memory", "loopback"
LINKS = {"1 Gbit/s": Link(1000), "100 Mbit/s": Link(100)}
NETWORKS = (SHARED, LOOPBACK, *LINKS)
LEARNING_STEPS = 6
"""The steps that ``calibrate()`` measures."""
WARM_UP = 3
COLUMNS = [
    *("network", "ranks", "case", "settings", "predicted ms", "measured ms", "predicted/measured", "error", "load"),
]
SETTINGS = CHOSEN, _ = "chosen", "nothing fused or ahead"


def mlp() -> nn.Module:
    return Chain([nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256)) for _ in range(4)])


CASES = {
    "GPT of 2.9 M parameters": Case(
        "",
        lambda: Gpt(dim=128, layers=4),
        lambda generator: torch.randint(0, 8192, (2, 64), generator=generator),
    ),
    "wide MLP of 4.2 M parameters": Case("", mlp, lambda generator: torch.randn(128, 256, generator=generator)),
    "100 small modules": Case(
        "",
        lambda: Chain([nn.Linear(64, 64) for _ in range(100)]),
        lambda generator: torch.randn(8, 64, generator=generator),
    ),
}


def step_of(model: nn.Module, batch: torch.Tensor) -> Callable[[], float]:
    """Return a training step, which all ranks begin together and which returns its milliseconds."""

    def run() -> float:
        dist.barrier()
        begin = time.perf_counter()
        model(batch).backward()
        seconds = time.perf_counter() - begin
        model.zero_grad()
        return 1e3 * seconds

    return run


def measured(step: Callable[[], float], steps: int) -> float:
    """Return the median of the milliseconds of the slowest rank."""
    taken = torch.tensor([step() for _ in range(steps)])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return median(taken.tolist())


def rounds_of(case: Case, rounds: int, steps: int) -> Iterator[dict[str, tuple[float, float]]]:
    """Yield the predicted and the measured milliseconds of each round, by settings."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = case.build()
    shard(LIBRARIES["ours"], module, case.blocks(module), mesh, bf16=False)
    model = cast(Any, module)
    step = step_of(module, case.batch(torch.Generator().manual_seed(dist.get_rank())))
    for _ in range(WARM_UP):
        step()
    for _ in range(rounds):
        found = {}
        model.calibrate(LEARNING_STEPS)
        for settings in SETTINGS:
            if settings != CHOSEN:
                model.set_schedule(prefetch_limit=0, max_fused_bytes=0)
            else:
                for _ in range(LEARNING_STEPS):
                    step()
            for _ in range(WARM_UP):
                step()
            taken = measured(step, steps)
            found[settings] = 1e3 * model.schedule().choice.seconds, taken
        yield found
        model.set_schedule(prefetch_limit=None, max_fused_bytes=None)
        for _ in range(2 * WARM_UP):  # until a choice is made and its groups are fused
            step()


def on_rank(out: Path, case: str, rounds: int, steps: int) -> None:
    """Write the rows of ``case``. Called on each rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, taken = [], list(rounds_of(CASES[case], rounds, steps))
    for settings in taken[0]:
        pairs = [each[settings] for each in taken]
        row: dict[str, Any] = {"case": case, "settings": settings, "ranks": dist.get_world_size()}
        row |= {
            f"{what} ms": spread(values)
            for what, values in zip(("predicted", "measured"), zip(*pairs, strict=True), strict=True)
        }
        ratio = spread([predicted / taken for predicted, taken in pairs])
        rows.append(row | {"predicted/measured": ratio, "error": abs(ratio["median"] - 1), "load": os.getloadavg()[0]})
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"rows": rows}))
    dist.destroy_process_group()


def on_this_host(ranks: int, script: list[str], timeout: float, *, shared: bool) -> list[dict[str, Any]]:
    """Return the rows of ``script`` on ranks without namespaces of their own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", SHARED_MEMORY: str(int(shared))}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        subprocess.run([*torchrun, *script[1:], "--out", str(out)], env=environment, timeout=timeout, check=True)
        return json.loads(out.read_text())["rows"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--networks", default=",".join(NETWORKS), help=f"of {', '.join(NETWORKS)}")
    options.add_argument("--ranks", default="2,4")
    options.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument(
        "--timeout", type=float, default=900, help="seconds for each network, number of ranks and case"
    )
    options.add_argument("--cells", type=Path, help="file of JSON lines for all rows; what it has is not run again")
    arguments = options.parse_args()
    quick = arguments.quick
    rounds, steps = (1, 3) if quick else (arguments.rounds, arguments.steps)
    cases = list(CASES)[-1:] if quick else arguments.cases.split(",")
    if "RANK" in os.environ:
        on_rank(arguments.out, cases[0], rounds, steps)
        return
    networks = (LOOPBACK if quick else arguments.networks).split(",")
    numbers = [2] if quick else list(map(int, arguments.ranks.split(",")))
    rows: list[dict[str, Any]] = []
    if arguments.cells and arguments.cells.exists():
        rows = [json.loads(line) for line in arguments.cells.read_text().splitlines()]
    known = {(row["network"], row["ranks"], row["case"]) for row in rows}
    for network, ranks, case in product(networks, numbers, cases):
        if (network, ranks, case) in known:
            continue
        if network in LINKS and (missing := lacking()):
            print(f"{network} is left out: it needs {missing}")
            continue
        script = [sys.executable, __file__, "--cases", case, "--rounds", str(rounds), "--steps", str(steps)]
        script += ["--quick"] * quick
        if network in LINKS:
            found = rows_over(LINKS[network], ranks, script, arguments.timeout)
        else:
            found = on_this_host(ranks, script, arguments.timeout, shared=network == SHARED)
        found = [{"network": network, **row} for row in found]
        rows += found
        print(table(found, COLUMNS), flush=True)
        if arguments.cells:
            with arguments.cells.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
    rows += [summary(settings, [row for row in rows if row["settings"] == settings]) for settings in SETTINGS]
    settings = {"dtype": "fp32", "networks": ",".join(networks)}
    publish("predicted against measured step times", settings, COLUMNS, rows, arguments.out)


def summary(settings: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row with the medians of the errors and loads of ``rows``."""
    medians = {name: median(row[name] for row in rows) for name in ("error", "load")}
    return {"network": "median of all", "settings": settings, **medians}


if __name__ == "__main__":
    main()
