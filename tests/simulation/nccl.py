"""A stand-in for NCCL: process groups on the simulated accelerator that keep what c10d and NCCL document.

    with stands_in("nccl2") as contract, simulated_accelerator() as device:
        dist.init_process_group(contract.backend, ...)

Inside the context, groups of the backend ``contract.backend`` communicate over gloo, and have the class and the name
that the variant has in torch. A program that breaks a rule of :data:`~tests.simulation.rules.RULES` gets a
``ContractViolation`` that names it, at once or, if it catches that or a race is found, at the end of the context.

The variants are :data:`VARIANTS`: ``nccl``, the class of torch 2.11 to 2.14; ``nccl2``, the default one after that; and
``torchcomms``. Not simulated: time, priorities, and the end of the process after a timeout, which is a violation here.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast
from unittest import mock
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed import fsdp

import composable_fsdp
from tests.simulation.accelerator import ASYNCHRONOUS, SYNCHRONOUS, SimulatedAccelerator, SimulatedStream, active
from tests.simulation.late_execution import Recording
from tests.simulation.rules import break_rule, note_violation, reported
from tests.simulation.stream_group import ALONE, StreamGroup, StreamWork

DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        *("int8", "uint8", "bool", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
)
"""The dtypes that a collective may have."""
REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_REDUCTIONS = (*REDUCTIONS, dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
_LIBRARIES = tuple(f"{Path(package.__file__ or '').parent}{os.sep}" for package in (composable_fsdp, fsdp))
_NEW_GROUP_SECONDS = 3.0
"""The time in which all ranks of the job have called ``new_group``, on one machine."""


class Launch(NamedTuple):
    """A launch of a communicator: one kernel, whatever the number of tensors. ``frames``: the number of frames of this
    library, or of torch's FSDP2, from the hook of a module or of autograd."""

    operation: str
    group: str
    tensors: int
    is_async: bool
    stream: str
    frames: int


