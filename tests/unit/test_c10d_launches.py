"""Launches over process groups that keep NCCL's contract: their classes, dtypes, coalesced calls and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from composable_fsdp import fully_shard
from tests._internals import (
    BackendCapabilities,
    Collective,
    ProcessGroupCommunicator,
    ReduceOp,
    Transfer,
    backend_capabilities,
    device_capabilities,
)
from tests.simulation import simulated_accelerator
from tests.simulation.stream_group import StreamGroup

OF_NCCL = {
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
}
SIZE = 2


class _Recorded(StreamGroup):
    """All ranks have the data of this one. Each launch is recorded: its kind, the dtypes, and the current stream."""

    launches: list[tuple[str, list[torch.dtype], str]]

    def _launch(self, operation: str, reads: Sequence[torch.Tensor], *args: Any) -> Any:
        for tensor in reads:
            if tensor.dtype not in OF_NCCL:
                raise TypeError(f"Unconvertible NCCL type {tensor.dtype}")
        work = super()._launch(operation, reads, *args)
        self.launches.append((operation, [tensor.dtype for tensor in reads], str(torch.cpu.current_stream())))
        return work

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], given: Any
    ) -> Any:
        return self._coalesced("all_gather", self.all_gather_single, outputs, inputs, given)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], given: Any
    ) -> Any:
        return self._coalesced("reduce_scatter", self.reduce_scatter_single, outputs, inputs, given)

    def _coalesced(self, kind: str, each: Callable[..., Any], outputs: Any, inputs: Any, options: Any) -> Any:
        if len({tensor.dtype for tensor in inputs}) > 1:
            raise TypeError("Tensors must have identical type")
        works = [each(output, input, options) for output, input in zip(outputs, inputs, strict=True)]
        self.launches[-len(works) :] = [(kind, [tensor.dtype for tensor in inputs], self.launches[-1][-1])]
        return works[-1]


class ProcessGroupNCCL(_Recorded):
    """Has the name by which torch's class is known."""


class ProcessGroupNCCL2(_Recorded):
    """Has the name by which torch's class is known."""


class _BackendWrapper(_Recorded):
    """Has the name by which the class of torchcomms is known."""


CLASSES = {"nccl_as_of_2_13": ProcessGroupNCCL, "nccl2_double": ProcessGroupNCCL2, "torchcomms_double": _BackendWrapper}


def _creator(kind: type[StreamGroup]) -> Callable[[dist.Store, int, int, timedelta], StreamGroup]:
    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StreamGroup:
        group = kind(rank, size)
        group.launches = []
        return group

    return create


for name, kind in CLASSES.items():
    dist.Backend.register_backend(name, _creator(kind), devices=["cpu"])


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=CLASSES)
def group(request: pytest.FixtureRequest) -> Any:
    return dist.new_group(backend=request.param)


def communicator_on_streams(group: Any) -> ProcessGroupCommunicator:
    with simulated_accelerator():
        return ProcessGroupCommunicator(group, "cpu")


def shards(*dtypes: torch.dtype) -> list[Transfer]:
    return [Transfer(torch.zeros(SIZE * 3).to(dtype), torch.arange(3).to(dtype)) for dtype in dtypes]


# -- capabilities


def capabilities(monkeypatch: pytest.MonkeyPatch, backend: object, config: str = "cuda:nccl") -> BackendCapabilities:
    """Return those of a group whose backend for CUDA is ``backend``."""
    group: Any = dist.ProcessGroup(dist.HashStore(), 0, 1)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    monkeypatch.setattr(dist.ProcessGroup, "_device_types", [torch.device("cuda")])
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda _, device: backend)
    return backend_capabilities(group, "cuda")


@pytest.mark.behaviour("M-03")
@pytest.mark.parametrize(
    ("class_name", "averages", "coalesces"),
    [
        ("ProcessGroupNCCL", True, True),
        ("ProcessGroupNCCL2", True, False),
        ("ProcessGroupNCCLLazy", True, False),
        ("ProcessGroupXCCL", True, False),
        ("_BackendWrapper", False, False),  # of torchcomms
        ("ProcessGroupHCCL", False, False),
    ],
)
@pytest.mark.parametrize("name", ["nccl", "nccl-legacy", "ncclx"])
def test_the_class_of_a_backend_decides_what_it_can_do(
    monkeypatch: pytest.MonkeyPatch, name: str, class_name: str, averages: bool, coalesces: bool
) -> None:
    found = capabilities(monkeypatch, type(class_name, (), {})(), f"cuda:{name}")
    assert (found.name, found.averages, found.coalesces) == (name, averages, coalesces)
    assert (found.is_native, found.has_own_transports) == (True, False)


def test_a_backend_wrapped_for_debugging_averages_and_has_no_coalesced_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = type("ProcessGroupNCCL", (), {})()
    wrapper = type("_ProcessGroupWrapper", (), {"wrapped_pg": nccl})()
    found = capabilities(monkeypatch, wrapper)
    assert (found.averages, found.coalesces) == (True, False)


