"""Labels in profiles and in ``TORCH_LOGS=+fsdp``, such as ``FSDP::all_gather (layers.0)``: of hooks, and of launches.

They are those of torch's FSDP2, which tools search for, and the logger is torch's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd import profiler

from composable_fsdp._core.backward import GroupReduction, Launcher
from composable_fsdp._core.group import ParamGroup
from composable_fsdp._core.group_plan import Hook, ParameterState, describe_groups
from composable_fsdp._core.memory import CommStreams
from composable_fsdp._core.seams import ObservedRoot, Observer

_log = logging.getLogger("torch.distributed.fsdp.fully_shard")

_LABELS = {
    Hook.PRE_FORWARD: "pre_forward",
    Hook.POST_FORWARD: "post_forward",
    Hook.PRE_BACKWARD: "pre_backward",
    Hook.END_BACKWARD: "root_post_backward_callback",
}
_UNSHARDING = ParameterState.UNSHARDING


_enter, _exit = torch.autograd._record_function_with_args_enter, torch.autograd._record_function_with_args_exit
"""As ``torch.profiler.record_function``, of the same scope, but in 1.7 us in place of 7: a step of a group has
ten labels (CPU, torch 2.13, under a profiler)."""


def _begin(operation: str, names: str) -> Any:
    """Begin a label, which is logged too. Return the range, for :func:`_exit`."""
    text = f"FSDP::{operation} ({names})"
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", text)
    return _enter(text)


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
        self._open: list[Any] = []

    def before_hook(self, root: ObservedRoot, hook: Hook, subject: Any) -> None:
        if hook in _LABELS:
            self._open.append(_begin(_LABELS[hook], subject.name))

    def after_hook(self, root: ObservedRoot, hook: Hook, subject: Any) -> None:
        if hook in _LABELS:
            _exit(self._open.pop())


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
        needed = [group for group in groups if group.buckets and not group.unshard_started]
        _in_label("all_gather", needed, self.labelled.gather, groups, label)

    def wait(self, group: ParamGroup) -> None:
        _in_label("all_gather_copy_out", _if_unsharding(group), self.labelled.wait, group)

    def free(self, group: ParamGroup) -> None:
        _in_label("all_gather_copy_out", _if_unsharding(group), self.labelled.free, group)

    def reduce(self, reduction: GroupReduction) -> None:
        _in_label("post_backward_reduce", reduction.members, self.labelled.reduce, reduction)

    def finish(self, reduction: GroupReduction, unread: list[GroupReduction] | None = None) -> None:
        _in_label("post_backward_rs_wait", reduction.members, self.labelled.finish, reduction, unread)


def _if_unsharding(group: ParamGroup) -> Sequence[ParamGroup]:
    return (group,) if group.parameter_state is _UNSHARDING and group.buckets else ()


def _in_label(operation: str, groups: Sequence[ParamGroup], verb: Callable[..., None], *arguments: object) -> None:
    """Call ``verb`` in a label of ``groups``, or in none if there are none."""
    if not groups:
        verb(*arguments)
        return
    begun = _begin(operation, describe_groups([group.name for group in groups]))
    try:
        verb(*arguments)
    finally:
        _exit(begun)