@dataclass(eq=False)
class Contract:
    """The state of a stand-in. ``variant``: a key of :data:`VARIANTS`. ``alone``: groups have no other processes: all
    ranks are taken to have the data of this one. ``bound``: the default group is bound to a device, as by
    ``device_id=``. ``connection_seconds``: the time that the first operation of a group takes."""

    variant: str
    alone: bool = False
    bound: bool = False
    connection_seconds: float = 0.0
    launches: list[Launch] = field(default_factory=list)
    groups: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The number of groups that ranks have made together, by ranks."""
    new_group: Callable[..., Any] = c10d._new_group_with_tag
    """The function of c10d."""
    ended_at: float | None = None
    """The time, of ``time.monotonic()``, at which a thread of NCCL would have ended the process."""

    @property
    def backend(self) -> str:
        """The backend for ``init_process_group`` and ``new_group``."""
        return f"cpu:{VARIANTS[self.variant].backend_name}"


class ContractWork(StreamWork):
    """A collective of a stand-in that runs on a stream of its group."""

    def __init__(self, group: _ContractGroup, accelerator: Any, event: Any, tensors: Any, *, blocks: bool) -> None:
        super().__init__(accelerator, event, tensors)
        self._group, self._blocks = group, blocks

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._group.check_work("Work.wait()")
        done = super().wait(timeout)
        if self._blocks and self._event is not None:
            self._event.synchronize()
        return done

    def is_completed(self) -> bool:
        self._group.check_work("Work.is_completed()")
        return super().is_completed()

    def __del__(self) -> None:
        if self._accelerator is not None:
            self._accelerator.check_destructor("a work")


class SeveralWorks(dist.Work):
    def __init__(self, works: Sequence[ContractWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class _ContractGroup(StreamGroup):
    """A process group of a stand-in. ``store``: the store of the group. ``rank``: the rank of this process. ``size``:
    the number of ranks. ``options``: the timeout, or options with it."""

    backend_name = ""
    groups_launches = False
    """True if coalesced collectives are one launch."""
    supports_coalescing = supports_splitting = True

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self._contract = _contracts[-1]
        self.options = options if hasattr(options, "_timeout") else _Options(options)
        timeout = self.options._timeout
        inner = None if self._contract.alone else dist.ProcessGroupGloo(store, rank, size, timeout)
        super().__init__(rank, size, inner)
        self._is_connected = self._is_destroyed = False
        self._last: dict[int, int] = {}
        """The clock of the last operation: the next one runs after it."""
        self._coalesced_works: list[ContractWork] | deque[ContractWork] = deque(maxlen=0)
        """The works since ``_start_coalescing``; none are kept outside of it."""

    def getBackendName(self) -> str:
        return self.backend_name

    def name(self) -> str:
        return self.backend_name

    def _get_backend(self, device: torch.device) -> _ContractGroup:
        if device.type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def bound_device_id(self) -> torch.device | None:
        return torch.device("cpu", 0) if self._contract.bound and not _is_making_group else None

    def _set_sequence_number_for_group(self) -> None: ...

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def shutdown(self) -> None:
        self._is_destroyed = True

    def abort(self) -> None:
        self._is_destroyed = True
        if self._inner is not None:
            self._inner.abort()

    def check_work(self, what: str) -> None:
        """Raise a violation if nobody may use a work of this group now, in this thread."""
        accelerator = active[-1] if active else None
        if accelerator is not None:
            accelerator.check_thread(what)
            if what == "Work.is_completed()":
                accelerator.check_host(what)
        if self._is_destroyed and not self.groups_launches:
            break_rule("work of a destroyed group", f"{what} of the group {self.group_name}.")

    # -- operations

    def _launch(
        self,
        operation: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        run: Callable[[], object],
        options: Any = None,
    ) -> Any:
        is_async = bool(getattr(options, "asyncOp", True))
        accelerator = active[-1] if active else None
        self._check(operation, [*reads, *writes], getattr(options, "reduceOp", None), accelerator)
        if accelerator is None:
            self._launches(operation, reads, is_async, None)
            self._run(operation, run)
            return ContractWork(self, None, None, None, blocks=False) if is_async else None
        accelerator.keeps_contract = True
        current = stream = accelerator.current
        if is_async:
            stream = self._stream_of(accelerator)
            stream.wait_stream(current)
        for number, position in self._last.items():
            stream.clock[number] = max(stream.clock.get(number, 0), position)
        name = (ASYNCHRONOUS if is_async else SYNCHRONOUS) + operation
        with accelerator.use(stream):
            for tensor in (*reads, *writes):
                accelerator.block_of(tensor, name)
            before = Recording.digests(reads) if accelerator.recording is not None else None
            with torch.utils._python_dispatch._disable_current_modes():
                self._run(operation, run)
            action = partial(Recording.exchange, sent=reads, received=writes, digests=before)
            accelerator.access(name, reads, writes, action)
        self._last = {stream.number: stream.clock[stream.number]}
        self._launches(operation, reads, is_async, stream)
        if not is_async:
            if operation == "barrier":
                stream.synchronize()
            return None
        event = stream.record_event()
        work = ContractWork(self, accelerator, event, (reads, writes), blocks=operation == "barrier")
        self._coalesced_works.append(work)
        return work

    def _stream_of(self, accelerator: SimulatedAccelerator) -> SimulatedStream:
        stream = self._stream
        if stream is None or stream.accelerator is not accelerator:
            stream = self._stream = SimulatedStream(accelerator, name=f"of {self.group_name}")
            self._last = {}
        return stream

    def _launches(self, operation: str, tensors: Sequence[Any], is_async: bool, stream: object) -> None:
        count = 1 if self.groups_launches else max(1, len(tensors))
        each = len(tensors) if self.groups_launches else min(1, len(tensors))
        launch = Launch(operation, self.group_name, each, is_async, str(stream), _frames())
        self._contract.launches += [launch] * count

    def _check(
        self, operation: str, tensors: Sequence[torch.Tensor], reduction: Any, accelerator: SimulatedAccelerator | None
    ) -> None:
        where = f"{operation} of the group {self.group_name}"
        if self._contract.ended_at is not None:
            break_rule("timeout", f"{where} after the process had ended.")
        if self._is_destroyed:
            break_rule("destroyed group", f"{where}.")
        for tensor in tensors:
            if tensor.dtype not in DTYPES:
                break_rule("dtype", f"{where} of {tensor.dtype}.")
        if reduction is not None:
            reduction = next((each for each in _REDUCTIONS if reduction == each), "another operation")
            if reduction not in REDUCTIONS:
                break_rule("reduce op", f"{where} by {reduction}.")
            if reduction == dist.ReduceOp.AVG and not all(tensor.is_floating_point() for tensor in tensors):
                break_rule("reduce op", f"{where} by AVG of {tensors[0].dtype}.")
        if accelerator is not None:
            accelerator.check_thread(where)
            if accelerator.current.capture and not self._is_connected:
                break_rule("capture: connection", f"{where} is its first one.")
        self._compare(where, tensors, reduction)
        if not self._is_connected and self._contract.connection_seconds:
            time.sleep(self._contract.connection_seconds)
        self._is_connected = True

    def _compare(self, where: str, tensors: Sequence[torch.Tensor], reduction: Any) -> None:
        """Raise a violation if another rank launches another operation now."""
        if self._inner is None:
            return
        text = f"{where} of {[(tuple(each.shape), str(each.dtype)) for each in tensors]} by {reduction}"
        own = torch.tensor([crc32(text.encode())])
        with torch.utils._python_dispatch._disable_current_modes():
            known = torch.zeros(self._size, dtype=torch.int64)
            self._run(where, lambda: self._inner._allgather_base(known, own).wait())
        if not bool((known == own).all()):
            break_rule("order", f"Rank {self._rank} launches {text}, and others launch another operation.")

    def _run(self, operation: str, run: Callable[[], object]) -> None:
        """Run an operation on the host. Note the end of the process if it lasts for the timeout."""
        begin = time.monotonic()
        try:
            run()
        except RuntimeError:
            if time.monotonic() - begin < self.options._timeout.total_seconds():
                raise
            self._contract.ended_at = time.monotonic()
            rule = "timeout" if self._is_connected else "connection"
            break_rule(rule, f"{operation} of the group {self.group_name} after {self.options._timeout}.")

    def _coalesced(self, name: str, launch: Callable[..., Any], lists: Sequence[Sequence[Any]], options: Any) -> Any:
        """Launch an operation of several tensors, by a function of the tensors of one."""
        kinds = {tensor.dtype for tensors in lists for tensor in tensors}
        if len(kinds) > 1:
            break_rule("coalescing", f"{name} of {sorted(map(str, kinds))} in the group {self.group_name}.")
        runs: list[Callable[[], object]] = []

        def collect(operation: str, reads: Any, writes: Any, run: Callable[[], object], _: Any = None) -> None:
            runs.append(run)

        with mock.patch.object(self, "_launch", collect):
            for each in zip(*lists, strict=True):
                launch(*each, options)
        *outputs, inputs = lists
        writes = outputs[0] if outputs else inputs
        return self._launch(name, list(inputs), list(writes), lambda: [run() for run in runs], options)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self._coalesced("all_gather", self.all_gather_single, [outputs, inputs], options)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self._coalesced("reduce_scatter", self.reduce_scatter_single, [outputs, inputs], options)

    def allreduce_coalesced(self, tensors: Any, options: Any = None) -> Any:
        def reduce(tensor: torch.Tensor, options: Any) -> Any:
            return self.allreduce([tensor], options)

        return self._coalesced("all_reduce", reduce, [tensors], options)

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced_works = []

    def _end_coalescing(self, device: Any) -> Any:
        """Return the work of all collectives since the start."""
        works, self._coalesced_works = list(self._coalesced_works), deque(maxlen=0)
        return SeveralWorks(works)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


class _Options:
    def __init__(self, timeout: timedelta = c10d.default_pg_timeout) -> None:
        self._timeout = timeout
        self.is_high_priority_stream = False


class ProcessGroupNCCL(_ContractGroup):
    """The class of torch 2.11 to 2.14."""

    Options = _Options
    backend_name = "nccl"
    groups_launches = True


class ProcessGroupNCCL2(_ContractGroup):
    """The class that is opt-in in torch 2.14, and the default after it."""

    backend_name = "nccl2"


class _BackendWrapper(_ContractGroup):
    """The class of torchcomms."""

    backend_name = "ncclx"


VARIANTS: dict[str, type[_ContractGroup]] = {
    "nccl": ProcessGroupNCCL,
    "nccl2": ProcessGroupNCCL2,
    "torchcomms": _BackendWrapper,
}
_contracts: list[Contract] = []
_is_making_group: list[bool] = []
"""Not empty while c10d makes a group: it binds none to the CPU."""


def _frames() -> int:
    """Return the number of frames of this library or of torch's FSDP2 in the stack."""
    count, frame = 0, cast("FrameType | None", sys._getframe(1))
    while frame is not None:
        count += frame.f_code.co_filename.startswith(_LIBRARIES)
        frame = frame.f_back
    return count


