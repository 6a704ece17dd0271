"""The check that all groups under a root have the root's value of settings that exist once per root."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from composable_fsdp._runtime.groups.state import FSDPState, RootOptions
from composable_fsdp.errors import ConfigurationError

__all__ = ["check_settings"]

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
    options = {each.name: getattr(state.options, each.name) for each in fields(RootOptions)}
    return {"device": state.group.axes.device, "order check": options.pop("order_check").value, **options}
