"""The verbs by which a root acts on parameter groups: gather, wait, free, reduce and finish.

Each skips what is done already. ``dry.py`` has a launcher that only notes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch.autograd import Variable

from composable_fsdp._memory.streams import CommStreams
from composable_fsdp._runtime.groups.param_group import ParamGroup, unshard_together
from composable_fsdp._runtime.groups.param_group_gradients import PendingReduction, ReductionLaunch

__all__ = ["Launcher", "StreamLauncher"]


class Launcher(Protocol):
    streams: CommStreams
    has_streams: bool
    """False if the host waits for collectives."""

    def gather(self, groups: Sequence[ParamGroup], label: str) -> None:
        """Launch one all-gather, called ``label`` in errors, of those of ``groups`` that are sharded."""
        ...

    def wait(self, group: ParamGroup) -> None:
        """Wait for the all-gather of ``group`` and register its unsharded parameters."""
        ...

    def free(self, group: ParamGroup) -> None:
        """Register the sharded parameters of ``group``, and free the unsharded ones."""
        ...

    def shrink(self, group: ParamGroup, mesh_size: int) -> None:
        """Free ``group``, but keep a slice from which ``mesh_size`` neighbouring ranks can gather it again."""
        ...

    def reduce(self, launch: ReductionLaunch) -> PendingReduction:
        """Launch a reduction. If it has two stages, this is the first one."""
        ...

    def start(self, reduction: PendingReduction) -> None:
        """Launch the second stage of ``reduction``, if it has one and that is not launched yet."""
        ...

    def finish(self, reduction: PendingReduction, unread: list[PendingReduction] | None = None) -> None:
        """Wait for ``reduction``, and set the sharded gradients.

        If the host would wait for flags, or ``unread`` has earlier reductions, append ``reduction`` to it instead.
        """
        ...

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when autograd has run the backward that runs now."""
        ...


class StreamLauncher:
    """Launches on the streams of a device. Final."""

    def __init__(self, streams: CommStreams) -> None:
        self.has_streams = streams.device.has_streams
        self._streams = streams
        self.wrap_verbs(None)

    @property
    def streams(self) -> CommStreams:
        return self._streams

    @streams.setter
    def streams(self, streams: CommStreams) -> None:
        self._streams = streams
        self.wrap_verbs(self._wrap)

    def wrap_verbs(self, wrap: Callable[[str, Any], Any] | None) -> None:
        """Let verbs be what ``wrap`` returns for their names and functions, or themselves."""
        self._wrap, wrapped = wrap, wrap or (lambda _, verb: verb)
        self.gather = wrapped("gather", partial(unshard_together, self._streams))
        self.wait = wrapped("wait", ParamGroup.wait)
        self.free = wrapped("free", ParamGroup.reshard)
        self.reduce = wrapped("reduce", ReductionLaunch.run)
        self.finish = wrapped("finish", PendingReduction.complete)

    shrink = staticmethod(ParamGroup.shrink)
    start = staticmethod(PendingReduction.start)

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        engine: Any = Variable._execution_engine
        engine.queue_callback(callback)
