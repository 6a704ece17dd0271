"""Loading of optimizer state dicts, which are keyed by parameter names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from composable_fsdp._runtime.params.sharded_param import local_part
from composable_fsdp._runtime.shard_extent import like
from composable_fsdp.checkpoint._coordination.mismatch import Mismatch, refuse
from composable_fsdp.checkpoint._state_dict.model import streams_from_rank0
from composable_fsdp.checkpoint._state_dict.names import on_meta, plain_name, prepare_for_access
from composable_fsdp.checkpoint._state_dict.options import Form, Full, Local
from composable_fsdp.checkpoint._state_dict.owners import OwnerRanks, digest
from composable_fsdp.checkpoint._state_dict.param_groups import lacking, restored
from composable_fsdp.checkpoint._state_dict.rekey import OptimizerParam, optimizer_params
from composable_fsdp.checkpoint._state_dict.tensor import compare, fill, shard_for
from composable_fsdp.optim.local_optimizer import ELEMENTWISE

__all__ = ["load_optimizer_state_dict"]


def load_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    form: Form | None = None,
    *,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load what :func:`optimizer_state_dict` returned, from the same or other ranks, meshes or forms.

    All ranks must call it together, and agree on errors before anything is loaded. A fresh optimizer needs no step
    first. Parameters and groups are matched by names, in any order, and the groups' hyperparameters are restored.
    Existing state is filled in place. New state is allocated, as a DTensor if it is sharded like its parameter. An
    optimizer that keeps such state as plain local tensors must have it already, by a step, or be given the local form.
    ``optimizer.load_state_dict`` runs last, with its hooks and casts.

    Args:
        model: a module, sharded or not.
        optimizer: an optimizer of parameters of ``model``, with the same parameters in each group as when saved.
        state: the state by names; :func:`rekey_optimizer_state_dict` converts a plain optimizer's own.
        form: the form of the values. By default a DTensor is sharded and a plain tensor full; :class:`Local` must be
            passed.
        broadcast_from_rank0: only rank 0 has a (full) state dict, as with ``Full(rank0_only=True)``, and broadcasts it
            tensor by tensor. What other ranks pass is ignored.

    Raises:
        CheckpointError: groups, parameters or shapes differ. The text has a line for each and is the same on every
            rank.
        ConfigurationError: ``broadcast_from_rank0`` with a form that is not full.
    """
    streams = streams_from_rank0(form, broadcast_from_rank0)
    _Load(model, optimizer, state, Full() if streams else form, streams).carry_out()


