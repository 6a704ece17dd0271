"""The stand-in for NCCL: each rule catches the fault that breaks it. Launches over groups that keep its contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
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
from tests.helpers.nccl_page import PAGE, part_of, rules_table
from tests.helpers.sharding import single_rank
from tests.helpers.stream_training import alone
from tests.planted_nccl import ALONE, NEEDS, ON_RANKS, Program, train_without
from tests.simulation import simulated_accelerator
from tests.simulation.nccl import VARIANTS, Contract, stands_in
from tests.simulation.rules import RULES, ContractViolation


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def is_training(program: Program) -> bool:
    """Return whether a program trains a model, which takes a second. Its rule has short programs on all variants."""
    return isinstance(program, partial) and program.func is train_without


ROWS = [
    pytest.param(rule, program, variant, id=f"{rule} {number}, {variant}")
    for rule, programs in ALONE.items()
    for number, program in enumerate(programs)
    for variant in ("nccl",) * is_training(program) or NEEDS.get(rule, tuple(VARIANTS))
]


def run(program: Program, variant: str, *, broken: bool) -> None:
    with stands_in(variant, alone=True) as contract, simulated_accelerator() as device:
        program(device, contract, broken)


@pytest.mark.parametrize(("rule", "program", "variant"), ROWS)
def test_each_rule_catches_its_planted_fault(rule: str, program: Program, variant: str) -> None:
    run(program, variant, broken=False)
    with pytest.raises(ContractViolation, match=r"^\[") as caught:
        run(program, variant, broken=True)
    assert caught.value.rule == rule
    assert RULES[rule].text in str(caught.value)
    assert RULES[rule].source in str(caught.value)


def test_each_rule_has_a_planted_fault() -> None:
    assert RULES.keys() == {*ALONE, *ON_RANKS}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_only_a_barrier_blocks_the_host(variant: str, is_async: bool) -> None:
    def is_done_after(launch: Callable[..., Any], *tensors: torch.Tensor) -> bool:
        event: Any = torch.cpu.current_stream().record_event()  # type: ignore[func-returns-value]
        work = launch(*tensors, async_op=is_async)
        if work is not None:
            work.wait()
        return bool(event.query())

    with stands_in(variant, alone=True), alone(), simulated_accelerator():
        assert not is_done_after(dist.all_reduce, torch.ones(4))
        assert is_done_after(dist.barrier)


def test_the_page_has_each_rule_with_its_source_and_its_fault() -> None:
    assert part_of(PAGE.read_text(), "rules") == rules_table(), "python -m tests.helpers.nccl_page writes it"


SIZE = 2
on_each_variant = pytest.mark.parametrize("variant", VARIANTS)


@contextmanager
def job(variant: str) -> Iterator[Contract]:
    """Be one of ``SIZE`` ranks of a job on streams. All of them have the data of this one."""
    with stands_in(variant, alone=True) as contract, simulated_accelerator() as device:
        dist.init_process_group(contract.backend, store=FakeStore(), rank=0, world_size=SIZE)
        try:
            yield contract
        finally:
            dist.destroy_process_group()
        assert not device.races, "\n".join(map(str, device.races))


def communicator() -> ProcessGroupCommunicator:
    world = dist.group.WORLD
    assert world is not None
    return ProcessGroupCommunicator(world, "cpu")


def shards(*dtypes: torch.dtype) -> list[Transfer]:
    return [Transfer(torch.zeros(SIZE * 3).to(dtype), torch.arange(3).to(dtype)) for dtype in dtypes]


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
        ("ProcessGroupXCCL", False, False),
        ("_BackendWrapper", False, False),  # of torchcomms
        ("ProcessGroupHCCL", False, False),
    ],
)
@pytest.mark.parametrize("name", ["nccl", "nccl-legacy", "ncclx"])
def test_the_class_of_a_backend_decides_what_it_can_do(monkeypatch, name, class_name: str, averages, coalesces) -> None:
    found = capabilities(monkeypatch, type(class_name, (), {})(), f"cuda:{name}")
    assert (found.name, found.averages, found.coalesces) == (name, averages, coalesces)
    assert (found.is_native, found.has_own_transports) == (True, False)


def test_a_backend_wrapped_for_debugging_averages_and_has_no_coalesced_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = type("ProcessGroupNCCL", (), {})()
    wrapper = type("_ProcessGroupWrapper", (), {"wrapped_pg": nccl})()
    found = capabilities(monkeypatch, wrapper)
    assert (found.averages, found.coalesces) == (True, False)


@pytest.mark.behaviour("E-01")
@on_each_variant
@pytest.mark.parametrize("blocks", [1, 3])
def test_by_default_collectives_run_on_streams_of_high_priority_of_their_root(variant: str, blocks: int) -> None:
    """Torch has 32 streams per priority and device, and gives the next one to each who asks."""
    made: list[Any] = []
    with job(variant) as contract, pytest.MonkeyPatch.context() as patch:
        stream_class: Any = torch.cpu.Stream

        def make(**given: Any) -> Any:
            made.append(stream_class(**given))
            assert given == {"priority": -1}
            return made[-1]

        patch.setattr(torch.cpu, "Stream", make)
        for root in range(2):
            model = nn.Sequential(*[nn.Sequential(nn.Linear(300, 600), nn.Linear(600, 300)) for _ in range(blocks)])
            for block in model:
                fully_shard(block)
            fully_shard(model)
            for _ in range(2):
                contract.launches.clear()
                model(torch.ones(2, 300)).sum().backward()
                torch.cpu.synchronize()
            gather, _, reduce, _ = map(str, made[4 * root :])
            assert {(each.operation, each.stream, each.is_async) for each in contract.launches} == {
                ("all_gather", gather, False),
                ("reduce_scatter", reduce, False),
            }
            assert {each.tensors for each in contract.launches} == {1}, "large parameters have messages of their own"
        assert len(made) == 8


def test_capabilities_of_a_device_are_made_once() -> None:
    device = torch.device("cpu")
    on_host = device_capabilities(device)
    assert device_capabilities(device) is on_host
    with simulated_accelerator():
        on_streams = device_capabilities(device)
        assert device_capabilities(device) is on_streams
    assert (on_host.has_streams, on_streams.has_streams) == (False, True)
    assert device_capabilities(device) is on_host


@pytest.mark.parametrize("kind", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE])
@pytest.mark.parametrize("count", [1, 2])
@on_each_variant
def test_a_collective_runs_on_the_stream_that_launches_it(variant: str, kind: Collective, count: int) -> None:
    full, shard = torch.ones(count, 4), torch.ones(count, 2)
    with job(variant) as contract:
        stream: Any = torch.cpu.Stream()
        stream.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(stream):
            pairs = {Collective.ALL_GATHER: (full, shard), Collective.REDUCE_SCATTER: (shard, full)}
            output, input = pairs.get(kind, (full, full))
            communicator().launch(kind, list(map(Transfer, output, input)))
        torch.cpu.current_stream().wait_stream(stream)  # its event alone orders what reads the result
        assert output.isfinite().all()
        assert {(each.stream, each.is_async) for each in contract.launches} == {(str(stream), False)}


def test_a_backend_that_stages_through_the_host_is_asynchronous_also_on_streams() -> None:
    """Otherwise the launch blocks the host until all ranks have come."""
    with single_rank(), simulated_accelerator():
        (transfer,) = [Transfer(torch.zeros(3), torch.ones(3))]
        assert isinstance(communicator().launch(Collective.ALL_GATHER, [transfer]), dist.Work)


@on_each_variant
def test_all_gathers_of_one_launch_are_coalesced_by_dtype_where_the_class_does_so(variant: str) -> None:
    with job(variant) as contract:
        transfers = shards(torch.float32, torch.uint8, torch.float32)
        communicator().launch(Collective.ALL_GATHER, transfers).wait()
        assert [each.tensors for each in contract.launches] == ([2, 1] if variant == "nccl" else [1, 1, 1])
        for output, input in transfers:
            assert torch.equal(output, input.repeat(SIZE))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE])
def test_coalesced_reduce_scatters_have_the_operation(op: ReduceOp) -> None:
    with job("nccl") as contract:
        transfers = [Transfer(torch.zeros(2), torch.full((2 * SIZE,), float(k))) for k in range(1, 3)]
        communicator().launch(Collective.REDUCE_SCATTER, transfers, op=op).wait()
        assert [(each.operation, each.tensors) for each in contract.launches] == [("reduce_scatter", 2)]
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
@on_each_variant
def test_a_group_works_after_an_exception_in_a_launch_of_several(variant: str) -> None:
    with job(variant) as contract:
        ours = communicator()
        first, last = shards(torch.float32, torch.float32)
        with suppress(KeyboardInterrupt):
            ours.launch(Collective.ALL_GATHER, [first, Transfer(last.output, last.input.as_subclass(Interrupting))])
        contract.launches.clear()
        ours.launch(Collective.ALL_GATHER, [first]).wait()
        assert len(contract.launches) == 1, "it was only added to a coalesced call that never ended"
        assert torch.equal(first.output, first.input.repeat(SIZE))


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    ],
    ids=str,
)
@on_each_variant
def test_dtypes_that_nccl_lacks_are_sent_in_others(variant: str, dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0]).to(dtype)
    with job(variant):
        for kind, count in product((Collective.ALL_GATHER, Collective.ALL_TO_ALL), (1, 2)):
            numel = 4 if kind is Collective.ALL_TO_ALL else 4 * SIZE
            zeros = torch.zeros(count, numel * dtype.itemsize, dtype=torch.uint8)
            transfers = [Transfer(each.view(dtype), values) for each in zeros]
            communicator().launch(kind, transfers).wait()
            sent = values.view(torch.uint8).repeat(numel // 4)
            assert all(torch.equal(output.view(torch.uint8), sent) for output, _ in transfers)


@pytest.mark.parametrize("kind", [Collective.REDUCE_SCATTER, Collective.ALL_REDUCE])
@on_each_variant
def test_complex_gradients_are_added_up_as_pairs_of_floats(variant: str, kind: Collective) -> None:
    with job(variant):
        input = torch.full((4,), 1 + 2j, dtype=torch.complex128)
        output = input if kind is Collective.ALL_REDUCE else torch.zeros(2, dtype=torch.complex128)
        communicator().launch(kind, [Transfer(output, input)]).wait()
        assert output.tolist() == [SIZE * (1 + 2j)] * output.numel()
