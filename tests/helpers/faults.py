"""Injects named faults into one rank and records the errors that other ranks raise. Run as a program, this file is one
rank of a job without a launcher."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from composable_fsdp import fully_shard
from composable_fsdp.checkpoint import save
from tests._internals import Work
from tests.helpers.injected_faults import Delay, Drop, Effect, Fault, Kill, Raise, inject_faults

LONG_TIMEOUT, SHORT_TIMEOUT = 60.0, 3.0
"""Timeouts of the process group in seconds. No test reaches the first; stragglers exceed the second."""
STRAGGLER_DELAY = SHORT_TIMEOUT + 4.0
"""The delay of a straggler in seconds. It is longer than the other ranks wait for an answer."""


class Layers(nn.Module):
    """Equal layers that run in the order of ``route``; the loss does not depend on those in ``unused``."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(depth)])
        self.route = list(range(depth))
        self.unused: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.route:
            out = torch.tanh(self.layers[index](x))
            x = x + out.detach() * 0 if index in self.unused else out
        return x


def build(timeout: float = LONG_TIMEOUT, backend: str | None = None) -> Any:
    """Return a model that is sharded over a process group with a timeout of ``timeout`` seconds."""
    group = dist.new_group(timeout=timedelta(seconds=timeout), backend=backend)
    mesh = DeviceMesh.from_group(group, "cpu")
    model: Any = Layers()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_schedule(max_fused_bytes=0)
    return model


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    model(torch.ones(2, 16) + dist.get_rank()).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def _inject(model: nn.Module, effect: Effect, label: str) -> Iterator[None]:
    with inject_faults(model, Fault(effect, label, rank=dist.get_world_size() - 1)):
        yield


@contextmanager
def _change_on_last(change: Callable[[], Callable[[], None]]) -> Iterator[None]:
    undo = change() if is_last() else None
    yield
    if undo is not None:
        undo()


def _fail(*_: object) -> None:
    raise ArithmeticError("test failure")


def _raise_in_forward(model: Any) -> Callable[[], None]:
    return cast(Callable[[], None], model.layers[1].register_forward_pre_hook(_fail).remove)


def _raise_in_backward(model: Any) -> Callable[[], None]:
    def watchdog(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(_fail)

    return cast(Callable[[], None], model.layers[0].register_forward_hook(watchdog).remove)


def _allocate_too_much(*_: object) -> None:
    """Allocate 16 GiB under a limit of the address space, as ``ulimit -v`` sets it, of a few MiB more than in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (8 << 20), before[1]))
    try:
        torch.empty(1 << 32)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _exhaust_memory_in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
    output.register_hook(_allocate_too_much)


class Records:
    """A dataset whose second record is damaged."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index:
            raise ValueError(f"record {index} is damaged")
        return index


def _read_records() -> Callable[[], None]:
    for _ in DataLoader(cast(Any, Records()), num_workers=1):
        pass
    return lambda: None


def _change_route(model: Any, *route: int) -> Callable[[], None]:
    before, model.route = model.route, list(route)
    return lambda: setattr(model, "route", before)


def _skip_gradients(model: Any) -> Callable[[], None]:
    model.unused = (1,)
    return lambda: setattr(model, "unused", ())


def _pause_process(launch: Callable[[], Work], outputs: Sequence[torch.Tensor]) -> Work:
    """Stop the process. A shell that it has started resumes it later."""
    with subprocess.Popen(["/bin/sh", "-c", f"sleep {STRAGGLER_DELAY}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)
    return launch()


def _cut_connections(launch: Callable[[], Work], outputs: Sequence[torch.Tensor]) -> Work:
    """Close the connections of this process to other ranks and to the store, but keep it running."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family == socket.AF_INET or connection.type == socket.SOCK_SEQPACKET:
                connection.shutdown(socket.SHUT_RDWR)
    return launch()


FORWARD, REDUCTION = "all-gather of layers.1 in forward", "reduce-scatter of layers.1"

FAULTS: dict[str, Callable[[Any], Any]] = {
    "killed in forward": lambda model: _inject(model, Kill(), FORWARD),
    "killed in backward": lambda model: _inject(model, Kill(), REDUCTION),
    "stopped": lambda model: _inject(model, _pause_process, REDUCTION),
    "cut off": lambda model: _inject(model, _cut_connections, REDUCTION),
    "late": lambda model: _inject(model, Delay(STRAGGLER_DELAY), REDUCTION),
    "leaves out a collective": lambda model: _inject(model, Drop(), FORWARD),
    "fails to launch": lambda model: _inject(model, Raise(MemoryError("no memory for a message")), REDUCTION),
    "raises in forward": lambda model: _change_on_last(lambda: _raise_in_forward(model)),
    "raises in backward": lambda model: _change_on_last(lambda: _raise_in_backward(model)),
    "has no memory in forward": lambda model: _change_on_last(
        lambda: model.layers[1].register_forward_pre_hook(_allocate_too_much).remove
    ),
    "has no memory in backward": lambda model: _change_on_last(
        lambda: model.layers[0].register_forward_hook(_exhaust_memory_in_backward).remove
    ),
    "has a loader that raises": lambda model: _change_on_last(_read_records),
    "swaps modules": lambda model: _change_on_last(lambda: _change_route(model, 1, 0, 2)),
    "skips a module": lambda model: _change_on_last(lambda: _change_route(model, 0, 2)),
    "has other gradients": lambda model: _change_on_last(lambda: _skip_gradients(model)),
}


def inject_fault(fault: str, model: Any) -> Any:
    """Return a context in which the last rank has ``fault``."""
    return FAULTS[fault](model)


def save_on_full_disk(folder: str, model: nn.Module) -> None:
    """Save a checkpoint. The last rank writes to a full device from its second write on."""

    def create(name: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = original(name, mode, *arguments, **options)
        if is_last() and mode == "xb":
            full = os.open("/dev/full", os.O_WRONLY)
            file.write(b"x")
            file.flush()
            os.dup2(full, file.fileno())
            os.close(full)
        return file

    original = open
    with mock.patch("builtins.open", create):
        save(folder, model)


@dataclass(frozen=True)
class RaisedError:
    """The error that a rank raised in the step with the fault, and the seconds until then."""

    kind: str
    text: str
    seconds: float


def error_after(fault: str, timeout: float = LONG_TIMEOUT) -> RaisedError:
    """Run two steps without a fault, then one with ``fault``."""
    model = build(timeout)
    for _ in range(2):
        step(model)
    with inject_fault(fault, model):
        return error_of(lambda: step(model))


def error_of(function: Callable[[], None]) -> RaisedError:
    begin = time.monotonic()
    try:
        function()
    except BaseException as error:
        return RaisedError(type(error).__name__, str(error), time.monotonic() - begin)
    return RaisedError("", "", time.monotonic() - begin)


def run_as_program(fault: str, rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    model = build()
    for _ in range(2):
        step(model)
    if is_last() and fault == "has fewer batches":
        return
    if is_last() and fault == "keeps another waiting":
        (folder / "waiting").touch()
        time.sleep(LONG_TIMEOUT)
    if is_last():
        with inject_fault(fault, model):
            step(model)
    error = error_of(lambda: step(model))
    (folder / f"error {rank}").write_text(json.dumps(asdict(error)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_as_program(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
