"""Settings of a root that counts for all groups under it: no group may have been told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from composable_fsdp._runtime.groups.state import MERGED_BYTES, FSDPState
from composable_fsdp._runtime.schedule.policy import PREFETCH_LIMIT
from composable_fsdp.errors import ConfigurationError

__all__ = ["check_settings"]


@dataclass(frozen=True)
class _Setting:
    """``of`` a unit; what is ``unless_told`` is nobody's wish. ``remedy`` completes the message."""

    name: str
    of: Callable[[FSDPState], object]
    remedy: str
    unless_told: object = None


_SETTINGS = (
    _Setting("device", lambda state: state.group.axes.device, "Give all of them meshes of one device type."),
    _Setting("order check", lambda state: state.order_check.value, "Call set_order_check on the root."),
    _Setting(
        "prefetch_limit",
        lambda state: state.prefetch_limit,
        "Call set_prefetch_limit on the root only.",
        unless_told=PREFETCH_LIMIT,
    ),
    _Setting(
        "max_unsharded_bytes", lambda state: state.max_unsharded_bytes, "Call set_max_unsharded_bytes on the root only."
    ),
    _Setting(
        "max_merged_bytes",
        lambda state: state.max_merged_bytes,
        "Call set_max_merged_bytes on the root only.",
        unless_told=MERGED_BYTES,
    ),
)


def check_settings(root: FSDPState, states: Iterable[FSDPState]) -> None:
    """
    Raises:
        ConfigurationError: a group below ``root`` has another value of what counts for all. Both are in the text.
    """
    for state in states:
        for setting in _SETTINGS:
            value, wanted = setting.of(state), setting.of(root)
            if value not in (wanted, setting.unless_told):
                raise ConfigurationError(
                    f"the {setting.name} of {state.name!r} ({state.class_name}) is {value}, but that of {root.name!r} "
                    f"({root.class_name}), which contains it, is {wanted}, and one counts for all. {setting.remedy}"
                )
