"""Step times in virtual time of schedules chosen by costs, with different bounds on extra memory.

    OMP_NUM_THREADS=1 python benchmarks/extra_memory.py

The model, the device and the network are those of ``schedule_sweep.py``: 8 blocks, 400 Gbit/s, latencies of 20 µs. Ours
calls ``calibrate()`` before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from report import parser, publish
from schedule_sweep import MODELS, Cell, Steps
from sim.device import Charging, Device
from sim.ledger import Ledger
from sim.network import Network, simulated_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

MODEL, RANKS, EXTRA_MIB = "8 blocks of 4096, batch 2", (64, 4096), (None, 0, 256, 512, 1024)
STEPS_TO_LEARN = 7
COLUMNS = ["ranks", "library", "extra MiB", "step ms", "peak MB", "chosen"]


def row(library: str, ranks: int, extra: int | None) -> dict[str, Any]:
    """Return the time and the peak memory of a step after those that learn."""
    network, of = Network(Device(flops=450e6, bandwidth=3.5e6)), MODELS[MODEL]
    with simulated_ranks(network, ranks):
        meshes = of.meshes(ranks)
        with FakeTensorMode(allow_non_fake_inputs=True), Charging(network.device):
            steps = Steps(of.sharded(library, *meshes), of.batch(), network, Ledger())
            model = cast(Any, steps.model)
            if extra is not None:
                model.set_max_extra_bytes(extra << 20)
            Cell(20, 400).apply(network)
            if library == "ours":
                model.calibrate()
            for _ in range(STEPS_TO_LEARN):
                steps.run()
            recorded = steps.record()
            return {
                "ranks": ranks,
                "library": library,
                "extra MiB": "default" if extra is None else extra,
                "step ms": recorded.repeat(network),
                "peak MB": recorded.peak,
                "chosen": model.schedule_choice().summary if library == "ours" else "",
            }


def rows(ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the row of FSDP2, and one of ours for each bound."""
    yield row("fsdp2", ranks, None)
    for extra in EXTRA_MIB:
        yield row("ours", ranks, extra)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    found = [each for ranks in (RANKS[:1] if arguments.quick else RANKS) for each in rows(ranks)]
    publish("extra memory", {}, COLUMNS, found, arguments.out)


if __name__ == "__main__":
    main()
