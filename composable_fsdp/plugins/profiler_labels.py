"""Labels in profiles and in ``TORCH_LOGS=+fsdp``, such as ``FSDP::all_gather (layers.0)``: of hooks, and of launches.

They are those of torch's FSDP2, which tools search for, and the logger is torch's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

from torch.autograd import profiler

from composable_fsdp._core.events import Hook, ParameterState, describe_groups
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.launch import GroupReduction, Launcher
from composable_fsdp._core.memory import CommStreams
from composable_fsdp._core.seams import ObservedRoot, Observer

__all__ = ["ProfilerLabels"]

_log = logging.getLogger("torch.distributed.fsdp.fully_shard")

_LABELS = {
    Hook.PRE_FORWARD: "pre_forward",
    Hook.POST_FORWARD: "post_forward",
    Hook.PRE_BACKWARD: "pre_backward",
    Hook.END_BACKWARD: "root_post_backward_callback",
}


@contextmanager
def _label(operation: str, name: str) -> Iterator[None]:
    text = f"FSDP::{operation} ({name})"
    _log.debug("%s", text)
    with profiler.record_function(text):
        yield


class ProfilerLabels(Observer):
    """Labels the hooks and launches of one root while a profiler runs, or torch's log is enabled."""

    def __init__(self) -> None:
        self._of_hooks = _HookLabels()
        self._are_shown = False

    def for_root(self, root: ObservedRoot) -> Observer:
        return ProfilerLabels()

    def before_first_hook(self, root: ObservedRoot) -> None:
        are_read = profiler._is_profiler_enabled or _log.isEnabledFor(logging.DEBUG)
        if are_read is not self._are_shown:
            self._are_shown = are_read
            (root.observers.add if are_read else root.observers.remove)(self._of_hooks)
            core = cast(Any, root)
            core.act_by(_LabelledLauncher(core.launcher) if are_read else core.launcher.labelled)


class _HookLabels(Observer):
    """Labels hooks, which may be nested."""

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[None]] = []

    def before_hook(self, root: ObservedRoot, hook: Hook, subject: Any) -> None:
        label = _label(_LABELS[hook], subject.name) if hook in _LABELS else nullcontext()
        label.__enter__()
        self._open.append(label)

    def after_hook(self, root: ObservedRoot, hook: Hook, subject: Any) -> None:
        self._open.pop().__exit__(None, None, None)


def _gathered(groups: Sequence[ParamGroup]) -> list[str]:
    """Return the names of those of ``groups`` that a gather launches now: none if they have no parameters."""
    needed = [group for group in groups if not group.unshard_started]
    return [group.name for group in needed] if any(group.buckets for group in needed) else []


def _awaited(group: ParamGroup) -> list[str]:
    return [group.name] if group.parameter_state is ParameterState.UNSHARDING and group.buckets else []


class _LabelledLauncher:
    """The verbs of ``launcher``, in labels of the groups for which they do something."""

    def __init__(self, launcher: Launcher) -> None:
        self.labelled, self.has_streams = launcher, launcher.has_streams
        self.shrink, self.start = launcher.shrink, launcher.start
        self.at_end_of_backward = launcher.at_end_of_backward

    @property
    def streams(self) -> CommStreams:
        return self.labelled.streams

    @streams.setter
    def streams(self, streams: CommStreams) -> None:
        self.labelled.streams = streams

    def gather(self, groups: Sequence[ParamGroup], label: str) -> None:
        with _label_if("all_gather", _gathered(groups)):
            self.labelled.gather(groups, label)

    def wait(self, group: ParamGroup) -> None:
        with _label_if("all_gather_copy_out", _awaited(group)):
            self.labelled.wait(group)

    def free(self, group: ParamGroup) -> None:
        with _label_if("all_gather_copy_out", _awaited(group)):
            self.labelled.free(group)

    def reduce(self, reduction: GroupReduction) -> None:
        with _label_if("post_backward_reduce", [member.name for member in reduction.members]):
            self.labelled.reduce(reduction)

    def finish(self, reduction: GroupReduction, unread: list[GroupReduction] | None = None) -> None:
        with _label_if("post_backward_rs_wait", [member.name for member in reduction.members]):
            self.labelled.finish(reduction, unread)


def _label_if(operation: str, names: Sequence[str]) -> AbstractContextManager[None]:
    """Return the label of ``operation`` on the groups ``names``, or none if there are none."""
    return _label(operation, describe_groups(names)) if names else nullcontext()
