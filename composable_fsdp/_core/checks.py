"""Errors for passes that cannot go on, and the check of settings that exist once per root. Texts say what to do."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from composable_fsdp._runtime.groups.state import ROOT_OPTIONS, FSDPState
from composable_fsdp.errors import ConfigurationError, LifecycleError

__all__ = ["another_thread", "check_settings", "left_by_an_exception", "unseen_output"]


def another_thread(state: FSDPState, thread: threading.Thread, kind: str, root: FSDPState) -> LifecycleError:
    """Return the error for a forward of ``state`` while ``thread`` is inside a pass of ``kind``."""
    return LifecycleError(
        f"thread {threading.current_thread().name!r} began a forward of {state.name!r} while thread "
        f"{thread.name!r} is inside the {kind} of {root.name!r}. A sharded model is not "
        "re-entrant: let one thread run it at a time, or give each a copy of its own. If that pass was left by "
        "an exception, call reset_iter_state() on the root module."
    )


def left_by_an_exception(state: FSDPState, kind: str, root: FSDPState) -> LifecycleError:
    """Return the error for a forward of ``state`` that begins while a pass of ``kind`` has not ended."""
    return LifecycleError(
        f"the forward of {state.name!r} begins while the last {kind} pass under {root.name!r} "
        "has not ended; it was probably left by an exception. Call reset_iter_state() on the root module "
        "before the next step."
    )


def unseen_output(state: FSDPState) -> LifecycleError:
    """Return the error for a backward that used parameters of ``state`` while they were sharded."""
    return LifecycleError(
        f"backward reached {state.name!r} through a tensor that its forward did not show, so gradients are wrong. If "
        f"{state.class_name} returns an object of a class of your own, make it a dataclass or register it with "
        "torch.utils._pytree.register_pytree_node; if it hands tensors on in another way, shard it with "
        "reshard_after_forward=False. Then call reset_iter_state() on the root module before the next step."
    )


_REMEDIES = {"device": "Give all of them meshes of one device type."}


def check_settings(root: FSDPState, states: Iterable[FSDPState]) -> None:
    """Check that no state has another value of a root setting than ``root``, except the default, for the root's value.

    Raises:
        ConfigurationError: a group below ``root`` has another value. The text has both.
    """
    of_root = _values(root)
    for state in states:
        for name, value in _values(state).items():
            if value not in (of_root[name], None):
                remedy = _REMEDIES.get(name, f"Call set_{name.replace(' ', '_')} on the root{_only(name)}.")
                raise ConfigurationError(
                    f"the {name} of {state.name!r} ({state.class_name}) is {value}, but that of {root.name!r} "
                    f"({root.class_name}), which contains it, is {of_root[name]}, and one counts for all. {remedy}"
                )


def _only(name: str) -> str:
    return "" if name == "order check" else " only"


def _values(state: FSDPState) -> dict[str, object]:
    options = {name: getattr(state.options, name) for name in ROOT_OPTIONS}
    return {"device": state.group.axes.device, "order check": options.pop("order_check"), **options}
