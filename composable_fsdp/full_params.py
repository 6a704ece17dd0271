"""Temporary access to full parameters: ``unsharded_params``, and ``apply_to_full_params`` for one group at a time.

Invariants: inside, a sharded parameter is registered nowhere on a rank that shows full ones. Outside, the same object
is registered everywhere that it was before. The collectives of a rank depend on modules, meshes and arguments alone:
neither on its shards, nor on what the body did or raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_fsdp._comm.broadcast import broadcast_
from composable_fsdp._runtime.groups.state import FSDPState, find_state
from composable_fsdp._runtime.lazy_init import iteration_of
from composable_fsdp._runtime.lend_params import LentParams, check_idle
from composable_fsdp._runtime.params.param_places import ParamPlace, registered_parameters
from composable_fsdp._runtime.shard_extent import shardings_of, states_below
from composable_fsdp._runtime.unsharded_values import agree_on_gradients, keep, keep_gradient, whole_parameter
from composable_fsdp._sharding.param_sharding import ParameterSharding
from composable_fsdp.errors import ConfigurationError, ParameterError

__all__ = ["apply_to_full_params", "unsharded_params"]


@contextmanager
def unsharded_params(
    module: nn.Module,
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    recurse: bool = True,
) -> Iterator[None]:
    """Replace the sharded parameters of ``module`` by full plain tensors, in their original dtype, inside the context.

    They are registered under their names, so ``named_parameters`` and ``state_dict`` show them; tied ones stay one
    object. Afterwards the same sharded parameters are back, so optimizers stay valid. All ranks must enter and leave
    the context together. It gathers everything at once: have memory for that, or pass ``recurse=False`` and go module
    by module. It is modelled on ``summon_full_params`` of torch's FSDP1.

    If the body raises, the sharded parameters have their old values, whatever ``writeback`` says; with ``rank0_only``,
    if it raises on the first rank.

    Args:
        module: a sharded module, or one that contains some. Without any, nothing happens.
        writeback: keep what the body wrote, including replaced parameters and ``requires_grad``. Each rank keeps its
            shard of its own values, so all ranks must write the same; with ``rank0_only``, the first rank's values are
            kept.
        rank0_only: only the first rank of the mesh shows full parameters; the others show their sharded ones.
        offload_to_cpu: show them in CPU memory; the accelerator holds one at a time.
        with_grads: their ``.grad`` is full as well, and kept with ``writeback``. Gradients that have not been reduced
            (``set_requires_gradient_sync(False)``) are not shown.
        recurse: include the sharded modules below ``module``; otherwise only the group of ``module``.

    Raises:
        LifecycleError: during a forward or backward, or inside another ``unsharded_params`` for the same modules; and
            inside, from a forward of one of the modules.
        ParameterError: parameters are on the meta device; or, on leaving, a parameter has another shape than before.
        ConfigurationError: ``rank0_only`` with ``writeback``, if no mesh has all ranks that hold parameters.
    """
    states = states_below(module) if recurse else [state for state in [find_state(module)] if state is not None]
    with _unsharded(module, states, _Options(writeback, rank0_only, offload_to_cpu, with_grads)):
        yield


@torch.no_grad()
def apply_to_full_params(
    module: nn.Module,
    fn: Callable[[str, nn.Parameter], object],
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> None:
    """Call ``fn(name, parameter)`` with each sharded parameter of ``module`` in full, and keep what it writes in place.

    It goes group by group, each as inside :func:`unsharded_params`, so it needs memory for one group only. It is meant
    for edits and statistics that need full tensors. Plain parameters are not passed. All ranks must call it together.
    If ``fn`` raises, the groups that were complete before keep what it wrote.

    Args:
        module: a sharded module, or one that contains some.
        fn: called without gradients, once for each parameter, with its first name in ``module``. The same on every
            rank, or with ``rank0_only`` on the first rank alone.
        writeback: keep what ``fn`` wrote.
        rank0_only: as for :func:`unsharded_params`.
        offload_to_cpu: as for :func:`unsharded_params`.
        with_grads: ``parameter.grad`` is full as well, and kept with ``writeback``.

    Raises:
        LifecycleError: during a forward or backward, or inside ``unsharded_params`` for the same modules.
        ParameterError: parameters are on the meta device.
        ConfigurationError: ``rank0_only`` with ``writeback``, if no mesh has all ranks that hold parameters.
    """
    options = _Options(writeback, rank0_only, offload_to_cpu, with_grads)
    for state in states_below(module):
        with _unsharded(module, [state], options) as lent:
            for name, full_param in lent.items():
                fn(name, full_param)


@dataclass(frozen=True)
class _Options:
    """The arguments of :func:`unsharded_params`."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


