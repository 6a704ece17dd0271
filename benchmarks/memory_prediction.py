"""Compares the predicted peaks of memory of steps with the bytes that a simulated rank holds, counted exactly.

    OMP_NUM_THREADS=1 python benchmarks/memory_prediction.py

The prediction is that of ``schedule().choice``, with given costs of several networks and with settings of the user.
Tensors are fake and counted after every operation (``sim/ledger.py``). Both figures leave out what is held between
steps, the shards, and activations: batches are so small that their activations are negligible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from libraries import LIBRARIES, fake_ranks, shard
from models import CASES, LARGE_BLOCKS, SMALL_BLOCKS, Case, Chain, Experts
from report import parser, publish
from schedule_sweep import MODELS
from sim.device import Device
from sim.ledger import Ledger
from sim.network import Network, simulated_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp.plugins.tuning import AxisCosts, CollectiveCost, Costs

MB = 1e6
WARM_UP = 3
EXPERTS, EXPERT_DIM = 97, 256
COLUMNS = [
    *("model", "ranks", "waits", "dtype", "settings", "chosen", "predicted MB", "peak MB"),
    *("predicted/peak", "error"),
]


@dataclass(frozen=True)
class Subject:
    """A model on a mesh of ``ranks``.

    Attributes:
        meshes: returns the meshes, given that of all ranks. Called outside of a mode for fake tensors.
        build: returns the sharded model, given the meshes and whether to compute in bf16.
    """

    ranks: int
    meshes: Callable[[DeviceMesh], Any]
    build: Callable[[Any, bool], nn.Module]
    batch: Callable[[], torch.Tensor]
    dtypes: tuple[str, ...] = ("fp32", "bf16")


def of_case(case: Case, ranks: int, batch: Callable[[], torch.Tensor]) -> Subject:
    """Return the model of ``case``."""

    def build(mesh: DeviceMesh, bf16: bool) -> nn.Module:
        model = case.build()
        shard(LIBRARIES["ours"], model, case.blocks(model), mesh, bf16=bf16)
        return model

    return Subject(ranks, lambda mesh: mesh, build, batch)


def of_sweep(name: str, ranks: int, tokens: int = 1) -> Subject:
    """Return a model of the sweep of schedules."""
    model = replace(MODELS[name], batch_size=1, length=tokens)
    return Subject(
        ranks, lambda _: model.meshes(ranks), lambda meshes, _: model.sharded("ours", *meshes), model.batch, ("bf16",)
    )


WIDE_EXPERTS = Case(
    "", lambda: Chain([Experts(EXPERT_DIM, EXPERTS) for _ in range(4)]), lambda _: torch.zeros(EXPERTS, EXPERT_DIM)
)


def token() -> torch.Tensor:
    return torch.zeros(1, 1, dtype=torch.int64)


SUBJECTS = {
    "gpt": of_case(CASES["gpt-32"], 8, token),
    "embedding": of_case(CASES["embedding"], 8, token),
    "experts": of_case(WIDE_EXPERTS, 8, lambda: torch.zeros(EXPERTS, EXPERT_DIM)),
    "small blocks": of_case(SMALL_BLOCKS, 8, lambda: torch.zeros(1, 1, 256)),
    "small blocks, many ranks": of_case(SMALL_BLOCKS, 4096, lambda: torch.zeros(1, 1, 256)),
    "large blocks": of_case(LARGE_BLOCKS, 8, lambda: torch.zeros(1, 4096)),
    **{
        name: of_sweep(name, 64, 4 if "experts" in name else 1)
        for name in ("8 blocks of 4096, batch 2", "200 tiny modules", "experts on their own mesh", "hybrid, 8 replicas")
    },
}
SETTINGS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "default": (0, {}),
    "latency of 5 ms": (5000, {}),
    "no prefetching": (0, {"prefetch_limit": 0}),
    "3 prefetched": (0, {"prefetch_limit": 3}),
    "nothing fused": (5000, {"max_fused_bytes": 0}),
}
"""The latencies in microseconds, and the settings of the user."""


@contextmanager
def ranks_on(waits: str, ranks: int) -> Iterator[DeviceMesh]:
    """Yield a mesh of ``ranks``. Collectives are waited for on ``"streams"``, or by the ``"host"``."""
    network = Network(Device(flops=1.0, bandwidth=1.0))
    with simulated_ranks(network, ranks) if waits == "streams" else fake_ranks(ranks) as mesh:
        yield mesh


def rows_of(name: str, waits: str, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield the predicted and the counted peak of a model with each of ``SETTINGS``."""
    subject, ledger = SUBJECTS[name], Ledger()
    with ranks_on(waits, subject.ranks) as mesh:
        meshes = subject.meshes(mesh)
        with FakeTensorMode(allow_non_fake_inputs=True), ledger:
            batch = subject.batch()
            if dtype == "bf16" and batch.is_floating_point():
                batch = batch.bfloat16()
            model: Any = subject.build(meshes, dtype == "bf16")
            for settings, (latency, values) in SETTINGS.items():
                given = {"prefetch_limit": None, "max_fused_bytes": None, **values}
                model.set_schedule(**given, costs=costs_of(latency))
                row = {"model": name, "ranks": subject.ranks, "waits": waits, "dtype": dtype, "settings": settings}
                yield row | peaks(model, batch, ledger)


def costs_of(latency: float) -> Costs:
    """Return the costs of a network with a ``latency`` in microseconds: with 0, the default settings are chosen."""
    cost = CollectiveCost(latency * 1e-6, 5e10)
    return Costs({"": AxisCosts(cost, cost, cost)})


def peaks(model: Any, batch: torch.Tensor, ledger: Ledger) -> dict[str, Any]:
    """Run steps, and return the predicted and the counted peak of the last one."""
    before = 0
    for _ in range(WARM_UP):
        model.zero_grad()
        ledger.forget_peak()
        before = ledger.held
        model(batch).sum().backward()
    choice = model.schedule().choice
    peak, predicted = (ledger.peak - before) / MB, choice.peak_bytes / MB
    chosen = f"zero_copy={choice.settings.zero_copy}, grad_buckets={choice.settings.grad_buckets}, "
    chosen += f"prefetch={choice.settings.prefetch_limit}, fused={choice.settings.max_fused_bytes >> 10} KiB"
    ratio = predicted / peak
    return {
        "chosen": chosen,
        "predicted MB": predicted,
        "peak MB": peak,
        "predicted/peak": ratio,
        "error": abs(ratio - 1),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", default="", help="only models whose names contain this text")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in (name for name in SUBJECTS if arguments.models in name):
        for waits in ("streams", "host"):
            for dtype in SUBJECTS[name].dtypes:
                rows += (found := list(rows_of(name, waits, dtype)))
                print(name, waits, dtype, median(row["error"] for row in found), flush=True)
        if arguments.quick:
            break
    for measure in ("median", "largest"):
        errors = [row["error"] for row in rows if "error" in row]
        rows.append({"model": f"{measure} of all", "error": median(errors) if measure == "median" else max(errors)})
    publish("predicted against counted peaks of memory", {"activations": "none"}, COLUMNS, rows, arguments.out)


if __name__ == "__main__":
    main()
