"""The check that all groups under a root have the root's value of settings that exist once per root."""

from __future__ import annotations

from collections.abc import Iterable

from composable_fsdp._runtime.groups.state import ROOT_DEFAULTS, FSDPState
from composable_fsdp.errors import ConfigurationError

__all__ = ["check_settings"]

_REMEDIES = {
    "device": "Give all of them meshes of one device type.",
    "order check": "Call set_order_check on the root.",
    **{name: f"Call set_{name} on the root only." for name in ROOT_DEFAULTS},
}


def check_settings(root: FSDPState, states: Iterable[FSDPState]) -> None:
    """Check that no state has another value of a root setting than ``root``, except the default, for the root's value.

    Raises:
        ConfigurationError: a group below ``root`` has another value. The text has both.
    """
    of_root = _values(root)
    for state in states:
        for name, value in _values(state).items():
            if value not in (of_root[name], ROOT_DEFAULTS.get(name)):
                raise ConfigurationError(
                    f"the {name} of {state.name!r} ({state.class_name}) is {value}, but that of {root.name!r} "
                    f"({root.class_name}), which contains it, is {of_root[name]}, and one counts for all. "
                    f"{_REMEDIES[name]}"
                )


def _values(state: FSDPState) -> dict[str, object]:
    values = {name: getattr(state, name) for name in ROOT_DEFAULTS}
    return {"device": state.group.axes.device, "order check": state.order_check.value, **values}
