"""Measures all-gather and reduce-scatter of one group by its size, including all copies of parameters and gradients.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/group_transfers.py

The group has twelve parameters with the shapes of a transformer block. The all-gather is ``unshard``. The
reduce-scatter is all that a library does after autograd has set the gradients. Both include the necessary copies,
allocations and waits. The measured backward also has hooks and autograd, but its gradients exist already.

``--alone`` runs all rounds of a library in sequence, so that its code and objects stay in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from libraries import LIBRARIES, shard
from report import interleaved, parser, publish, ratios, sequential, spread, timed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_fsdp._core.backward import reduce_together
from composable_fsdp._core.memory import CommStreams
from composable_fsdp._core.state import state_of

KIB = [64, 256, 1024, 2048, 4096, 16384, 65536]
VECTORS = 8
WARM_UP = 10
KINDS = ("all-gather", "reduce-scatter", "backward")


class Ready(torch.autograd.Function):
    """Return ``x`` unchanged. Backward sets the prepared gradients of the parameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        given = tuple(ctx.gradients)
        ctx.gradients.clear()  # gradients without other references are used without a copy
        return gradient, None, *given


class Group(nn.Module):
    """Make parameters of about ``kib`` in total: four matrices with sizes as 3 : 1 : 4 : 4, and vectors."""

    def __init__(self, kib: int) -> None:
        super().__init__()
        width = max(16, int((kib * 1024 / 4 / 12) ** 0.5) // 16 * 16)
        matrices = [torch.randn(rows * width, width) for rows in (3, 1, 4, 4)]
        self.weights = nn.ParameterList([*matrices, *(torch.randn(width) for _ in range(VECTORS))])
        self.shapes = [weight.shape for weight in self.weights]
        self.gradients: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Ready.apply(x, self.gradients, *self.weights)


def library_reduction(model: nn.Module) -> Callable[[], None]:
    """Return a function that reduces the gradients of the parameters of ``model``."""
    group, streams = state_of(model).group, CommStreams(torch.device("cpu"))

    def reduce() -> None:
        group.notice_gradients()
        group.reshard()
        reduction = reduce_together((group,), streams)
        assert reduction is not None
        reduction.run()
        reduction.complete()

    return reduce


def reduce_by_fsdp2(model: Any) -> Callable[[], None]:
    (group,) = model._get_fsdp_state()._fsdp_param_groups

    def reduce() -> None:
        group.post_backward()
        group.finalize_backward()

    return reduce


def transfers(library: str, kib: int, mesh: DeviceMesh) -> dict[str, Callable[[], float]]:
    """Return variants that return the milliseconds of each of ``KINDS``."""
    model = Group(kib)
    shard(LIBRARIES[library], model, [], mesh, bf16=False)
    x = torch.zeros(1, requires_grad=True)
    model(x)  # the first forward builds what is built once
    model.reshard()
    reduce_gradients = {"ours": library_reduction, "fsdp2": reduce_by_fsdp2}[library](model)

    def gather() -> float:
        taken = timed(model.unshard)()
        model.reshard()
        return taken

    def reduce() -> float:
        model.unshard()
        for weight in model.weights:
            weight.grad = torch.ones(weight.shape)
        taken = timed(reduce_gradients)()
        for parameter in model.parameters():
            parameter.grad = None
        return taken

    def backward() -> float:
        model.gradients.extend(torch.ones(shape) for shape in model.shapes)
        output = model(x)
        taken = timed(output.sum().backward)()
        for parameter in model.parameters():
            parameter.grad = None
        return taken

    return {"all-gather": gather, "reduce-scatter": reduce, "backward": backward}


def measure(kib: int, mesh: DeviceMesh, rounds: int, *, alone: bool) -> dict[str, Any]:
    built = {library: transfers(library, kib, mesh) for library in LIBRARIES}
    row: dict[str, Any] = {"KiB": kib}
    for kind in KINDS:
        variants = {library: kinds[kind] for library, kinds in built.items()}
        taken = (sequential if alone else interleaved)(variants, rounds, warm_up=WARM_UP)
        longest = {library: slowest(samples) for library, samples in taken.items()}
        row |= {f"{kind}, {library} ms": spread(samples) for library, samples in longest.items()}
        row[f"{kind}, ours/fsdp2"] = ratios(longest["ours"], longest["fsdp2"])
    return row


def slowest(samples: list[float]) -> list[float]:
    """Return the samples of all ranks, reduced sample by sample."""
    times = torch.tensor(samples)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=25)
    options.add_argument("--kib", default=",".join(map(str, KIB)), help="sizes of groups")
    options.add_argument("--alone", action="store_true", help="all rounds of a library one after the other")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    kib = [int(size) for size in arguments.kib.split(",")]
    sizes, rounds = (kib[:2], 3) if arguments.quick else (kib, arguments.rounds)
    rows = [measure(kib, mesh, rounds, alone=arguments.alone) for kib in sizes]
    if dist.get_rank() == 0:
        columns = ["KiB", *(f"{kind}, {what}" for kind in KINDS for what in ("ours ms", "fsdp2 ms", "ours/fsdp2"))]
        settings = {"ranks": ranks, "dtype": "fp32", **({"each library": "alone"} if arguments.alone else {})}
        publish("transfers of a group", settings, columns, rows, arguments.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