@dataclass(frozen=True)
class _TensorSpec:
    """The shape and dtype of a tensor that is broadcast separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class _Report:
    """One rank's findings about the state dict that it was given."""

    mismatch: Mismatch = field(default_factory=Mismatch)
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The saved groups, in the order of the optimizer's groups."""
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State by parameter name. If one rank broadcasts the values, it has specs instead of tensors."""
    others: dict[str, Any] = field(default_factory=dict)
    digest: str = ""


class _Load:
    """One call of :func:`load_optimizer_state_dict`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, state: Any, form: Form | None, streams: bool) -> None:
        self._optimizer = optimizer
        self._form = form
        self._streams = streams
        prepare_for_access(model)
        self._groups = optimizer_params(model, optimizer)
        self._members = {member.name: member for group in self._groups for member in group}
        self._owners = OwnerRanks.of(((m.parameter, m.sharding) for m in self._members.values()), all_ranks=streams)
        self._given: dict[str, dict[str, Any]] = {}
        report = self._inspect(state)
        if streams:
            report.groups = [{k: _to_spec(v) for k, v in group.items()} for group in report.groups]
        mine = report if streams else _Report(report.mismatch, digest=report.digest)
        reports = self._owners.exchange(mine)
        what = f"the state dict does not fit {type(optimizer).__name__}"
        refuse(what, {rank: each.mismatch for rank, each in reports.items()})
        if not streams and len({each.digest for each in reports.values()}) > 1:
            refuse(what, {0: Mismatch(others=["ranks were given state of different parameters"])})
        self._reports = reports if streams else {self._owners.rank: report}

    def carry_out(self) -> None:
        state: dict[int, dict[str, Any]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for index, member in enumerate(self._members.values()):
                entry = self._report_of(member.parameter).state.get(member.name)
                if entry is not None:
                    state[index] = {key: self._loaded_value(member, key, value) for key, value in entry.items()}
        ids = iter(range(len(self._members)))
        report = self._report_of()
        groups = [
            restored(group, saved, [next(ids) for _ in group["params"]])
            for group, saved in zip(self._optimizer.param_groups, report.groups, strict=True)
        ]
        self._optimizer.load_state_dict({**report.others, "state": state, "param_groups": groups})

    def _report_of(self, value: object = None) -> _Report:
        """Return the report of the rank that has ``value``, or by default the report for the complete state dict."""
        return self._reports[self._owners.source_of(value) if self._streams else self._owners.rank]

    # -- checks

    def _inspect(self, state: Any) -> _Report:
        others = on_meta((name, member.parameter) for name, member in self._members.items())
        report = _Report(Mismatch(others=others))
        is_source = not self._streams or self._owners.is_source_of()
        mine = {n for n, m in self._members.items() if not self._streams or self._owners.is_source_of(m.parameter)}
        if not mine and not is_source:
            return report
        if not _is_state(state) or (is_source and "param_groups" not in state):
            others.append("a state dict of an optimizer has 'state' and 'param_groups'; this one has not")
            return report
        if any(isinstance(name, int) for name in state["state"]):
            others.append("parameters have numbers for names: use rekey_optimizer_state_dict(state, model)")
            return report
        entries = {plain_name(str(name)): dict(entry) for name, entry in state["state"].items()}
        if is_source:
            self._match_groups(state["param_groups"], report)
            report.others = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
            report.mismatch.unexpected = {name: "state" for name in entries if name not in self._members}
        self._given = {name: entries[name] for name in self._members if name in entries and name in mine}
        for name, entry in self._given.items():
            for key, value in entry.items():
                self._compare(self._members[name], key, value, report.mismatch)
            report.state[name] = {key: _to_spec(value) for key, value in entry.items()} if self._streams else entry
        report.digest = digest([(name, list(entry)) for name, entry in self._given.items()])
        return report

    def _match_groups(self, saved: Sequence[Mapping[str, Any]], report: _Report) -> None:
        """Find the saved group of each of the optimizer's groups by its parameters."""
        named = [{**group, "params": [plain_name(str(n)) for n in group["params"]]} for group in saved]
        by_members = {frozenset(group["params"]): group for group in named}
        wanted = [[member.name for member in group] for group in self._groups]
        report.groups = [by_members.get(frozenset(names), {}) for names in wanted]
        for index, group in enumerate(report.groups):
            report.mismatch.others += lacking(self._optimizer, index, group) if group else []
        unmatched = [names for names in wanted if frozenset(names) not in by_members]
        left = [group["params"] for members, group in by_members.items() if members not in map(frozenset, wanted)]
        if len(wanted) != len(named):
            report.mismatch.others.append(f"{len(named)} parameter groups, expected {len(wanted)}")
        for names, there in zip_longest(unmatched, left, fillvalue=()):
            missing, unexpected = [n for n in names if n not in there], [n for n in there if n not in names]
            members = f"missing {missing}, unexpected {unexpected}"
            report.mismatch.others.append(f"a parameter group has other members: {members}")

    def _compare(self, member: OptimizerParam, key: str, value: object, mismatch: Mismatch) -> None:
        """Compare what is known of the target with ``value``: some optimizers have state of any shape."""
        if not isinstance(value, torch.Tensor):
            return
        parameter, existing = member.parameter, self._existing(member, key)
        target = existing if existing is not None else value
        if existing is not None and existing.ndim and existing.shape == local_part(parameter).shape:
            target = parameter
        if existing is None and value.ndim and type(self._optimizer) in ELEMENTWISE:
            target = parameter
        compare(f"{member.name}.{key}", target, value, self._form, mismatch)

    # -- values

    def _existing(self, member: OptimizerParam, key: str) -> torch.Tensor | None:
        entry = self._optimizer.state.get(member.parameter, {})
        value = entry.get(key) if isinstance(entry, Mapping) else None
        return value if isinstance(value, torch.Tensor) else None

    def _loaded_value(self, member: OptimizerParam, key: str, value: Any) -> Any:
        """Return the value to give to the optimizer, after a broadcast if only one rank has it."""
        if isinstance(value, _TensorSpec):
            given = self._given.get(member.name, {}).get(key)
            value = self._owners.send(member.parameter, given, value.dtype, value.shape)
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        if not value.ndim and not isinstance(value, DTensor):
            return value.clone()
        if self._has_parameter_shape(member, value):
            return self._load_sharded(member, key, value)
        return self._load_replicated(member, key, value)

    def _has_parameter_shape(self, member: OptimizerParam, value: torch.Tensor) -> bool:
        is_local = isinstance(self._form, Local) and not isinstance(value, DTensor)
        return value.shape == (local_part(member.parameter) if is_local else member.parameter).shape

    def _load_sharded(self, member: OptimizerParam, key: str, value: torch.Tensor) -> torch.Tensor:
        parameter, existing = member.parameter, self._existing(member, key)
        shard = shard_for(parameter, member.sharding, value, self._form)
        if existing is not None and local_part(existing).shape == shard.shape:
            local_part(existing).copy_(shard)
            return existing
        device = local_part(parameter).device
        own = torch.empty_like(shard, device=device, memory_format=torch.contiguous_format).copy_(shard)
        return like(parameter, own) if isinstance(parameter, DTensor) else own

    def _load_replicated(self, member: OptimizerParam, key: str, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of another shape than the parameter's, replicated unless it is a DTensor with placements."""
        parameter, existing = member.parameter, self._existing(member, key)
        if existing is not None and existing.shape == value.shape:
            fill(existing, None, value, self._form)
            return existing
        own = value.clone().to(local_part(parameter).device)
        if isinstance(own, DTensor) or not isinstance(parameter, DTensor):
            return own
        mesh = parameter.device_mesh
        return DTensor.from_local(own, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _is_state(state: Any) -> bool:
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    return all(isinstance(entry, Mapping) for entry in state["state"].values())


def _to_spec(value: Any) -> Any:
    """Replace a tensor with its spec, unless it is a scalar: tensors are not sent with the report."""
    if not isinstance(value, torch.Tensor):
        return value
    return _TensorSpec(tuple(value.shape), value.dtype) if value.ndim else value.cpu()
