"""Memory that an allocator reserves in 1,000 steps with batches of changing lengths, ours and FSDP2's.

    OMP_NUM_THREADS=1 python benchmarks/reserved_memory.py

One of 8 ranks runs on a simulated device (``sim/``) with fake tensors, as fast as in ``exposure.py``, on several
networks. After steps that learn the order of modules, one step of each length is recorded: the sizes and streams of all
memory that is allocated, and when it is freed.
A model of torch's CUDA allocator (``sim/allocator.py``), with and without expandable segments, gets the memory of the
sharded model, the steps that learn, and then the recorded steps in a random order. That equals running the steps as
long as a step frees what it allocates and nothing else, which is checked. The full model, from which shards are copied,
is left out, as for a model that is built on the meta device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, product
from typing import Any

import torch
from libraries import LIBRARIES, shard
from models import CASES, LARGE_BLOCKS, Case
from report import parser, publish
from sim.allocator import Allocator, Block
from sim.device import Charging, Device
from sim.ledger import Ledger
from sim.network import Network, simulated_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

MB = 1e6
STEPS, QUICK_STEPS = 1000, 20
STEPS_TO_LEARN = 7
LENGTHS = 25
NETWORKS = {(400, 20): (50e3, 20.0), (400, 500): (50e3, 500.0), (3200, 5): (400e3, 5.0)}
"""The bytes per microsecond of each rank, and the microseconds of each collective, by Gbit/s and microseconds."""
EMPTY_CACHE = -1
COLUMNS = [
    *("model", "batches", "Gbit/s", "latency us", "allocator", "library", "allocated MB", "reserved MB"),
    "reserved/allocated",
    *("last growth in step", "reserved, ours/fsdp2"),
]


@dataclass
class Recorder:
    """An allocator that only records: the number of each block, and its bytes and stream; no bytes if it is freed.

    The number ``EMPTY_CACHE`` is that of no block.
    """

    events: list[tuple[int, int, Hashable]] = field(default_factory=list)
    _numbers: Any = field(default_factory=count)

    def allocate(self, nbytes: int, stream: Hashable) -> int:
        number = next(self._numbers)
        self.events.append((number, nbytes, stream))
        return number

    def free(self, block: int) -> None:
        self.events.append((block, 0, None))

    def empty_cache(self) -> None:
        self.events.append((EMPTY_CACHE, 0, None))

    def take(self) -> list[tuple[int, int, Hashable]]:
        """Return the events so far, and begin anew."""
        events, self.events = self.events, []
        return events


def play(events: list[tuple[int, int, Hashable]], allocator: Allocator, blocks: dict[int, Block]) -> None:
    """Allocate and free what ``events`` say. ``blocks`` are those in use, by number."""
    for number, nbytes, stream in events:
        if number == EMPTY_CACHE:
            allocator.empty_cache()
        elif nbytes:
            blocks[number] = allocator.allocate(nbytes, stream)
        else:
            allocator.free(blocks.pop(number))


def in_use(events: list[tuple[int, int, Hashable]]) -> list[tuple[int, int, Hashable]]:
    """Return the allocations in ``events`` that are not freed in them."""
    freed = {number for number, nbytes, _ in events if not nbytes}
    return [event for event in events if event[0] not in freed]


@dataclass(frozen=True)
class Subject:
    """A model, the batches of all lengths, and what these are."""

    case: Case
    what: str
    batches: Callable[[torch.Tensor], list[torch.Tensor]]


SUBJECTS = {
    "8 Llama blocks": Subject(
        LARGE_BLOCKS, "2048 to 8192 tokens", lambda batch: [batch[: 2048 + 256 * n] for n in range(LENGTHS)]
    ),
    "GPT of 26 M": Subject(
        CASES["gpt-256"], "2 × 32 to 128 tokens", lambda batch: [batch[:, : 32 + 4 * n] for n in range(LENGTHS)]
    ),
}


def recorded(library: str, subject: Subject, network: Network, lengths: int) -> tuple[list[Any], list[list[Any]]]:
    """Return the events until steps have learned, and those of a step of each length."""
    recorder = Recorder()
    ledger = Ledger(recorder)  # type: ignore[arg-type]
    fake, charging = FakeTensorMode(allow_non_fake_inputs=True), Charging(network.device)
    with simulated_ranks(network, 8) as mesh, fake, charging, ledger:
        batch, model = subject.case.batch(torch.Generator().manual_seed(0)), subject.case.build()
        shard(LIBRARIES[library], model, subject.case.blocks(model), mesh, bf16=True)
        held = in_use(recorder.take())
        batches = subject.batches(batch.bfloat16() if batch.is_floating_point() else batch)[:lengths]

        def step(taken: torch.Tensor) -> list[Any]:
            model(taken).sum().backward()
            model.zero_grad()
            network.finish()
            ledger.count()
            return recorder.take()

        before = held + [event for n in range(STEPS_TO_LEARN) for event in step(batches[n % len(batches)])]
        steps = [step(taken) for taken in batches]
    for events in steps:
        allocated = {number for number, nbytes, _ in events if nbytes}
        if {number for number, nbytes, _ in events if not nbytes} != allocated:
            raise RuntimeError(f"a step of {library} does not free exactly what it allocates")
    return before, steps


def rows_of(library: str, name: str, link: tuple[int, int], steps: int, lengths: int) -> list[dict[str, Any]]:
    """Return a row for each kind of segments."""
    network = Network(Device(flops=450e6, bandwidth=3.5e6), *NETWORKS[link])
    before, each = recorded(library, SUBJECTS[name], network, lengths)
    rows = []
    for kind, allocator in (("segments", Allocator()), ("expandable", Allocator(expandable=True))):
        blocks, draw, last_growth = dict[int, Block](), random.Random(0), 0
        play(before, allocator, blocks)
        allocator.forget_peaks()
        for step in range(1, steps + 1):
            reserved = allocator.reserved
            play(each[draw.randrange(len(each))], allocator, blocks)
            last_growth = step if allocator.reserved > reserved else last_growth
        rows.append(
            {
                "model": name,
                "batches": SUBJECTS[name].what,
                "Gbit/s": link[0],
                "latency us": link[1],
                "allocator": kind,
                "library": library,
                "allocated MB": allocator.peak_allocated / MB,
                "reserved MB": allocator.peak_reserved / MB,
                "reserved/allocated": allocator.peak_reserved / allocator.peak_allocated,
                "last growth in step": last_growth,
            }
        )
    return rows


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    steps, lengths = (QUICK_STEPS, 3) if arguments.quick else (STEPS, LENGTHS)
    rows = []
    networks = list(NETWORKS)[:1] if arguments.quick else NETWORKS
    for name, link in product(SUBJECTS, networks):
        found = map(partial(rows_of, name=name, link=link, steps=steps, lengths=lengths), LIBRARIES)
        for of_libraries in zip(*found, strict=True):
            rows += of_libraries
            ours, fsdp2 = (next(row for row in of_libraries if row["library"] == each) for each in ("ours", "fsdp2"))
            ours["reserved, ours/fsdp2"] = ours["reserved MB"] / fsdp2["reserved MB"]
    publish("reserved memory", {"ranks": 8, "steps": steps}, COLUMNS, rows, arguments.out)


if __name__ == "__main__":
    main()
