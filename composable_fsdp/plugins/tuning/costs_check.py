"""The check that all ranks were given the same costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from os import PathLike

from composable_fsdp._consistency.rank_report import ranks_text
from composable_fsdp._consistency.verify_ranks import SHOWN_RANKS, gather_texts
from composable_fsdp._core.mesh import DataParallelAxes
from composable_fsdp._core.state import FSDPState
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError, DivergenceError
from composable_fsdp.plugins.tuning.costs import Costs
from composable_fsdp.plugins.tuning.group_spec import axis_names

__all__ = ["check_costs", "read_costs"]

_SHOWN = 5


def check_costs(states: Mapping[str, FSDPState], costs: Costs | Exception | None) -> None:
    """Check that all ranks were given the same ``costs``, by small all-gathers along each mesh axis.

    An exception stands for costs that this rank could not read. It is raised after the comparison, so that no rank
    waits for this one.

    Raises:
        ConfigurationError: there are none for a mesh axis of the model, or the table has other axes or groups.
        DivergenceError: the costs differ. All ranks raise it with the same text.
    """
    if isinstance(costs, Exception):
        own = f"no costs: {costs}"
    else:
        own = json.dumps(costs and asdict(costs), indent=1, sort_keys=True)
    meshes = dict.fromkeys(pgs.axes for state in states.values() for pgs in state.group.process_groups)
    for axes in meshes:
        texts = gather_texts(own, (axes.shard, axes.replicate), axes.device, "the costs given to set_schedule")
        ranks: dict[tuple[str, ...], list[int]] = {}
        for rank, text in sorted(texts.items()):
            ranks.setdefault(tuple(text.splitlines()), []).append(rank)
        if len(ranks) < 2:
            continue
        usual, other = sorted(ranks, key=lambda text: -len(ranks[text]))[:2]
        one, another = next(pair for pair in zip_longest(usual, other, fillvalue="nothing") if pair[0] != pair[1])
        raise DivergenceError(
            f"set_schedule: {ranks_text(ranks[other], SHOWN_RANKS)} was given other costs than "
            f"{ranks_text(ranks[usual], SHOWN_RANKS)}. The first difference: {another.strip()} in place of "
            f"{one.strip()}. Ranks that choose by other costs launch other collectives. Load one table on all "
            "of them, or send that of one rank with torch.distributed.broadcast_object_list."
        )
    if isinstance(costs, Exception):
        raise costs
    if costs is not None:
        _check_names(states, axis_names(meshes), costs)


def _check_names(
    states: Mapping[str, FSDPState], axes: Mapping[DataParallelAxes, tuple[str, str]], costs: Costs
) -> None:
    """Check that ``costs`` has all mesh axes of more than one rank, and no others, and only groups of the model."""
    for mesh, names in axes.items():
        for name, axis in zip(names, (mesh.shard, mesh.replicate), strict=True):
            if axis.size > 1:
                costs.axis(name)
    known = {name for names in axes.values() for name in names}
    for what, given, found in (
        ("mesh axes", {*costs.axes} - {""}, known),
        ("groups", {*costs.forward, *costs.backward}, states.keys()),
    ):
        unknown = sorted(given - found)
        if unknown:
            raise ConfigurationError(
                f"these costs ({costs.source}) have {what} that the model does not have: {_shown(unknown)}. Its "
                f"{what} are {_shown(sorted(found))}. Take them out, or measure this model with calibrate(). "
                "Call set_schedule on the root."
            )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def read_costs(costs: object) -> Costs | Exception | None:
    """Return ``costs``, or those in the file of that name, or the error in their place."""
    if costs is None or isinstance(costs, Costs):
        return costs
    if not isinstance(costs, str | PathLike):
        return ArgumentTypeError(f"costs must be Costs, the path of a file or None, not {type(costs).__name__}.")
    try:
        return Costs.load(costs)
    except (ConfigurationError, OSError) as error:
        return error
