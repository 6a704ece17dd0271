"""Streams of the full parameters of a model.

Each bucket is one all-gather for each axis that its parameters are sharded over: one for plain and hybrid sharding, two
with tensor parallelism. The next buckets are gathered while the consumer works.

How ranks end together: each message has a header in which every rank says whether it goes on. A rank whose consumer has
raised, or left the loop, says in all further messages that it has left, with the number of its rank. It takes part in
them until it has received one that says so of any rank; so do all others, and after it no rank launches another. A rank
launches bucket ``i + 2`` only once it has read the headers of bucket ``i``, so all have launched the same
buckets then. Each bucket uses all axes of the model, so that on meshes of several axes all ranks read it in the same
bucket.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from composable_fsdp._core.memory import CommStream, InFlight, device_capabilities
from composable_fsdp._core.params import is_wrapper
from composable_fsdp._extents import assemble_full
from composable_fsdp.errors import ConfigurationError, DivergenceError, PeerError
from composable_fsdp.plugins.weight_stream.bucket_gather import BucketGather, BucketPlan, plan_buckets
from composable_fsdp.plugins.weight_stream.model_sources import ModelSources, prepare
from composable_fsdp.plugins.weight_stream.packed_layout import PackedLayout, placed
from composable_fsdp.plugins.weight_stream.weight_names import KeyMap, PackedTensor, Unit, units_of
from composable_fsdp.policies import checks_keywords

__all__ = ["WeightBucket", "WeightStream", "stream_full_params"]

BUCKET_BYTES = 512 << 20
_AHEAD = 1
"""The buckets that are gathered while the consumer works."""


class WeightBucket:
    """Full tensors in one flat memory. Valid until the stream is asked for the next bucket.

    Attributes:
        layout: names, shapes, dtypes and offsets of the tensors.
        packed: the tensors, 1-d, uint8; ``None`` on a rank that gets no values.
    """

    def __init__(
        self, layout: PackedLayout, packed: torch.Tensor | None, wrapped: tuple[str, torch.Tensor] | None = None
    ) -> None:
        self.layout = layout
        self.packed = packed
        self._tensors = self._items = {} if packed is None else layout.unpack(packed)
        if wrapped is not None and packed is not None:
            self._items = {wrapped[0]: _rebuilt(*wrapped, self._tensors)}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors, with the names of their tensors."""
        return self.layout.aliases

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the names and full tensors. They share the memory of ``packed``.

        A parameter of a class that wraps other tensors is one of that class, made of the tensors that ``layout`` has.
        """
        return iter(list(self._items.items()))

    def _release(self) -> None:
        """Free the memory. Tensors that somebody still refers to are empty afterwards."""
        for tensor in (*self._tensors.values(), *(() if self.packed is None else (self.packed,))):
            tensor.set_()
        self.packed, self._tensors, self._items = None, {}, {}


@checks_keywords
def stream_full_params(
    model: nn.Module,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    key_map: KeyMap | None = None,
    rank0_only: bool = False,
) -> WeightStream[WeightBucket]:
    """Return an iterator of buckets with all parameters of ``model`` in full: of its first parameters first.

    A parameter of a class that wraps other tensors, such as a quantized one, is gathered by its class and alone in a
    bucket, after all others. Its layout has the inner tensors, called ``name.attribute``; it is not cast.

    Each bucket is one all-gather (two with tensor parallelism), however many parameters it has. The next one is in
    flight while the body of the loop works. All ranks must call this together and iterate equally far::

        for bucket in stream_full_params(model, dtype=torch.bfloat16):
            for name, tensor in bucket.items():
                ...

    Tensors are valid until the next bucket is asked for, and then are empty: clone what is to be kept. Memory is that
    of two buckets; a parameter of more than ``bucket_bytes`` is a bucket of its own. Do not change parameters before
    the end. Buffers are not streamed, since every rank has them: ``model.named_buffers()``.

    If the body raises or leaves the loop on one rank, that rank takes part in all-gathers until the others know: they
    raise a ``PeerError`` that names it when they ask for a bucket that it no longer sends, at most two
    buckets later. Ranks that get nothing from it, those of other replicas, go on to the end. All can go on then. For
    that the iterator must be closed at once, as it is by ``for bucket in stream_full_params(...)``; keep it in a
    variable only inside of ``with stream_full_params(...) as stream``. It also needs a body without collectives: a rank
    that waits for another one there never asks for the next bucket.

    Args:
        model: a module, sharded or not.
        bucket_bytes: the most bytes of a bucket.
        dtype: cast parameters of floating point to it, before they are sent.
        key_map: a function of a name, that returns one of these:

            - a name;
            - ``None``: the parameter is left out;
            - ``JoinPart(name, index, count)``: it is a part of tensor ``name``, which is the concatenation along dim 0
              of all ``count`` parts in the order of ``index`` and has the place of the first that the model has;
            - a mapping ``{name: rows, ...}``: it is split along dim 0, in this order.

            Names are without prefixes of wrappers, as in ``composable_fsdp.checkpoint.state_dict``. Of a tied
            parameter, the first name counts that is not left out; others that are mapped to names are
            ``bucket.aliases``.
        rank0_only: only the first rank of the model's largest mesh gets tensors. Buckets of other ranks have
            ``packed=None`` and no items. They take part in the all-gathers and drop what they receive, since no
            transport gathers to one rank: it saves them the copies and half of the memory.

    Raises:
        ConfigurationError: an argument makes no sense.
        ParameterError: parameters are on the meta device, pending sums, or of a class that cannot be taken apart.
        LifecycleError: during a forward or backward.
        DivergenceError: ranks call it for different models, or with different arguments.
        PeerError: another rank has raised one of these; in the loop, another rank has left it.
    """
    sources = ModelSources.of(model, dtype, prepare(model, "stream_full_params"))

    def contents() -> _FullParams:
        units = checked_units(sources, bucket_bytes, dtype, key_map)
        plain, wrapped = list[Unit](), list[Unit]()
        for unit in units:
            (wrapped if sources.sources[unit.members[0]].is_wrapped else plain).append(unit)
        plans = plan_buckets(sources, plain, bucket_bytes)
        return _FullParams(sources, [*plans, *(BucketPlan(wrapped=unit) for unit in wrapped)])

    return WeightStream("stream_full_params", sources, contents, rank0_only)


def checked_units(
    sources: ModelSources, bucket_bytes: int, dtype: torch.dtype | None, key_map: KeyMap | None
) -> list[Unit]:
    """Check the arguments of a stream, and return its tensors."""
    if bucket_bytes < 1:
        raise ConfigurationError(f"bucket_bytes is a number of bytes of at least 1, not {bucket_bytes!r}.")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigurationError(f"dtype is a dtype of floating point or None, not {dtype!r}.")
    units = units_of(sources.named(), key_map)
    sources.check(units)
    return units


class Item(Protocol):
    """One result of a stream, which frees it once it is asked for the next one."""

    def _release(self) -> None: ...


T = TypeVar("T", bound=Item)
T_co = TypeVar("T_co", bound=Item, covariant=True)


class Contents(Protocol[T_co]):
    """The source of the buckets of a stream."""

    def __len__(self) -> int: ...

    def sizes(self) -> object:
        """Return what must be the same on all ranks."""

    def opening(self) -> tuple[int, int]:
        """Return this rank's numbers for the agreement, of which all ranks learn the largest."""

    def agreed(self, first: int, second: int) -> None:
        """Note the largest of all ranks' numbers."""

    def next_plan(self, number: int, has_left: bool) -> tuple[BucketPlan, int]:
        """Return the plan of bucket ``number``, and a number of which all ranks learn the largest with it."""

    def received(self, number: int, gather: BucketGather, *, takes: bool) -> T_co:
        """Return what is yielded for bucket ``number``, which has arrived, with values if ``takes``."""

    def finish(self) -> None:
        """Note that this rank has yielded all buckets."""