@contextmanager
def _unsharded(module: nn.Module, states: Sequence[FSDPState], options: _Options) -> Iterator[dict[str, nn.Parameter]]:
    """Unshard the parameters of ``states``, and yield those that this rank shows, by their names in ``module``."""
    check_idle(states)
    for state in states:
        if state.iteration is not None:
            iteration_of(state).drain()
        state.group.reshard()
        state.group.refresh()
    entries = _sharded_parameters(module, states)
    shardings = _shardings(entries, states)
    writeback_mesh = _WritebackMesh(entries, shardings) if options.rank0_only and entries else None
    if writeback_mesh is not None and options.writeback:
        writeback_mesh.check_has_all_ranks()
    has_gradient = agree_on_gradients([e.parameter for e in entries]) if options.with_grads else [False] * len(entries)
    shows = writeback_mesh is None or writeback_mesh.is_first
    full_params = [
        whole_parameter(e.parameter, s, g, shows, options.offload_to_cpu)
        for e, s, g in zip(entries, shardings, has_gradient, strict=True)
    ]
    lent = LentParams(states, entries, full_params)
    try:
        yield {e.name: full_param for e, full_param in zip(entries, full_params, strict=True) if full_param is not None}
    except BaseException:
        shown = lent.end()
        if options.writeback and writeback_mesh is not None:
            writeback_mesh.write_back(shown, options.with_grads, raised=True)
        raise
    shown = lent.end()
    if options.writeback and writeback_mesh is not None:
        writeback_mesh.write_back(shown, options.with_grads, raised=False)
    elif options.writeback:
        _write_back_own(entries, shardings, shown, options.with_grads)


def _sharded_parameters(module: nn.Module, states: Sequence[FSDPState]) -> list[ParamPlace]:
    ours = {id(p) for state in states for p in state.registered_parameters()}
    entries = [e for e in registered_parameters(module) if id(e.parameter) in ours]
    on_meta = [e.name for e in entries if e.parameter.is_meta]
    if on_meta:
        raise ParameterError(
            f"unsharded_params: parameters are still on the meta device and have no values: {on_meta}. First call "
            "composable_fsdp.initialize(module, seed=...), or to_empty(module, device=...) and load a state dict."
        )
    return entries


def _shardings(entries: Sequence[ParamPlace], states: Sequence[FSDPState]) -> list[ParameterSharding]:
    known = shardings_of(states)
    return [known[id(entry.parameter)] for entry in entries]


# -- writeback


def _write_back_own(
    entries: Sequence[ParamPlace], shardings: Sequence[ParameterSharding], shown: Sequence[object], with_grads: bool
) -> None:
    """Write each rank's shard of its own values back."""
    wrong = _wrong_shapes(entries, shown)
    if wrong:
        _raise_wrong_shapes(wrong)
    for entry, sharding, value in zip(entries, shardings, cast(Sequence[torch.Tensor], shown), strict=True):
        keep(entry.parameter, sharding, value, value.requires_grad)
        if with_grads:
            keep_gradient(entry.parameter, sharding, value.grad)


def _raise_wrong_shapes(wrong: object) -> NoReturn:
    raise ParameterError(
        f"on leaving unsharded_params, these parameters are not of the shape that they had: {wrong}. None was written "
        "back. Change parameters in place, or replace them by others of the same shape."
    )


