"""The watchdog of this process, if one runs."""

from __future__ import annotations

import torch.distributed as dist

from tests._internals import Watchdog, watchdog


def known_watchdog() -> Watchdog | None:
    """Return the watchdog of the default process group if there is one. Unlike ``job_watchdog``, it begins none."""
    world = dist.group.WORLD
    return watchdog._watchdogs.get(world) if world is not None else None
