"""Tables of the time that collectives and computation take, from which schedules are chosen and predicted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path

from composable_fsdp.errors import ConfigurationError

__all__ = ["AxisCosts", "CollectiveCost", "Costs"]


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """The time of one kind of collective: ``latency + per_rank * (ranks - 1) + nbytes / bandwidth``.

    Args:
        latency: seconds for a message without bytes between two ranks.
        bandwidth: bytes per second that one rank sends and receives.
        per_rank: additional seconds for each further rank, as in a ring.

    Raises:
        ConfigurationError: a value is no number, negative or not finite, or the bandwidth is 0.
    """

    latency: float
    bandwidth: float
    per_rank: float = 0.0

    def __post_init__(self) -> None:
        _check("latency", self.latency)
        _check("per_rank", self.per_rank)
        _check("bandwidth", self.bandwidth, positive=True)

    def seconds(self, nbytes: int, ranks: int, messages: int = 1) -> float:
        """Return the seconds for collectives whose full tensors have ``nbytes`` bytes together.

        Args:
            nbytes: the bytes of the outputs of all-gathers, or of the inputs of reductions, over all ranks.
            ranks: the number of ranks.
            messages: the number of collectives, launched one after the other.
        """
        if ranks == 1:
            return 0.0
        sent = nbytes * (ranks - 1) / ranks
        return messages * (self.latency + self.per_rank * (ranks - 1)) + sent / self.bandwidth


@dataclass(frozen=True, slots=True)
class AxisCosts:
    """The costs of the collectives of one mesh axis. Those of an all-reduce are for the bytes of its tensor.

    Raises:
        ConfigurationError: one of them is no ``CollectiveCost``.
    """

    all_gather: CollectiveCost
    reduce_scatter: CollectiveCost
    all_reduce: CollectiveCost

    def __post_init__(self) -> None:
        for kind in self.__slots__:
            cost = getattr(self, kind)
            if not isinstance(cost, CollectiveCost):
                raise ConfigurationError(f"the costs of {kind} must be a CollectiveCost, not {cost!r}.")


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of the collectives of a model, and of its computation.

    Args:
        axes: the costs of each mesh axis, by its name in the mesh. Those of ``""`` are for all other axes.
        forward: seconds of the forward of each group's own modules in a step, without nested groups, by name of the
            group. Where waits for collectives block the host, they include the host's other work in the hooks.
        backward: the same for the backward.
        copy_bandwidth: bytes per second at which a device copies its memory. ``None`` if copies take no time.
        source: the origin of the figures, which a choice shows.

    Raises:
        ConfigurationError: a value is no number, negative or not finite; a bandwidth is 0; or an axis has no costs.
    """

    axes: Mapping[str, AxisCosts]
    forward: Mapping[str, float] = field(default_factory=dict)
    backward: Mapping[str, float] = field(default_factory=dict)
    copy_bandwidth: float | None = None
    source: str = "given"

    def __post_init__(self) -> None:
        for name, axis in self.axes.items():
            if not isinstance(axis, AxisCosts):
                raise ConfigurationError(f"the costs of mesh axis {name!r} must be AxisCosts, not {axis!r}.")
        for times in (self.forward, self.backward):
            for name, seconds in times.items():
                _check(f"time of {name!r}", seconds)
        if self.copy_bandwidth is not None:
            _check("copy_bandwidth", self.copy_bandwidth, positive=True)

    def axis(self, name: str) -> AxisCosts:
        """Return the costs of the mesh axis ``name``.

        Raises:
            ConfigurationError: there are none for it, and none for all other axes.
        """
        found = self.axes.get(name) or self.axes.get("")
        if found is None:
            raise ConfigurationError(
                f"these costs ({self.source}) have the mesh axes {sorted(self.axes)}, but not {name!r}. Add it, or "
                "costs for all other axes under the name ''."
            )
        return found

    def with_slower_computation(self, factor: float) -> Costs:
        """Return the costs with computation that takes ``factor`` times as long."""
        forward, backward = (
            {name: factor * seconds for name, seconds in times.items()} for times in (self.forward, self.backward)
        )
        return replace(self, forward=forward, backward=backward)

    def copy_seconds(self, nbytes: int) -> float:
        """Return the seconds for a copy of ``nbytes`` bytes in device memory."""
        return nbytes / self.copy_bandwidth if self.copy_bandwidth else 0.0

    def save(self, path: str | PathLike[str]) -> None:
        """Write the table as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def load(path: str | PathLike[str]) -> Costs:
        """Return the table that :meth:`save` wrote.

        Raises:
            ConfigurationError: the file has no such table. The text has the reason.
        """
        try:
            table = json.loads(Path(path).read_text())
            axes = {
                name: AxisCosts(**{kind: CollectiveCost(**cost) for kind, cost in kinds.items()})
                for name, kinds in table.pop("axes").items()
            }
            table.pop("activations", None)  # in files of an earlier version
            return Costs(axes, **{"source": str(path), **table})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{path} has no table of costs: {error}. Write one with Costs.save.") from error


def _check(name: str, value: object, *, positive: bool = False) -> None:
    if not (isinstance(value, int | float) and math.isfinite(value) and (value > 0 if positive else value >= 0)):
        wanted = "positive and finite" if positive else "finite and at least 0"
        raise ConfigurationError(f"the {name} of costs must be {wanted}, not {value!r}.")
