"""Labels in profiles and in ``TORCH_LOGS=+fsdp``, such as ``FSDP::all_gather (layers.0)``: of hooks, and of launches.

They are those of torch's FSDP2, which tools search for, and the logger is torch's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

from torch.autograd import profiler

from composable_fsdp._core.events import Hook, ParameterState, describe_groups
from composable_fsdp._core.group import ParamGroup
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
            cast(Any, root).launcher.wrap_verbs(_labelled if are_read else None)


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


_OF_VERBS: dict[str, tuple[str, Callable[[Any], list[str]]]] = {
    "gather": ("all_gather", _gathered),
    "wait": ("all_gather_copy_out", _awaited),
    "free": ("all_gather_copy_out", _awaited),
    "reduce": ("post_backward_reduce", lambda launch: [member.name for member in launch.members]),
    "finish": ("post_backward_rs_wait", lambda pending: [member.name for member in pending.launch.members]),
}
"""The label of each verb of a launcher, and the names of the groups for which it does something."""


def _labelled(verb: str, act: Callable[..., Any]) -> Callable[..., Any]:
    operation, names_for = _OF_VERBS[verb]

    def labelled(subject: Any, *arguments: Any) -> Any:
        names = names_for(subject)
        with _label(operation, describe_groups(names)) if names else nullcontext():
            return act(subject, *arguments)

    return labelled