def alone_backend() -> str:
    """Return the backend of a group without other processes: that of the innermost stand-in, or the default one."""
    return _contracts[-1].backend if _contracts else ALONE


@contextmanager
def stands_in(
    variant: str, *, alone: bool = False, bound: bool = False, connection_seconds: float = 0.0
) -> Iterator[Contract]:
    """Have process groups of the backend of ``variant`` keep its contract. For the arguments, see :class:`Contract`."""
    contract = Contract(variant, alone, bound, connection_seconds)
    kind = VARIANTS[variant]
    with ExitStack() as stack:
        stack.enter_context(reported())
        backend = cast(Any, c10d.Backend)
        for name in ("_plugins", "backend_type_map", "backend_capability", "default_device_backend_map"):
            stack.enter_context(mock.patch.dict(getattr(backend, name)))
        stack.enter_context(mock.patch.object(backend, "backend_list", [*backend.backend_list]))
        if variant == "nccl":
            stack.enter_context(mock.patch.object(c10d, "is_nccl_available", return_value=True))
            stack.enter_context(mock.patch.object(c10d, "ProcessGroupNCCL", kind, create=True))
            backend.backend_capability["nccl"] = ["cpu"]
            create = getattr(c10d, "_create_nccl_process_group", None)
            if create is not None:  # from torch 2.15 on, where "nccl" makes groups of "nccl2"
                options = {"extended_api": True, "_backend_type": dist.ProcessGroup.BackendType.NCCL}
                backend.register_backend("nccl", create, devices=["cpu"], **options)
        else:
            backend.register_backend(kind.backend_name, kind, devices=["cpu"])
        if hasattr(c10d, "_maybe_attach_flight_recorder"):  # from torch 2.15 on; it needs a group of C++
            stack.enter_context(mock.patch.object(c10d, "_maybe_attach_flight_recorder"))
        if hasattr(getattr(dist, "config", None), "use_torchcomms"):
            stack.enter_context(cast(Any, dist).config.patch(use_torchcomms=variant == "torchcomms"))
        stack.enter_context(mock.patch.object(c10d, "_new_group_with_tag", partial(_new_group, contract)))
        manager = _closed_manager(c10d._coalescing_manager)
        for module in (dist, c10d):
            stack.enter_context(mock.patch.object(module, "_coalescing_manager", manager))
            stack.enter_context(mock.patch.object(module, "split_group", partial(_split_group, contract)))
        _contracts.append(contract)
        try:
            yield contract
        finally:
            _contracts.remove(contract)


