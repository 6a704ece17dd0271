"""The backend ``"simulated_accelerator"``: collectives over gloo, on streams as with NCCL. With ``async_op=False``, a
collective runs on the current stream. Otherwise it runs on a stream of its process group, which waits for the current
stream, and ``wait`` makes the current stream wait, but not the host. The tensors of a collective are kept until
then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from tests.simulation.accelerator import SimulatedAccelerator, SimulatedEvent, SimulatedStream, active
from tests.simulation.late_execution import Recording

BACKEND = "simulated_accelerator"
ALONE = "simulated_accelerator_alone"
"""The same without other processes: all ranks are taken to have the data of this one."""


_ProcessGroup: Any = dist.ProcessGroup
"""The base class, whose stubs have overloads that torch does not call on groups in Python."""


class StreamWork(dist.Work):
    """A collective of a :class:`StreamGroup`."""

    def __init__(self, accelerator: SimulatedAccelerator | None, event: SimulatedEvent | None, tensors: Any) -> None:
        super().__init__()
        self._accelerator, self._event, self._tensors = accelerator, event, tensors
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._accelerator is not None and self._event is not None:
            self._event.wait(self._accelerator.current)
        self._tensors = None
        return True

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class StreamGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group on a stream of its own. ``rank``: the rank of this process. ``size``: the number of ranks.
    ``inner``: the gloo group that communicates. Without one, all ranks are taken to have the data of this one."""

    def __init__(self, rank: int, size: int, inner: Any = None) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._inner = rank, size, inner
        self._name = ""
        self._stream: SimulatedStream | None = None

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        known: str = dist.distributed_c10d._world.pg_names.get(self, self._name)  # none any more while it is destroyed
        self._name = known
        return known

    def _launch(
        self,
        operation: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        run: Callable[[], object],
        options: Any = None,
    ) -> Any:
        """Run a collective on a stream, and return its work, if it has one. ``operation``: its name. ``reads``: its
        inputs. ``writes``: its outputs. ``run``: runs it on the host. ``options``: those of c10d."""
        accelerator = active[-1] if active else None
        if accelerator is None:
            run()
            return StreamWork(None, None, None)
        is_asynchronous = getattr(options, "asyncOp", True)
        stream = self._stream if is_asynchronous else accelerator.current
        if stream is None or stream.accelerator is not accelerator:
            stream = self._stream = SimulatedStream(accelerator, name=f"of {self.group_name}")
        stream.wait_stream(accelerator.current)
        with accelerator.use(stream):
            for tensor in (*reads, *writes):
                accelerator.block_of(tensor, operation)
            before = Recording.digests(reads) if accelerator.recording is not None else None
            with torch.utils._python_dispatch._disable_current_modes():
                run()
            action = partial(Recording.exchange, sent=reads, received=writes, digests=before)
            accelerator.access(operation, reads, writes, action)
        return StreamWork(accelerator, stream.record_event(), (reads, writes)) if is_asynchronous else None

    def all_gather_single(self, output: torch.Tensor, shard: torch.Tensor, options: Any = None) -> Any:
        def run() -> None:
            if self._inner is None:
                output.view(self._size, -1).copy_(shard.reshape(1, -1).expand(self._size, -1))
            else:
                self._inner._allgather_base(output, shard).wait()

        return self._launch("all_gather", [shard], [output], run, options)

    def reduce_scatter_single(self, output: torch.Tensor, full: torch.Tensor, options: Any = None) -> Any:
        operation = options.reduceOp if options is not None else dist.ReduceOp.SUM

        def run() -> None:
            average = operation == dist.ReduceOp.AVG
            if self._inner is None:
                output.copy_(full.view(self._size, -1)[self._rank].view_as(output)).mul_(1 if average else self._size)
                return
            given = dist.ReduceScatterOptions()
            given.reduceOp = cast(Any, dist.ReduceOp.SUM if average else operation)
            self._inner._reduce_scatter_base(output, full, given).wait()
            if average:
                output.div_(self._size)

        return self._launch("reduce_scatter", [full], [output], run, options)

    def all_to_all_single(self, output: torch.Tensor, given: torch.Tensor, *sizes: Any) -> Any:
        def run() -> None:
            if self._inner is None:
                output.copy_(given)
            else:
                self._inner.alltoall_base(output, given, *sizes).wait()

        return self._launch("all_to_all", [given], [output], run, sizes[-1] if sizes else None)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        operation = options.reduceOp if options is not None else dist.ReduceOp.SUM

        def run() -> None:
            average = operation == dist.ReduceOp.AVG
            for tensor in tensors:
                if self._inner is None:
                    tensor.mul_(1 if average or operation != dist.ReduceOp.SUM else self._size)
                    continue
                given = dist.AllreduceOptions()
                given.reduceOp = cast(Any, dist.ReduceOp.SUM if average else operation)
                self._inner.allreduce([tensor], given).wait()
                if average:
                    tensor.div_(self._size)

        return self._launch("all_reduce", tensors, tensors, run, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        def run() -> None:
            if self._inner is not None:
                self._inner.broadcast(tensors, options).wait()

        return self._launch("broadcast", tensors, tensors, run, options)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:
        def run() -> None:
            if self._inner is None:
                for each in outputs[0]:
                    each.copy_(inputs[0])
            else:
                self._inner.allgather(outputs, inputs).wait()

        return self._launch("all_gather", inputs, outputs[0], run, options)

    def barrier(self, opts: Any = None) -> Any:
        def run() -> None:
            if self._inner is not None:
                self._inner.barrier(opts or dist.BarrierOptions()).wait()

        return self._launch("barrier", [], [], run, opts)

    # The names of these methods before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StreamGroup:
    return StreamGroup(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


def _create_alone(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StreamGroup:
    return StreamGroup(rank, size)


dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
dist.Backend.register_backend(ALONE, _create_alone, devices=["cpu"])