class WeightStream(Generic[T]):
    """An iterator of buckets, and a context that closes it.

    :func:`stream_full_params` and :func:`stream_changed_params` make it.
    """

    _is_done = True

    def __init__(
        self, caller: str, sources: ModelSources, contents: Callable[[], Contents[T]], rank0_only: bool
    ) -> None:
        self._caller, self._sources = caller, sources
        self._stream = CommStream("weights", device_capabilities(sources.device), priority=-1)
        self._takes = sources.is_root or not rank0_only
        self._left = 0
        """1 + the rank of this process once its consumer has left."""
        self._problem: BaseException | None = None
        made: Contents[T] | None = None
        numbers = 0, 0
        try:
            made = contents()
            numbers = made.opening()
        except BaseException as error:  # also an interrupt of key_map: the others wait for this rank
            self._leave(error)
        self._contents = self._agree(made, numbers)
        self._in_flight: deque[tuple[BucketGather, InFlight[None]]] = deque()
        self._launched = self._position = 0
        self._current: T | None = None
        self._is_done = False

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self._contents)

    def __iter__(self) -> WeightStream[T]:
        return self

    def __enter__(self) -> WeightStream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_done and not sys.is_finalizing() and dist.is_initialized():
            self.close()

    @torch.inference_mode(False)  # one call may be in inference mode, and the next one not
    @torch.no_grad()
    def __next__(self) -> T:
        self._release()
        if self._is_done or self._position == len(self):
            if not self._is_done:
                self._contents.finish()
            self._is_done = True
            raise StopIteration
        number = self._position
        try:
            self._launch(number + 1)
            left, self._current = self._receive(takes=self._takes)
            if left:
                self._drain()
            else:
                self._launch(self._position + _AHEAD)
        except BaseException:
            self._is_done = True
            raise
        if self._current is None:
            self._is_done = True
            if self._problem is not None:
                raise self._problem
            raise PeerError(
                f"rank {left - 1} has left the loop over {self._caller} before the end: bucket {number + 1} of "
                f"{len(self)} has no values of it. Look at its output for the error. All ranks have ended the "
                "stream, and can go on.",
                [left - 1],
            )
        return self._current

    def close(self) -> None:
        """End the stream. If buckets are left, other ranks are told in their all-gathers, in which this one takes part.

        It waits for the others to come there, which read two buckets more than this one.
        """
        self._release()
        if self._is_done:
            return
        self._is_done = True
        self._leave()
        if not self._sources.axes:
            return
        with torch.inference_mode(False), torch.no_grad():
            while self._position < len(self):
                self._launch(self._position + 1)
                if self._receive(takes=False)[0]:
                    break
                self._launch(self._position + _AHEAD)
            self._drain()

    def _leave(self, problem: BaseException | None = None) -> None:
        self._problem = problem
        self._left = 1 + (dist.get_rank() if dist.is_initialized() else 0)

    def _release(self) -> None:
        if self._current is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._current._release()
            self._current = None

    def _agree(self, made: Contents[T] | None, numbers: tuple[int, int]) -> Contents[T]:
        """Return what was made. Raise on all ranks if one has a problem, or if they plan different messages."""
        check = 0 if made is None else crc32(repr(made.sizes()).encode())
        header = self._left, check, -check, *numbers
        gather = BucketGather(self._sources, BucketPlan(), header, f"agreement on {self._caller}")
        with torch.inference_mode(False), torch.no_grad():
            gather.run(self._stream).wait()
        left, largest, smallest, *numbers_of_all = gather.header
        if self._problem is not None:
            raise self._problem
        if made is None or left:
            raise PeerError(
                f"rank {left - 1} cannot stream the parameters of the model: look at its output for the error. Nothing "
                "was sent.",
                [left - 1],
            )
        if largest != -smallest:
            raise DivergenceError(
                f"ranks call {self._caller} for different models or with different arguments: this rank planned "
                f"{len(made)} buckets of other sizes or parameters. Nothing was sent. Pass the same model, "
                "bucket_bytes, dtype, key_map and other arguments on all ranks."
            )
        made.agreed(*numbers_of_all)
        return made

    def _launch(self, end: int) -> None:
        """Launch the buckets up to ``end``, those that are left."""
        for number in range(self._launched, min(end, len(self))):
            gather: BucketGather | None = None
            try:
                gather = self._gather(number)
                pending = gather.run(self._stream)
            except BaseException as error:  # such as one of memory, on this rank only
                if gather is not None and gather.is_launched:
                    raise
                self._leave(error)
                gather = self._gather(number)
                pending = gather.run(self._stream)
            self._in_flight.append((gather, pending))
            self._launched += 1

    def _gather(self, number: int) -> BucketGather:
        plan, more = self._contents.next_plan(number, self._left > 0)
        header = self._left, 0, 0, 0, more
        return BucketGather(self._sources, plan, header, f"bucket {number + 1} of {self._caller}")

    def _receive(self, *, takes: bool) -> tuple[int, T | None]:
        """Wait for the next bucket. Return 1 + the rank that has left in it, or 0, and the bucket if none has."""
        gather, pending = self._in_flight.popleft()
        number, self._position = self._position, self._position + 1
        pending.wait()
        left = gather.header[0]
        if left:
            return left, None
        try:
            return 0, self._contents.received(number, gather, takes=takes)
        except BaseException:  # such as one of memory, on this rank only
            del gather, pending
            self.close()
            raise

    def _drain(self) -> None:
        """Wait for what is in flight. All ranks have launched the same."""
        while self._in_flight:
            self._in_flight.popleft()[1].wait()