@pytest.mark.parametrize("name", CLASSES)
def test_by_default_a_group_with_large_parameters_is_one_message(name: str) -> None:
    mesh = dist.init_device_mesh("cpu", (SIZE,), backend_override={0: name})
    group: Any = mesh.get_group()
    with simulated_accelerator():
        model = fully_shard(nn.Sequential(nn.Linear(2000, 1000), nn.Linear(1000, 3)), mesh=mesh)
        for _ in range(2):
            group.launches.clear()
            model(torch.ones(2, 2000)).sum().backward()
    assert [kind for kind, *_ in group.launches] == ["all_gather", "reduce_scatter"]


# -- streams


@pytest.mark.parametrize("blocks", [2, 6])
def test_a_root_makes_three_streams_of_high_priority_and_its_groups_none(
    monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """Torch has 32 streams per priority and device, and gives the next one to each who asks."""
    made: list[Any] = []
    mesh = dist.init_device_mesh("cpu", (SIZE,))
    with simulated_accelerator():
        stream_class: Any = torch.cpu.Stream

        def make(**given: Any) -> Any:
            made.append(given)
            return stream_class(**given)

        monkeypatch.setattr(torch.cpu, "Stream", make)
        for roots in (1, 2):
            model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(blocks)])
            for layer in (*model, model):
                fully_shard(layer, mesh=mesh)
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
            assert made == [{"priority": -1}] * 3 * roots
        ProcessGroupCommunicator(dist.new_group(), "cpu")
        assert len(made) == 6


def test_capabilities_of_a_device_are_made_once() -> None:
    device = torch.device("cpu")
    on_host = device_capabilities(device)
    assert device_capabilities(device) is on_host
    with simulated_accelerator():
        on_streams = device_capabilities(device)
        assert device_capabilities(device) is on_streams
    assert (on_host.has_streams, on_streams.has_streams) == (False, True)
    assert device_capabilities(device) is on_host


# -- coalesced calls


def test_all_gathers_of_one_launch_are_coalesced_by_dtype_where_the_class_does_so(group: Any) -> None:
    transfers = shards(torch.float32, torch.uint8, torch.float32)
    communicator_on_streams(group).launch(Collective.ALL_GATHER, transfers).wait()
    launched = [dtypes for _, dtypes, _ in group.launches]
    if isinstance(group, ProcessGroupNCCL):
        assert launched == [[torch.float32, torch.float32], [torch.uint8]]
    else:
        assert launched == [[torch.float32], [torch.uint8], [torch.float32]]
    for output, input in transfers:
        assert torch.equal(output, input.repeat(SIZE))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE])
def test_coalesced_reduce_scatters_have_the_operation(op: ReduceOp) -> None:
    group: Any = dist.new_group(backend="nccl_as_of_2_13")
    transfers = [Transfer(torch.zeros(2), torch.full((2 * SIZE,), float(k))) for k in range(1, 3)]
    communicator_on_streams(group).launch(Collective.REDUCE_SCATTER, transfers, op=op).wait()
    assert [kind for kind, *_ in group.launches] == ["reduce_scatter"]
    factor = SIZE if op is ReduceOp.SUM else 1
    assert [output.tolist() for output, _ in transfers] == [[factor * 1.0] * 2, [factor * 2.0] * 2]


class Interrupting(torch.Tensor):
    """Interrupts the program in c10d's function, as Ctrl-C does between two of a launch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == dist.distributed_c10d.__name__:
            raise KeyboardInterrupt
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.behaviour("H-06")
def test_a_group_works_after_an_exception_in_a_launch_of_several(group: Any) -> None:
    communicator = communicator_on_streams(group)
    first, last = shards(torch.float32, torch.float32)
    with suppress(KeyboardInterrupt):
        communicator.launch(Collective.ALL_GATHER, [first, Transfer(last.output, last.input.as_subclass(Interrupting))])
    group.launches.clear()
    communicator.launch(Collective.ALL_GATHER, [first]).wait()
    assert len(group.launches) == 1, "it was only added to a coalesced call that never ended"
    assert torch.equal(first.output, first.input.repeat(SIZE))


# -- dtypes


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [Collective.ALL_GATHER, Collective.ALL_TO_ALL])
@pytest.mark.parametrize("count", [1, 2])
def test_dtypes_that_nccl_lacks_are_sent_in_others(
    group: Any, dtype: torch.dtype, kind: Collective, count: int
) -> None:
    numel = 4 if kind is Collective.ALL_TO_ALL else 4 * SIZE
    values = torch.tensor([1.0, 2.0, 4.0, 8.0]).to(dtype)
    transfers = [
        Transfer(torch.zeros(numel * dtype.itemsize, dtype=torch.uint8).view(dtype), values) for _ in range(count)
    ]
    communicator_on_streams(group).launch(kind, transfers).wait()
    for output, input in transfers:
        sent = input.view(torch.uint8)
        assert torch.equal(output.view(torch.uint8), sent if kind is Collective.ALL_TO_ALL else sent.repeat(SIZE))


@pytest.mark.parametrize("kind", [Collective.REDUCE_SCATTER, Collective.ALL_REDUCE])
def test_complex_gradients_are_added_up_as_pairs_of_floats(group: Any, kind: Collective) -> None:
    input = torch.full((4,), 1 + 2j, dtype=torch.complex128)
    output = input if kind is Collective.ALL_REDUCE else torch.zeros(2, dtype=torch.complex128)
    communicator_on_streams(group).launch(kind, [Transfer(output, input)]).wait()
    assert output.tolist() == [SIZE * (1 + 2j)] * output.numel()