def _wrong_shapes(entries: Sequence[ParamPlace], shown: Sequence[object]) -> dict[str, object]:
    return {
        entry.name: tuple(value.shape) if isinstance(value, torch.Tensor) else value
        for entry, value in zip(entries, shown, strict=True)
        if not isinstance(value, torch.Tensor) or value.shape != entry.parameter.shape
    }


def _mesh(entry: ParamPlace) -> DeviceMesh:
    return cast(DTensor, entry.parameter).device_mesh


class _WritebackMesh:
    """The largest mesh of the parameters. Its first rank shows the full parameters and sends them to the others."""

    DISCARD, KEEP, REFUSE = range(3)

    def __init__(self, entries: Sequence[ParamPlace], shardings: Sequence[ParameterSharding]) -> None:
        self._entries = entries
        self._shardings = shardings
        self._meshes = list(dict.fromkeys(_mesh(e) for e in entries))
        self._mesh = max(self._meshes, key=lambda mesh: mesh.size())
        self.is_first = not any(self._mesh.get_coordinate() or ())

    def check_has_all_ranks(self) -> None:
        """Check that every rank that holds a shard of a parameter is in the mesh.

        Raises:
            ConfigurationError: some rank is not.
        """
        reached = set(self._mesh.mesh.flatten().tolist())
        for mesh in self._meshes:
            if not reached.issuperset(mesh.mesh.flatten().tolist()):
                raise ConfigurationError(
                    "unsharded_params(rank0_only=True, writeback=True) sends the first rank's values to all others, "
                    f"but no mesh has all ranks that hold parameters: {self._mesh} lacks some of {mesh}. Pass "
                    "rank0_only=False and write the same on every rank, or enter it for each part separately."
                )

    def write_back(self, shown: Sequence[object], with_grads: bool, *, raised: bool) -> None:
        """Keep the first rank's values on all ranks, or none: the outcome of the body on the first rank decides.

        A rank on which the body raised takes part as well, so that no rank waits for another.
        """
        outcome = torch.zeros(1 + len(self._entries), dtype=torch.int64, device=self._mesh.device_type)
        if self.is_first and not raised:
            wrong = bool(_wrong_shapes(self._entries, shown))
            outcome[0] = self.REFUSE if wrong else self.KEEP
            outcome[1:] = torch.tensor([_code(value) for value in shown], dtype=torch.int64)
        broadcast_([outcome], self._mesh)
        verdict, *codes = outcome.tolist()
        if verdict == self.REFUSE:
            _raise_wrong_shapes(_wrong_shapes(self._entries, shown) if self.is_first else "see the first rank")
        if verdict == self.KEEP:
            for entry, sharding, value, code in zip(self._entries, self._shardings, shown, codes, strict=True):
                self._send(entry, sharding, value, code, with_grads)

    def _send(self, entry: ParamPlace, sharding: ParameterSharding, value: object, code: int, with_grads: bool) -> None:
        requires_grad, has_gradient = bool(code & 1), bool(code & 2) and with_grads
        first_value = value if self.is_first and isinstance(value, torch.Tensor) else None
        full_param = self._as_message(entry, first_value)
        gradient = self._as_message(entry, None if first_value is None else first_value.grad) if has_gradient else None
        broadcast_([full_param] if gradient is None else [full_param, gradient], self._mesh)
        keep(entry.parameter, sharding, full_param, requires_grad)
        if with_grads:
            keep_gradient(entry.parameter, sharding, gradient)

    def _as_message(self, entry: ParamPlace, tensor: torch.Tensor | None) -> torch.Tensor:
        like = entry.parameter
        if tensor is None:
            return torch.empty(like.shape, dtype=like.dtype, device=self._mesh.device_type)
        return tensor.detach().to(self._mesh.device_type, like.dtype)


def _code(value: object) -> int:
    """Return whether ``value`` requires a gradient (bit 0) and has one (bit 1)."""
    return value.requires_grad + 2 * (value.grad is not None) if isinstance(value, torch.Tensor) else 0