def _closed_manager(original: Any) -> Any:
    """Return ``_coalescing_manager`` with a check that no exception leaves it."""

    @contextmanager
    def manager(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with original(*args, **kwargs) as works:
            try:
                yield works
            except BaseException as error:
                note_violation("open group", f"{type(error).__name__}: {error}")
                raise

    return manager


def _new_group(contract: Contract, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    is_local = bool(kwargs.get("use_local_synchronization"))
    if contract.variant == "torchcomms" and is_local:
        break_rule("local synchronization", f"new_group({ranks}).")
    is_member = ranks is None or dist.get_rank() in ranks
    if contract.bound and contract.variant == "nccl2" and not (is_member or is_local or _is_of_a_mesh()):
        break_rule("new group of others", f"Rank {dist.get_rank()} called new_group({ranks}).")
    if (contract.bound or contract.variant == "torchcomms") and (is_member or not is_local):
        _meet(contract, f"new_group({ranks})", range(dist.get_world_size()))
    with _making_group():
        return contract.new_group(ranks, *args, **kwargs)


def _is_of_a_mesh() -> bool:
    """Return whether ``DeviceMesh`` makes the group: with devices that are bound, it calls ``split_group`` instead."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith("device_mesh.py"):
        frame = frame.f_back
    return frame is not None


def _split_group(contract: Contract, parent: Any = None, split_ranks: Any = None, *_: Any, **kwargs: Any) -> Any:
    parent = parent or kwargs.get("parent_pg") or dist.group.WORLD
    if not (contract.bound or contract.variant == "torchcomms"):
        raise RuntimeError("No device associated with the default pg, not safe to split any process groups")
    known = dist.get_process_group_ranks(parent)
    _meet(contract, f"split_group({split_ranks})", known)
    part = next((part for part in split_ranks if dist.get_rank(parent) in part), None)
    if part is None:
        return None
    backend = dist.get_backend_config(parent)
    with _making_group():
        return contract.new_group([known[rank] for rank in part], backend=backend, use_local_synchronization=True)


@contextmanager
def _making_group() -> Iterator[None]:
    _is_making_group.append(True)
    try:
        yield
    finally:
        _is_making_group.pop()


def _meet(contract: Contract, what: str, ranks: Sequence[int]) -> None:
    """Wait until all of ``ranks`` make a group, or raise a violation."""
    number = contract.groups[tuple(ranks)] = contract.groups.get(tuple(ranks), 0) + 1
    if contract.alone:
        return
    size, key = len(ranks), f"stand-in/{ranks}/{number}"
    store, end = c10d._get_default_store(), time.monotonic() + _NEW_GROUP_SECONDS
    came = store.add(key, 1)
    while came < size and time.monotonic() < end:
        time.sleep(0.01)
        came = store.add(key, 0)
    if came < size:
        break_rule("new group", f"Rank {dist.get_rank()} called {what}, and {size - came} of {size} ranks did not.")