class _FullParams:
    """Contents of a stream: all values."""

    def __init__(self, sources: ModelSources, plans: Sequence[BucketPlan]) -> None:
        self._sources, self._plans = sources, plans

    def __len__(self) -> int:
        return len(self._plans)

    def sizes(self) -> object:
        return [plan.sizes() for plan in self._plans]

    def opening(self) -> tuple[int, int]:
        return 0, 0

    def agreed(self, first: int, second: int) -> None:
        pass

    def next_plan(self, number: int, has_left: bool) -> tuple[BucketPlan, int]:
        return self._plans[number], 0

    def received(self, number: int, gather: BucketGather, *, takes: bool) -> WeightBucket:
        plan = self._plans[number]
        if plan.wrapped is None:
            return WeightBucket(plan.layout, gather.unpack() if takes else None)
        source, name = self._sources.sources[plan.wrapped.members[0]], plan.wrapped.tensors[0].name
        full = _arrived(assemble_full(source.tensor, source.sharding, False))  # all ranks take part
        inner = dict(_inner_tensors(name, full))
        units = [Unit((), (PackedTensor(each, tuple(value.shape), value.dtype),)) for each, value in inner.items()]
        layout = replace(placed(units)[0], aliases=plan.wrapped.aliases)
        if not takes:
            return WeightBucket(layout, None)
        packed = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._sources.device)
        for each, place in layout.unpack(packed).items():
            place.copy_(inner[each])
        return WeightBucket(layout, packed, (name, full))

    def finish(self) -> None:
        pass


# -- tensors of classes that wrap others


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or what it is once the collective is done that makes it."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _inner_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain inner tensors of ``tensor``, called ``name``."""
    if not is_wrapper(tensor):
        yield name, tensor.detach()
        return
    for attribute in cast(Any, tensor).__tensor_flatten__()[0]:
        yield from _inner_tensors(f"{name}.{attribute}", _arrived(getattr(tensor, attribute)))


def _rebuilt(name: str, tensor: torch.Tensor, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor as ``tensor``, called ``name``, with the ``inner`` tensors."""
    if not is_wrapper(tensor):
        return inner[name]
    attributes, context = cast(Any, tensor).__tensor_flatten__()
    made = {each: _rebuilt(f"{name}.{each}", _arrived(getattr(tensor, each)), inner) for each in attributes}
    whole: torch.Tensor = cast(Any, type(tensor)).__tensor_unflatten__(made, context, tensor.shape, tensor.stride())
    return whole
