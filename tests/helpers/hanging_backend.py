"""A device and a backend that hang as a GPU and NCCL do, for tests of faults without a GPU. Collectives run in order on
a thread of their process group, over a store. A collective that some rank does not join, or joins with another kind or
size, never completes: only ``abort`` ends it, with undefined results. ``wait`` orders the current stream and returns;
the host blocks in ``synchronize``. Operations of the host are not delayed, so that ``wait`` first gives an operation
``grace`` seconds to complete. Later it never writes its results."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

HANGING = "hanging"
_ProcessGroup: Any = dist.ProcessGroup
_Result = Callable[[list[Any]], None]


class _Event:
    def __init__(self, **_: object) -> None:
        self.pending: list[_Work] = []
        self.time = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self.time = time.perf_counter()
        stream = stream or device.current
        stream.pending = [work for work in stream.pending if not work.is_completed()]
        self.pending = list(stream.pending)

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or device.current).pending.extend(self.pending)

    def query(self) -> bool:
        return all(work.is_completed() for work in self.pending)

    def synchronize(self) -> None:
        for work in self.pending:
            work.done.wait()

    def elapsed_time(self, end: _Event) -> float:
        """Return the milliseconds of the host."""
        return 1e3 * (end.time - self.time)


class _Stream:
    def __init__(self, *_: object, **__: object) -> None:
        self.pending: list[_Work] = []

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: _Stream) -> None:
        stream.record_event().wait(self)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class _Device:
    """The current stream, and the seconds that a wait gives an operation to complete."""

    def __init__(self) -> None:
        self.current = _Stream()
        self.grace = 30.0

    @contextmanager
    def use(self, stream: _Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, *_: object) -> None:
        """Block the host until all work of the current stream is done or aborted, as reading a loss does."""
        self.current.synchronize()


device = _Device()


@contextmanager
def hanging_device() -> Iterator[_Device]:
    """Make ``torch.cpu`` a device with streams inside this context."""
    device.__init__()  # type: ignore[misc]
    names: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Event,
        "stream": device.use,
        "current_stream": lambda _=None: device.current,
        "synchronize": device.synchronize,
    }
    with (
        mock.patch.multiple(torch.cpu, **names),
        mock.patch.object(torch.accelerator, "current_stream", names["current_stream"]),
    ):
        yield device


class _Work(dist.Work):
    def __init__(self, kind: str, sent: Any, receive: _Result) -> None:
        super().__init__()
        self.kind, self.sent, self.done = kind, sent, threading.Event()
        self._receive: _Result | None = receive
        self.received: list[Any] | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        late = any(not work.is_completed() for work in device.current.pending)
        if self.done.wait(0 if late else device.grace) and self.received is not None and self._receive is not None:
            with torch.no_grad():
                self._receive(self.received)
        self._receive = None
        device.current.pending.append(self)
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class HangingGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives hang where those of NCCL would."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._store: Any = store
        self.options = mock.Mock(_timeout=timeout)
        self._works: SimpleQueue[_Work] = SimpleQueue()
        self._pending: list[_Work] = []
        self.aborted = threading.Event()
        self._name = ""
        threading.Thread(target=self._run, daemon=True, name="hanging backend").start()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return HANGING

    @property
    def group_name(self) -> str:
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    def abort(self) -> None:
        self.aborted.set()
        for work in self._pending:
            work.done.set()

    def shutdown(self) -> None:
        self.abort()

    def _run(self) -> None:
        store, number = self._store.clone(), 0
        while not self.aborted.is_set():
            work, number = self._works.get(), number + 1
            try:
                work.received = self._exchange(store, number, work)
            except RuntimeError:  # the store is gone: NCCL too would not notice
                self.aborted.wait()
            work.done.set()

    def _exchange(self, store: Any, number: int, work: _Work) -> list[Any] | None:
        """Return what all ranks sent, once all of them have sent the same kind and size."""
        own = (work.kind, [tuple(t.shape) for t in work.sent] if work.kind != "broadcast" else None)
        store.set(f"{number}/{self._rank}", pickle.dumps((own, work.sent)))
        for rank in range(self._size):
            while not store.check([f"{number}/{rank}"]):
                if self.aborted.wait(0.001):
                    return None
        all_ranks = [pickle.loads(store.get(f"{number}/{rank}")) for rank in range(self._size)]
        if any(kind != own for kind, _ in all_ranks):
            self.aborted.wait()
            return None
        return [sent for _, sent in all_ranks]

    def _launch(self, kind: str, sent: Sequence[torch.Tensor], receive: _Result) -> _Work:
        if self.aborted.is_set():
            raise dist.DistBackendError("the communicator was aborted")
        work = _Work(kind, [tensor.detach().clone() for tensor in sent], receive)
        self._pending = [each for each in self._pending if not each.is_completed()]
        self._pending.append(work)
        self._works.put(work)
        return work

    def all_gather_single(self, output: torch.Tensor, shard: torch.Tensor, _: Any = None) -> _Work:
        def receive(received: list[Any]) -> None:
            output.view(-1).copy_(torch.cat([sent.view(-1) for (sent,) in received]))

        return self._launch("all-gather", [shard], receive)

    def reduce_scatter_single(self, output: torch.Tensor, full: torch.Tensor, options: Any = None) -> _Work:
        def receive(received: list[Any]) -> None:
            total = sum(sent.view(self._size, -1)[self._rank] for (sent,) in received)
            output.view(-1).copy_(total / (self._size if self._averages(options) else 1))

        return self._launch("reduce-scatter", [full], receive)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> _Work:
        def receive(received: list[Any]) -> None:
            for index, tensor in enumerate(tensors):
                tensor.copy_(sum(sent[index] for sent in received) / (self._size if self._averages(options) else 1))

        return self._launch("all-reduce", tensors, receive)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], _: Any = None) -> _Work:
        def receive(received: list[Any]) -> None:
            for output, (sent,) in zip(outputs[0], received, strict=True):
                output.copy_(sent)

        return self._launch("all-gather", inputs, receive)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> _Work:
        def receive(received: list[Any]) -> None:
            for tensor, sent in zip(tensors, received[options.rootRank], strict=True):
                tensor.copy_(sent)

        return self._launch("broadcast", tensors, receive)

    def barrier(self, options: Any = None) -> _Work:
        return self._launch("barrier", [], lambda _: None)

    @staticmethod
    def _averages(options: Any) -> bool:
        return options is not None and options.reduceOp == dist.ReduceOp.AVG

    # The names of these methods before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single


dist.Backend.register_backend(HANGING, partial(HangingGroup), devices=["cpu"])
