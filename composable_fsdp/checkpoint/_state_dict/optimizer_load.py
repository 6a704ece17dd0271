"""Loading of optimizer state dicts, which are keyed by parameter names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from composable_fsdp._runtime.params.sharded_param import local_part
from composable_fsdp._runtime.shard_extent import like
from composable_fsdp._sharding.param_sharding import as_dtensor
from composable_fsdp.checkpoint._coordination.mismatch import Mismatch
from composable_fsdp.checkpoint._state_dict.loader import StateDictLoader
from composable_fsdp.checkpoint._state_dict.model import streams_from_rank0
from composable_fsdp.checkpoint._state_dict.names import on_meta, plain_name, prepare_for_access
from composable_fsdp.checkpoint._state_dict.optimizer_params import OptimizerParam, OptimizerParams
from composable_fsdp.checkpoint._state_dict.options import Form, Local
from composable_fsdp.checkpoint._state_dict.owners import OwnerRanks, digest
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
    _Load(model, optimizer, state, form, streams).carry_out()


class _Load:
    """One call of :func:`load_optimizer_state_dict`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, state: Any, form: Form | None, streams: bool) -> None:
        prepare_for_access(model)
        self._optimizer = optimizer
        self._params = OptimizerParams(model, optimizer)
        self._members = self._params.members
        tensors = ((m.parameter, m.sharding) for m in self._members.values())
        self._loader = StateDictLoader(OwnerRanks.of(tensors, only_sources=streams), form)
        self._form = self._loader.form
        self._match(state)
        self._loader.agree(f"the state dict does not fit {type(optimizer).__name__}")

    def carry_out(self) -> None:
        state: dict[str, dict[str, Any]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, member in self._members.items():
                entry = self._loader.report_of(member.parameter).values.get(name)
                if entry is not None:
                    state[name] = {key: self._loaded_value(member, key, value) for key, value in entry.items()}
        groups, others = self._loader.report_of().settings
        self._params.load(groups, state, others)

    # -- checks

    def _match(self, state: Any) -> None:
        loader, owners, report = self._loader, self._loader.owners, self._loader.report
        others = report.mismatch.others
        others += on_meta((name, member.parameter) for name, member in self._members.items())
        mine = {name for name, member in self._members.items() if owners.provides(member.parameter)}
        if not mine and not owners.provides():
            return
        if not _is_state(state) or (owners.provides() and "param_groups" not in state):
            others.append("a state dict of an optimizer has 'state' and 'param_groups'; this one has not")
            return
        if any(isinstance(name, int) for name in state["state"]):
            others.append("parameters have numbers for names: use rekey_optimizer_state_dict(state, model)")
            return
        entries = {plain_name(str(name)): dict(entry) for name, entry in state["state"].items()}
        if owners.provides():
            saved = [{**g, "params": [plain_name(str(name)) for name in g["params"]]} for g in state["param_groups"]]
            groups = self._params.match_groups(saved, report.mismatch)
            if len(saved) != len(groups):
                others.append(f"{len(saved)} parameter groups, expected {len(groups)}")
            if owners.only_sources:
                groups = [group and {key: _on_host(value) for key, value in group.items()} for group in groups]
            report.settings = groups, {k: v for k, v in state.items() if k not in ("state", "param_groups")}
            report.mismatch.unexpected |= {name: "state" for name in entries if name not in self._members}
        loader.given = {name: entries[name] for name in self._members if name in entries and name in mine}
        for name, entry in loader.given.items():
            for key, value in entry.items():
                self._compare(self._members[name], key, value, report.mismatch)
            report.values[name] = {k: _described(v) for k, v in entry.items()} if owners.only_sources else entry
        report.digest = digest([(name, list(entry)) for name, entry in loader.given.items()])

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
        value = self._params.state_of(member).get(key)
        return value if isinstance(value, torch.Tensor) else None

    def _loaded_value(self, member: OptimizerParam, key: str, value: Any) -> Any:
        """Return the value to give to the optimizer, after a broadcast if only one rank has it."""
        if isinstance(value, torch.Tensor) and value.is_meta:
            given = self._loader.given.get(member.name, {}).get(key)
            value = self._loader.receive(member.parameter, given, value.dtype, value.shape)
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        if not value.ndim and not isinstance(value, DTensor):
            return value.clone()
        is_local = isinstance(self._form, Local) and not isinstance(value, DTensor)
        if value.shape == (local_part(member.parameter) if is_local else member.parameter).shape:
            return self._load_sharded(member, key, value)
        return self._load_replicated(member, key, value)

    def _load_sharded(self, member: OptimizerParam, key: str, value: torch.Tensor) -> torch.Tensor:
        parameter, existing = member.parameter, self._existing(member, key)
        shard = shard_for(parameter, member.sharding, value, self._form)
        if existing is not None and local_part(existing).shape == shard.shape:
            local_part(existing).copy_(shard)
            return existing
        device = local_part(parameter).device
        own = torch.empty_like(shard, device=device, memory_format=torch.contiguous_format).copy_(shard)
        return like(parameter, own)

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
        return as_dtensor(own, mesh, [Replicate()] * mesh.ndim, tuple(own.shape))


def _is_state(state: Any) -> bool:
    entries = state.get("state") if isinstance(state, Mapping) else None
    return isinstance(entries, Mapping) and all(isinstance(entry, Mapping) for entry in entries.values())


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _described(value: Any) -> Any:
    """Return what is sent of a value with the report: of a tensor that is not a scalar, only shape and dtype."""
    is_sent_later = isinstance(value, torch.Tensor) and value.ndim > 0
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_sent_later else _on_host(value)
