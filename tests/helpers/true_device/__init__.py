"""A device of tests: ``torch.device("simulated")``, by torch's PrivateUse1. Its memory is memory of the host, and the
kernels of the CPU compute on it at once, on the thread that calls them. What is real is everything that depends on the
kind of a device: the dispatch key, the memory and its allocator, pinned memory, copies between host and device, the
threads of autograd, generators, the module of the device, and a backend of its own for process groups. Streams and
events exist and order nothing: ``simulated_accelerator()`` is for that."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist

DEVICE = "simulated"
BACKEND = "simulated_gloo"
SOURCE = Path(__file__).with_name("device.cpp")


def build() -> Path:
    """Return the compiled extension. It is compiled once for each source and version of torch, in about 20 s of CPU."""
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / "composable_fsdp_true_device" / key / "true_device.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-w", "-DTORCH_EXTENSION_NAME=true_device"]
        command += [
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{each}" for each in include),
        ]
        command += [str(SOURCE), "-o", str(made), f"-L{root / 'lib'}"]
        command += ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        shutil.move(made, path)
    return path


def _device_index(device: Any) -> int:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return _extension().current_device() if index is None else index


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        on = torch.device(DEVICE, _device_index(device))
        return super().__new__(cls, device=on, priority=priority)


def _event(enable_timing: bool = False, **_: Any) -> torch.Event:
    return torch.Event(device=torch.device(DEVICE), enable_timing=enable_timing)


class _Module(ModuleType):
    Stream, Event = Stream, staticmethod(_event)

    def __init__(self, extension: Any) -> None:
        super().__init__(f"torch.{DEVICE}")
        self.device_count = extension.device_count
        self.current_device = extension.current_device
        self.memory_allocated = lambda device=None: extension.memory_allocated()
        self.counts = extension.counts
        self.default_generators = tuple(map(extension.default_generator, range(extension.device_count())))

    def set_device(self, device: Any) -> None:
        _extension().set_device(_device_index(device))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None: ...

    def manual_seed(self, seed: int) -> None:
        self.default_generators[self.current_device()].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return cast(torch.Tensor, self.default_generators[_device_index(device)].get_state())

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self.default_generators[_device_index(device)].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(torch.device(DEVICE, _device_index(device)))

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(_device_index(device))


def _create_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore(DEVICE, store), rank, size, timeout)
    return _extension().device_group(gloo)


@functools.cache
def _extension() -> Any:
    spec = importlib.util.spec_from_file_location("true_device", build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def register() -> Any:
    """Make the device known to torch in this process, for good, and return its module."""
    torch.utils.rename_privateuse1_backend(DEVICE)
    module = _Module(_extension())
    torch._register_device_module(DEVICE, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(BACKEND, _create_group, devices=[DEVICE])
    return module
