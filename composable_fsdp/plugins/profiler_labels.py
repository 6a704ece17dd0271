"""The labels of hooks in profiles and in torch's log, such as ``FSDP::pre_forward (layers.0)``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from composable_fsdp._core.seams import Observer, Root
from composable_fsdp._runtime.groups import profiling
from composable_fsdp._runtime.schedule.schedule import Hook

__all__ = ["ProfilerLabels"]

_LABELS = {
    Hook.PRE_FORWARD: "pre_forward",
    Hook.POST_FORWARD: "post_forward",
    Hook.PRE_BACKWARD: "pre_backward",
    Hook.END_BACKWARD: "root_post_backward_callback",
}


class ProfilerLabels(Observer):
    """Labels the hooks of one root while a profiler runs, or torch's log is enabled."""

    def __init__(self) -> None:
        self._labels = _HookLabels()

    def for_root(self, root: Root) -> Observer:
        return ProfilerLabels()

    def before_first_hook(self, root: Root) -> None:
        profiling.look_for_readers()
        if profiling.active:
            root.events.add(self._labels)
        else:
            root.events.remove(self._labels)


class _HookLabels(Observer):
    """Labels hooks, which may be nested."""

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[None]] = []

    def before_hook(self, root: Root, hook: Hook, subject: Any) -> None:
        label = profiling.label(_LABELS[hook], subject.name) if hook in _LABELS else nullcontext()
        label.__enter__()
        self._open.append(label)

    def after_hook(self, root: Root, hook: Hook, subject: Any) -> None:
        self._open.pop().__exit__(None, None, None)
