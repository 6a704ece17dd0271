"""Measures the host time that sharding adds to forward and backward of one group, against torch's FSDP2.

    OMP_NUM_THREADS=1 python benchmarks/host_overhead.py

The process group is fake and the tensors are tiny, so the time is that of Python. The steps of both libraries run in
turn. Overhead is the time of the step minus that of the same model without sharding, per group. With ``--alone`` all
steps of a library run in sequence, so that its code and objects stay in the processor's caches. The floor is a step
written by hand with torch's own calls alone (``hand_written.py``). ``--calls`` counts the Python calls of this library
instead, which are the same in every run. ``--profiled`` measures the same steps with and without
``torch.profiler``, in turn.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from hand_written import shard_by_hand
from libraries import LIBRARIES, fake_ranks, shard
from report import interleaved, parser, publish, ratios, sequential, spread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

import composable_fsdp

GROUPS = 12
WORLD = 4

PARTS = {
    "begin_call": "before forward",
    "pre_forward": "before forward",
    "take_inputs": "before forward",
    "finish_call": "after forward",
    "on_output_gradient": "before backward",
    "hook": "gradients",
    "on_last_input_gradient": "after backward",
    "gather": "gathers",
}
"""The functions of the library that begin a part of a step, and what the table calls it. The rest is the end."""


class Layer(nn.Module):
    """One group of ``parameters`` small vectors."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(16) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def build(parameters: int, library: str | None, mesh: DeviceMesh, *, bf16: bool) -> nn.Module:
    model = nn.Sequential(*(Layer(parameters) for _ in range(GROUPS)))
    if library is not None:
        shard(LIBRARIES[library], model, list(model), mesh, bf16=bf16)
    elif bf16:
        model.bfloat16()
    return model


def step(
    model: nn.Module, x: torch.Tensor, run_once: Callable[[torch.Tensor], None] | None = None
) -> Callable[[], float]:
    """Return forward and backward, or ``run_once``, as a variant that returns its CPU microseconds per group."""

    def run() -> float:
        begin = time.process_time()
        if run_once is None:
            model(x).sum().backward()
        else:
            run_once(x)
        taken = time.process_time() - begin
        for parameter in model.parameters():
            parameter.grad = None
        return taken / GROUPS * 1e6

    return run


def measure(parameters: int, mesh: DeviceMesh, rounds: int, *, bf16: bool, alone: bool) -> dict[str, Any]:
    x = torch.randn(4, 16, requires_grad=True, dtype=torch.bfloat16 if bf16 else torch.float32)
    libraries = {"none": None, "ours": "ours", "fsdp2": "fsdp2"}
    variants = {name: step(build(parameters, library, mesh, bf16=bf16), x) for name, library in libraries.items()}
    if not bf16:
        by_hand = build(parameters, None, mesh, bf16=False)
        variants["floor"] = step(by_hand, x, shard_by_hand(by_hand, list(by_hand), mesh))
    samples = (sequential if alone else interleaved)(variants, rounds, warm_up=5)
    base = spread(samples["none"])["median"]
    ours, fsdp2 = ([taken - base for taken in samples[name]] for name in ("ours", "fsdp2"))
    floor = [taken - base for taken in samples.get("floor", ())]
    columns = ("floor us", "floor/fsdp2", "ours/floor")
    lowest = (spread(floor), ratios(floor, fsdp2), ratios(ours, floor)) if floor else ("", "", "")
    return {
        "parameters": parameters,
        "dtype": "bf16" if bf16 else "fp32",
        "ours us": spread(ours),
        "fsdp2 us": spread(fsdp2),
        "ours/fsdp2": ratios(ours, fsdp2),
        **dict(zip(columns, lowest, strict=True)),
    }


def profiled(run: Callable[[], float]) -> Callable[[], float]:
    """Return ``run`` under an active profiler, whose start and end do not count."""

    def run_profiled() -> float:
        with profile(activities=[ProfilerActivity.CPU]):
            return run()

    return run_profiled


def measure_profiled(parameters: int, mesh: DeviceMesh, rounds: int) -> dict[str, Any]:
    """Return the host time of a group without and with a profiler, forward and backward of its module included."""
    x = torch.randn(4, 16, requires_grad=True)
    plain = {name: step(build(parameters, name, mesh, bf16=False), x) for name in ("ours", "fsdp2")}
    variants = {
        name: run for each, one in plain.items() for name, run in ((each, one), (f"{each} profiled", profiled(one)))
    }
    samples = interleaved(variants, rounds, warm_up=5)
    times = {f"{name} us": spread(samples[name]) for name in variants}
    growth = {f"{name}: profiled/plain": ratios(samples[f"{name} profiled"], samples[name]) for name in plain}
    return {"parameters": parameters, **times, **growth}


def count_calls(parameters: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the Python calls of this library in a steady step, per group and part of the step."""
    run = step(build(parameters, "ours", mesh, bf16=False), torch.randn(4, 16, requires_grad=True))
    for _ in range(8):
        run()
    package, calls = os.path.dirname(composable_fsdp.__file__), Counter[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(package):
            return
        each: FrameType | None = frame
        while each is not None and not (each.f_code.co_name in PARTS and each.f_code.co_filename.startswith(package)):
            each = each.f_back
        calls["end" if each is None else PARTS[each.f_code.co_name]] += 1

    sys.setprofile(note)
    run()
    sys.setprofile(None)
    by_part = {part: round(calls[part] / GROUPS, 1) for part in (*PARTS.values(), "end")}
    return {"parameters": parameters, "all": round(calls.total() / GROUPS, 1), **by_part}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--alone", action="store_true", help="all steps of a library one after the other")
    options.add_argument("--calls", action="store_true", help="count Python calls, and measure no time")
    options.add_argument("--profiled", action="store_true", help="with and without a profiler")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    if arguments.calls:
        with fake_ranks(WORLD) as mesh:
            counted = [count_calls(size, mesh) for size in (1, 4, 12, 48)]
        publish("host overhead: calls per group", {"ranks": WORLD}, list(counted[0]), counted, arguments.out)
        return
    rounds, sizes = (5, (4,)) if arguments.quick else (arguments.rounds, (1, 4, 12, 48))
    if arguments.profiled:
        with fake_ranks(WORLD) as mesh:
            rows = [measure_profiled(size, mesh, rounds) for size in sizes]
        publish("host time under a profiler", {"ranks": WORLD}, list(rows[0]), rows, arguments.out)
        return
    with fake_ranks(WORLD) as mesh:
        rows = [
            measure(size, mesh, rounds, bf16=bf16, alone=arguments.alone) for bf16 in (False, True) for size in sizes
        ]
    columns = ["parameters", "dtype", "ours us", "fsdp2 us", "ours/fsdp2", "floor us", "floor/fsdp2", "ours/floor"]
    settings = {"ranks": WORLD, **({"each library": "alone"} if arguments.alone else {})}
    publish("host overhead per group", settings, columns, rows, arguments.out)


if __name__ == "__main__":
    main()
