"""Sweeps ``bucket_bytes`` of ``Muon`` and of ``offload_optimizer`` on a model of machines, from 8 to 4,096 ranks.

    python benchmarks/bucket_sweep.py

Times are computed, not measured: a message takes a latency, a time for each rank and one for each byte, and the owners
of a bucket compute at the same time. Owners and buckets are those of the library. For each size of a bucket, a row has
the time of a step relative to the best size on the same machine, over all models, ranks, latencies and bandwidths.

``Muon`` sends matrices in bfloat16, and the next bucket is on its way while one is computed and the last one returns.
``offload_optimizer`` moves 8 bytes for each parameter in each direction with AdamW. The update of a bucket takes the
bandwidth of the device's memory, or the host's time to launch it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache
from itertools import product
from math import ceil, prod
from typing import Any, NamedTuple

from report import parser, publish

from composable_fsdp.optim._owner_plan import assign_owners, cut_buckets, message_limit, newton_schulz_cost

MIB, GB = 1 << 20, 1e9
BUCKETS = tuple(MIB << power for power in range(4, 11))
RANKS = (8, 64, 512, 4096)
MODELS = {"1B": (16, 2048, 8192, 512), "8B": (32, 4096, 14336, 1024), "70B": (80, 8192, 28672, 1024)}
"""Layers, width, width of the feed-forward part, and width of keys and values, of Llama 3."""

LATENCIES = (10e-6, 50e-6, 200e-6)
"""Seconds of any message."""
PER_RANK = (0.1e-6, 1e-6)
"""Seconds for each rank of an all-to-all."""
BANDWIDTHS = (12.5 * GB, 50 * GB, 200 * GB)
"""Bytes per second of a rank's network."""
FLOPS = (200e12, 600e12)
NS_STEPS = 5

HOST_LINKS = (6 * GB, 25 * GB, 50 * GB)
"""Bytes per second between host and device, in each direction: a disk, PCIe 4, PCIe 5."""
LAUNCHES = (50e-6, 200e-6, 1e-3)
"""Seconds of the host for a bucket: the launch of its update, and the thread that moves it."""
DEVICE_MEMORY = 2000 * GB
TRAFFIC = 2.5
"""Bytes that an update of AdamW moves in the device's memory for each byte of state."""
STATE_BYTES = 8
"""Bytes of state for each parameter, of AdamW."""


class Bucket(NamedTuple):
    """What the slowest rank sends or receives, and computes."""

    nbytes: float
    cost: float


def matrices(model: str) -> list[tuple[int, int]]:
    layers, width, hidden, kv = MODELS[model]
    return ([(width, width)] * 2 + [(kv, width)] * 2 + [(hidden, width)] * 3) * layers


@cache
def muon_buckets(model: str, ranks: int, bucket_bytes: int) -> list[Bucket]:
    shapes = matrices(model)
    costs = [newton_schulz_cost(*shape) for shape in shapes]
    whole = [2 * prod(shape) for shape in shapes]
    owners = assign_owners(costs, ranks)
    limit = message_limit(bucket_bytes, max(whole))
    found = []
    for indices in cut_buckets(costs, owners, whole, limit):
        owned: dict[int, tuple[float, float]] = {}
        for index in indices:
            nbytes, cost = owned.get(owners[index], (0, 0))
            owned[owners[index]] = nbytes + whole[index], cost + costs[index]
        sent = max(nbytes for nbytes, _ in owned.values())
        found.append(Bucket(sent, max(cost for _, cost in owned.values())))
    return found


def muon_seconds(buckets: Sequence[Bucket], exchange: Sequence[float], flops: float) -> float:
    """Return the time of a step, in which messages are sent one after the other, in the order of ``Exchange.run``."""
    network = arrived = exchange[0]
    computed = 0.0
    for number, bucket in enumerate(buckets):
        start = max(computed, arrived)
        if number + 1 < len(buckets):
            network = arrived = max(network, start) + exchange[number + 1]
        computed = start + 2 * NS_STEPS * bucket.cost / flops
        network = max(network, computed) + exchange[number]
    return network


def muon_step(model: str, ranks: int, latency: float, per_rank: float, bandwidth: float, flops: float) -> list[float]:
    times = []
    for bucket_bytes in BUCKETS:
        buckets = muon_buckets(model, ranks, bucket_bytes)
        exchange = [latency + per_rank * ranks + bucket.nbytes / bandwidth for bucket in buckets]
        times.append(muon_seconds(buckets, exchange, flops))
    return times


def offload_step(model: str, ranks: int, link: float, launch: float) -> list[float]:
    state = STATE_BYTES * sum(map(prod, matrices(model))) / ranks
    times = []
    for bucket_bytes in BUCKETS:
        sizes = [min(bucket_bytes, state - begin) for begin in range(0, ceil(state), bucket_bytes)]
        arrived = updated = returned = 0.0
        left: list[float] = []
        for number, nbytes in enumerate(sizes):
            slot_is_free = left[number - 2] if number > 1 else 0.0
            arrived = max(arrived, slot_is_free) + nbytes / link
            updated = max(updated, arrived) + max(launch, TRAFFIC * nbytes / DEVICE_MEMORY)
            returned = max(returned, updated) + nbytes / link
            left.append(returned)
        times.append(returned)
    return times


def rows_of(steps: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    relative = [[seconds / min(step) for seconds in step] for step in steps]
    rows = []
    for number, bucket_bytes in enumerate(BUCKETS):
        ratios = sorted(each[number] for each in relative)
        rows.append(
            {
                "bucket MiB": bucket_bytes // MIB,
                "median": round(statistics.median(ratios), 3),
                "9 of 10": round(ratios[int(0.9 * (len(ratios) - 1))], 3),
                "worst": round(ratios[-1], 3),
            }
        )
    return rows


def main() -> None:
    options = parser(__doc__)
    arguments = options.parse_args()
    models, ranks = (["8B"], RANKS[:2]) if arguments.quick else (list(MODELS), RANKS)
    muon = [muon_step(*each) for each in product(models, ranks, LATENCIES, PER_RANK, BANDWIDTHS, FLOPS)]
    offload = [offload_step(*each) for each in product(models, ranks, HOST_LINKS, LAUNCHES)]
    steps = {"Muon": muon, "offload_optimizer, AdamW": offload}
    rows = [{"of": name, **row} for name, found in steps.items() for row in rows_of(found)]
    settings = {"models": ", ".join(models), "ranks": ", ".join(map(str, ranks))}
    publish("bucket_bytes, on a model", settings, list(rows[0]), rows, arguments.out)


if __name__ == "__main__":
    main()
