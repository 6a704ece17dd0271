"""One load of a state dict: match, exchange, refuse alike, apply. Models, optimizers and averages share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from composable_fsdp._runtime.params.sharded_param import local_part
from composable_fsdp._runtime.shard_extent import has_own_memory
from composable_fsdp.checkpoint._coordination.mismatch import Mismatch, refuse, tensor_text
from composable_fsdp.checkpoint._state_dict.names import Entry, plain_name
from composable_fsdp.checkpoint._state_dict.options import Form, Full
from composable_fsdp.checkpoint._state_dict.owners import OwnerRanks
from composable_fsdp.checkpoint._state_dict.tensor import compare, fill

__all__ = ["Report", "StateDictLoader"]


@dataclass
class Report:
    """One rank's findings about the state dict that it was given.

    Attributes:
        mismatch: differences from the state to load into.
        digest: a digest of what the ranks must have been given alike.
        values: the values that are not tensors, by name; for optimizers the state of each parameter.
        settings: what the state dict has besides values by name.
    """

    mismatch: Mismatch = field(default_factory=Mismatch)
    digest: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    settings: Any = None


class StateDictLoader:
    """One load on one rank. Nothing is changed on any rank before :meth:`agree` has returned on this one.

    Args:
        owners: the ranks that load together. If only sources have values, they broadcast them.
        form: the form of the values.

    Attributes:
        given: the values that this rank was given, by name. Empty if this rank provides none.
        report: this rank's findings.
        reports: those of all ranks by rank, after :meth:`agree`.
    """

    def __init__(self, owners: OwnerRanks, form: Form | None) -> None:
        self.owners = owners
        self.form = Full() if owners.only_sources else form
        self.given: dict[str, Any] = {}
        self.report = Report()
        self.reports = {owners.rank: self.report}

    def match(self, entries: Mapping[str, Entry], state_dict: object) -> None:
        """Match the values of ``state_dict`` with ``entries`` by name, and report the differences."""
        owners, mismatch = self.owners, self.report.mismatch
        mine = [entry for entry in entries.values() if owners.provides(entry.value)]
        if not mine and not owners.provides():
            return
        if not isinstance(state_dict, Mapping):
            mismatch.others.append(f"a state dict maps names to values, but a {type(state_dict).__name__} was given")
            return
        self.given = {plain_name(str(name)): value for name, value in state_dict.items()}
        for entry in mine:
            self._match_entry(entry)
        if owners.provides():
            unexpected = {str(n): v for n, v in state_dict.items() if plain_name(str(n)) not in entries}
            mismatch.unexpected = {name: _described(value) for name, value in unexpected.items()}

    def _match_entry(self, entry: Entry) -> None:
        name, mismatch = entry.name, self.report.mismatch
        if name not in self.given:
            mismatch.missing[name] = _described(entry.value)
            return
        value = self.given[name]
        if not entry.is_tensor:
            self.report.values[name] = value
            return
        compare(name, entry.value, value, self.form, mismatch)
        if self.owners.only_sources and isinstance(value, torch.Tensor) and not has_own_memory(local_part(value)):
            mismatch.others.append(
                f"{name!r} is a {type(value).__name__}, which cannot be sent from rank 0: only plain tensors can. "
                "Load it on all ranks, without broadcast_from_rank0"
            )

    def agree(self, what: str, *, strict: bool = True) -> None:
        """Exchange the reports of all ranks, and raise the same error on all of them if any has differences.

        Args:
            what: the beginning of the error text.
            strict: missing and unexpected names are differences. Otherwise only names that some ranks miss are.
        """
        separate = not self.owners.only_sources  # each rank was given values of its own
        reports = self.owners.exchange(Report(self.report.mismatch, self.report.digest) if separate else self.report)
        mismatches = {rank: report.mismatch for rank, report in reports.items()}
        if not strict:
            common = set.intersection(*(set(mismatch.missing) for mismatch in mismatches.values()))
            for rank, mismatch in mismatches.items():
                uneven = [name for name in mismatch.missing if separate and name not in common]
                mismatches[rank] = replace(mismatch, missing=dict.fromkeys(uneven, "other ranks have it"))
        refuse(what, mismatches, ignore=() if strict else ("unexpected",))
        if separate and len({report.digest for report in reports.values()}) > 1:
            refuse(what, {0: Mismatch(others=["ranks were given state of different parameters"])})
        self.reports = {**reports, self.owners.rank: self.report}

    def report_of(self, value: object = None) -> Report:
        """Return the report of the rank that provides ``value``, or by default the rest of the state dict."""
        return self.reports[self.owners.provider_of(value)]

    def receive(self, like: torch.Tensor, value: torch.Tensor | None, dtype: torch.dtype, shape: Any) -> Any:
        """Return the ``value`` for ``like``: this rank's own, or the one that the source broadcasts."""
        return self.owners.send(like, value, dtype, shape) if self.owners.only_sources else value

    def fill(self, entries: Mapping[str, Entry]) -> dict[str, Any]:
        """Fill the tensors of ``entries`` in place, and return all present values by the entries' keys."""
        values: dict[str, Any] = {}
        filled: set[int] = set()
        with torch.inference_mode(False), torch.no_grad():
            for name, entry in entries.items():
                target, report = entry.value, self.report_of(entry.value)
                if name in report.mismatch.missing:
                    continue
                values[entry.key] = target if entry.is_tensor else report.values[name]
                if entry.is_tensor and id(target) not in filled:
                    filled.add(id(target))
                    value = self.receive(target, self.given.get(name), target.dtype, target.shape)
                    fill(target, entry.sharding, value, self.form)
                    del value  # before the next one is received
        return values


def _described(value: object) -> str:
    return tensor_text(value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
