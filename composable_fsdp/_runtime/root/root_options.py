"""The check that all groups under a root have the root's value of settings that exist once per root."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from composable_fsdp._runtime.groups.state import FUSED_BYTES, FSDPState
from composable_fsdp._runtime.schedule.passes import PREFETCH_LIMIT
from composable_fsdp.errors import ConfigurationError

__all__ = ["check_settings"]


@dataclass(frozen=True)
class _Setting:
    """A setting, read by ``read``. A group with the ``default`` takes the root's value. ``remedy`` ends the message."""

    name: str
    read: Callable[[FSDPState], object]
    remedy: str
    default: object = None


_SETTINGS = (
    _Setting("device", lambda state: state.group.axes.device, "Give all of them meshes of one device type."),
    _Setting("order check", lambda state: state.order_check.value, "Call set_order_check on the root."),
    _Setting(
        "prefetch_limit",
        lambda state: state.prefetch_limit,
        "Call set_prefetch_limit on the root only.",
        default=PREFETCH_LIMIT,
    ),
    _Setting(
        "max_unsharded_bytes", lambda state: state.max_unsharded_bytes, "Call set_max_unsharded_bytes on the root only."
    ),
    _Setting(
        "max_fused_bytes",
        lambda state: state.max_fused_bytes,
        "Call set_max_fused_bytes on the root only.",
        default=FUSED_BYTES,
    ),
)


def check_settings(root: FSDPState, states: Iterable[FSDPState]) -> None:
    """Check that no state has another value of a root setting than ``root``.

    Raises:
        ConfigurationError: a group below ``root`` has another value. The text has both.
    """
    for state in states:
        for setting in _SETTINGS:
            value, wanted = setting.read(state), setting.read(root)
            if value not in (wanted, setting.default):
                raise ConfigurationError(
                    f"the {setting.name} of {state.name!r} ({state.class_name}) is {value}, but that of {root.name!r} "
                    f"({root.class_name}), which contains it, is {wanted}, and one counts for all. {setting.remedy}"
                )
