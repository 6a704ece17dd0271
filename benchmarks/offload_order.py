"""Shows what waits for what in a step with offloaded shards, beside torch's FSDP2, in virtual time.

    OMP_NUM_THREADS=1 python benchmarks/offload_order.py

The libraries' own code launches the work of rank 0 of 2 on a device that computes only when work would end (``sim/``):
450 TFLOP/s, 3.5 TB/s of memory, 25 GB/s to the host and as much back, 100 GB/s between ranks, 20 GB/s of host memory.
The device is torch's PrivateUse1, so that copies to and from the host are those of an accelerator. Shards rest in
page-locked host memory, where SGD updates them. A step follows two others, as in a training.

A row of the ledger is work that follows itself without a gap. ``after`` names what ends when it begins: what it waited
for; of a wait of the host, what ends with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from libraries import LIBRARIES
from report import parser, publish
from sim.device import WAIT, Charging, Device, Span
from sim.network import VIRTUAL, Network, simulated_ranks
from tables import table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from composable_fsdp.errors import OffloadBackendWarning

__all__ = ["COLUMNS", "measure"]

WIDTH, RANKS = 4096, 2
LINK, HOST, NETWORK, LATENCY = 25e3, 20e3, 100e3, 20.0
"""Bytes per microsecond, and microseconds."""
MODELS = {"one group of 18": (1, 18), "6 groups of 3": (6, 3)}
"""Groups, and the square matrices of each."""
KINDS = {
    "HtoD": ("copy HtoD",),
    "DtoH": ("copy DtoH",),
    "collectives": ("all-gather", "reduce-scatter"),
    "products": ("mm",),
    "waits of the host": (WAIT,),
    "optimizer": ("_foreach_add_",),
}
COLUMNS = ["model", "library", "begin ms", "end ms", "where", "work", "after"]


class Offloading(Charging):
    """Charges copies between host and device to the link, and the host's own work to the host."""

    def _charge(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        places = {each.device.type for each in tensors if each.dim()}
        name = func.overloadpacket.__name__
        if len(places) == 2:
            to_device = result.device.type == VIRTUAL
            what = "HtoD" if to_device else "DtoH"
            stream = self._device.current
            stream.run(result.nbytes / LINK, f"copy {what}", what)
            is_asynchronous = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
            if not is_asynchronous:
                stream.synchronize()
        elif places == {"cpu"}:
            self._device.work_on_host(self._duration(func, args, kwargs, result) * self._device.bandwidth / HOST, name)
        else:
            super()._charge(func, args, kwargs, result)


_module = ModuleType(VIRTUAL)
"""The module of the device; its streams are those of the device that is open."""
vars(_module).update(
    current_device=lambda: 0,
    device_count=lambda: 1,
    set_device=lambda device: None,
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
)


@contextmanager
def pinned() -> Iterator[None]:
    """Take all host memory for page-locked: fake tensors have none."""
    with (
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        mock.patch.object(torch.Tensor, "is_pinned", return_value=True),
    ):
        yield


def matrix_layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=VIRTUAL) for _ in range(count)))


def spans_of(library: str, groups: int, matrices: int) -> list[Span]:
    """Return the work of the third step."""
    device = Device(flops=450e6, bandwidth=3.5e6)
    network = Network(device, NETWORK, LATENCY, shared=True)
    of = LIBRARIES[library]
    with (
        simulated_ranks(network, RANKS, _module, VIRTUAL) as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
        pinned(),
        warnings.catch_warnings(action="ignore", category=OffloadBackendWarning),
    ):
        model = nn.Sequential(*(matrix_layers(matrices) for _ in range(groups)))
        batch = torch.empty(WIDTH, WIDTH, device=VIRTUAL)
        for each in (*model, model) if groups > 1 else (model,):
            of.fully_shard(each, mesh=mesh, offload_policy=of.CPUOffloadPolicy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        with Offloading(device):
            for _ in range(3):
                network.finish()
                device.log = []
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert device.log is not None
    return device.log


def joined(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Return the work, and how many parts it has: parts of one name that follow each other without a gap are one."""
    found: list[tuple[Span, int]] = []
    last: dict[str, int] = {}
    for span in spans:
        index = last.get(span.place, -1)
        if index >= 0:
            before, count = found[index]
            if before.what == span.what and abs(before.end - span.begin) < 1e-6:
                found[index] = before._replace(end=span.end), count + 1
                continue
        last[span.place] = len(found)
        found.append((span, 1))
    return sorted(found, key=lambda each: each[0].begin)


def ledger(work: Sequence[tuple[Span, int]]) -> list[dict[str, Any]]:
    """Return the rows of a step, without work of less than ``LATENCY``."""
    rows = []
    for span, count in work:
        if span.end - span.begin < LATENCY:
            continue
        moment = span.end if span.what == WAIT else span.begin
        ended = [f"{each.what} ({each.place})" for each, _ in work if each is not span and is_at(each, moment)]
        place = {"begin ms": span.begin / 1e3, "end ms": span.end / 1e3, "where": span.place}
        rows.append(place | {"work": f"{count} x {span.what}" if count > 1 else span.what, "after": ", ".join(ended)})
    return rows


def is_at(span: Span, moment: float) -> bool:
    """Return whether work of some length ends at ``moment``."""
    return abs(span.end - moment) < 1e-6 < span.end - span.begin


def totals(work: Sequence[tuple[Span, int]]) -> dict[str, float]:
    """Return the milliseconds of a step, and those of each kind of its work."""
    times = {"step ms": max(span.end for span, _ in work) / 1e3}
    for kind, names in KINDS.items():
        times[f"{kind} ms"] = sum(span.end - span.begin for span, _ in work if span.what in names) / 1e3
    return times


def measure() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the totals and the ledgers of all models and both libraries.

    A process can call it once, since torch's PrivateUse1 gets its name only once.
    """
    _setup_privateuseone_for_python_backend(VIRTUAL, _module)
    sums, ledgers = [], []
    for model in MODELS:
        for library in LIBRARIES:
            work = joined(spans_of(library, *MODELS[model]))
            name = {"model": model, "library": library}
            sums.append(name | totals(work))
            ledgers += [name | row for row in ledger(work)]
    return sums, ledgers


def main() -> None:
    arguments = parser(__doc__).parse_args()
    settings = {"ranks": RANKS, "GB/s to the host": LINK / 1e3, "GB/s between ranks": NETWORK / 1e3}
    sums, ledgers = measure()
    print(table(ledgers, COLUMNS))
    publish("order of work with offloaded shards", settings, list(sums[0]), sums, arguments.out)


if __name__ == "__main__":
    main()
