"""``unsharded_params``: for a while, whole plain parameters in place of the sharded ones; ``apply_to_full_params``: the
same for one group after the other.

Invariants: inside, a sharded parameter is registered nowhere on a rank that shows whole ones; outside, everywhere that
it was before, and it is the same object. Which collectives a rank makes depends on modules, meshes and arguments alone:
not on its shards, nor on what the body did or raised.
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
    """Within, the sharded parameters of ``module`` are whole plain tensors, in the dtype in which they rest.

    They are registered under their names, so ``named_parameters`` and ``state_dict`` show them; shared ones stay one
    object. Afterwards the sharded parameters are back, the same objects as before, so that optimizers stay valid. All
    ranks must enter and leave it together. It gathers everything at once: have memory for it, or pass
    ``recurse=False`` and go module by module. The idea is ``summon_full_params`` of torch's FSDP1.

    Where the body raises, the sharded parameters are back as they were before it, whatever ``writeback`` says; with
    ``rank0_only``, where it raises on the first rank.

    Args:
        module: a sharded module, or one that contains some. Without any, nothing happens.
        writeback: keep what the body wrote, replaced parameters and ``requires_grad`` included. Each rank keeps its own
            part of its own values, so all ranks must write the same; with ``rank0_only``, those of the first rank.
        rank0_only: only the first rank of the mesh shows whole parameters, the others their sharded ones.
        offload_to_cpu: show them in CPU memory; the accelerator holds one at a time.
        with_grads: their ``.grad`` is whole as well, and kept with ``writeback``. Gradients that have not been reduced
            (``set_requires_gradient_sync(False)``) do not show.
        recurse: also the sharded modules below ``module``; without it, the group of ``module`` alone.

    Raises:
        LifecycleError: during a forward or backward, or inside another ``unsharded_params`` for the same modules; and
            inside, from a forward of one of the modules.
        ParameterError: parameters are on the meta device; or, on leaving, not of the shape that they had.
        ConfigurationError: ``rank0_only`` with ``writeback``, where no mesh has all ranks that hold parameters.
    """
    states = states_below(module) if recurse else [state for state in [find_state(module)] if state is not None]
    with _unsharded(module, states, _Terms(writeback, rank0_only, offload_to_cpu, with_grads)):
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
    """Calls ``fn(name, parameter)`` with each sharded parameter of ``module`` whole, and keeps what it writes in place.

    Group by group, each as inside :func:`unsharded_params`, so that memory is needed for one group only. For
    surgery and statistics that need whole tensors; plain parameters are whole anyway, and are not
    passed. All ranks must call it together. Where ``fn`` raises, groups that were complete before keep what it wrote.

    Args:
        module: a sharded module, or one that contains some.
        fn: called without gradients, once for each parameter, with its first name in ``module``. The same on every
            rank, or with ``rank0_only`` on the first rank alone.
        writeback: keep what ``fn`` wrote.
        rank0_only: as for :func:`unsharded_params`.
        offload_to_cpu: as for :func:`unsharded_params`.
        with_grads: ``parameter.grad`` is whole as well, and kept with ``writeback``.

    Raises:
        LifecycleError: during a forward or backward, or inside ``unsharded_params`` for the same modules.
        ParameterError: parameters are on the meta device.
        ConfigurationError: ``rank0_only`` with ``writeback``, where no mesh has all ranks that hold parameters.
    """
    terms = _Terms(writeback, rank0_only, offload_to_cpu, with_grads)
    for state in states_below(module):
        with _unsharded(module, [state], terms) as lent:
            for name, whole in lent.items():
                fn(name, whole)


@dataclass(frozen=True)
class _Terms:
    """On which parameters are lent: the arguments of :func:`unsharded_params`."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


@contextmanager
def _unsharded(module: nn.Module, states: Sequence[FSDPState], terms: _Terms) -> Iterator[dict[str, nn.Parameter]]:
    """Unshard the parameters of ``states``, and yield those that this rank shows, by their names in ``module``."""
    check_idle(states)
    for state in states:
        if state.iteration is not None:
            iteration_of(state).drain()
        state.group.reshard()
        state.group.refresh()
    entries = _sharded_parameters(module, states)
    shardings = _shardings(entries, states)
    carrier = _Carrier(entries, shardings) if terms.rank0_only and entries else None
    if carrier is not None and terms.writeback:
        carrier.check_reach()
    has_gradient = agree_on_gradients([e.parameter for e in entries]) if terms.with_grads else [False] * len(entries)
    shows = carrier is None or carrier.is_first
    wholes = [
        whole_parameter(e.parameter, s, g, shows, terms.offload_to_cpu)
        for e, s, g in zip(entries, shardings, has_gradient, strict=True)
    ]
    loan = LentParams(states, entries, wholes)
    try:
        yield {e.name: whole for e, whole in zip(entries, wholes, strict=True) if whole is not None}
    except BaseException:
        shown = loan.end()
        if terms.writeback and carrier is not None:
            carrier.settle(shown, terms.with_grads, raised=True)
        raise
    shown = loan.end()
    if terms.writeback and carrier is not None:
        carrier.settle(shown, terms.with_grads, raised=False)
    elif terms.writeback:
        _keep_own(entries, shardings, shown, terms.with_grads)


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


# -- what is kept of it


def _keep_own(
    entries: Sequence[ParamPlace], shardings: Sequence[ParameterSharding], shown: Sequence[object], with_grads: bool
) -> None:
    """Each rank its own part of its own values."""
    wrong = _of_other_shape(entries, shown)
    if wrong:
        _refuse(wrong)
    for entry, sharding, value in zip(entries, shardings, cast(Sequence[torch.Tensor], shown), strict=True):
        keep(entry.parameter, sharding, value, value.requires_grad)
        if with_grads:
            keep_gradient(entry.parameter, sharding, value.grad)


def _refuse(wrong: object) -> NoReturn:
    raise ParameterError(
        f"on leaving unsharded_params, these parameters are not of the shape that they had: {wrong}. None was written "
        "back. Change parameters in place, or replace them by others of the same shape."
    )


def _of_other_shape(entries: Sequence[ParamPlace], shown: Sequence[object]) -> dict[str, object]:
    return {
        entry.name: tuple(value.shape) if isinstance(value, torch.Tensor) else value
        for entry, value in zip(entries, shown, strict=True)
        if not isinstance(value, torch.Tensor) or value.shape != entry.parameter.shape
    }


def _mesh(entry: ParamPlace) -> DeviceMesh:
    return cast(DTensor, entry.parameter).device_mesh


class _Carrier:
    """The largest mesh among those of the parameters: its first rank is the one that shows, and sends, whole ones."""

    DISCARD, KEEP, REFUSE = range(3)

    def __init__(self, entries: Sequence[ParamPlace], shardings: Sequence[ParameterSharding]) -> None:
        self._entries = entries
        self._shardings = shardings
        self._meshes = list(dict.fromkeys(_mesh(e) for e in entries))
        self._mesh = max(self._meshes, key=lambda mesh: mesh.size())
        self.is_first = not any(self._mesh.get_coordinate() or ())

    def check_reach(self) -> None:
        """That every rank that holds a part of a parameter is on the carrier."""
        reached = set(self._mesh.mesh.flatten().tolist())
        for mesh in self._meshes:
            if not reached.issuperset(mesh.mesh.flatten().tolist()):
                raise ConfigurationError(
                    "unsharded_params(rank0_only=True, writeback=True) sends the first rank's values to all others, "
                    f"but no mesh has all ranks that hold parameters: {self._mesh} lacks some of {mesh}. Pass "
                    "rank0_only=False and write the same on every rank, or enter it for each part separately."
                )

    def settle(self, shown: Sequence[object], with_grads: bool, *, raised: bool) -> None:
        """Has all ranks keep the first one's values, or none of them: what came of the body there decides everywhere.

        A rank on which the body raised takes part as well, so that none waits for another.
        """
        outcome = torch.zeros(1 + len(self._entries), dtype=torch.int64, device=self._mesh.device_type)
        if self.is_first and not raised:
            wrong = bool(_of_other_shape(self._entries, shown))
            outcome[0] = self.REFUSE if wrong else self.KEEP
            outcome[1:] = torch.tensor([_code(value) for value in shown], dtype=torch.int64)
        broadcast_([outcome], self._mesh)
        verdict, *codes = outcome.tolist()
        if verdict == self.REFUSE:
            _refuse(_of_other_shape(self._entries, shown) if self.is_first else "see the first rank")
        if verdict == self.KEEP:
            for entry, sharding, value, code in zip(self._entries, self._shardings, shown, codes, strict=True):
                self._send(entry, sharding, value, code, with_grads)

    def _send(self, entry: ParamPlace, sharding: ParameterSharding, value: object, code: int, with_grads: bool) -> None:
        requires_grad, has_gradient = bool(code & 1), bool(code & 2) and with_grads
        of_first = value if self.is_first and isinstance(value, torch.Tensor) else None
        whole = self._on_wire(entry, of_first)
        gradient = self._on_wire(entry, None if of_first is None else of_first.grad) if has_gradient else None
        broadcast_([whole] if gradient is None else [whole, gradient], self._mesh)
        keep(entry.parameter, sharding, whole, requires_grad)
        if with_grads:
            keep_gradient(entry.parameter, sharding, gradient)

    def _on_wire(self, entry: ParamPlace, tensor: torch.Tensor | None) -> torch.Tensor:
        like = entry.parameter
        if tensor is None:
            return torch.empty(like.shape, dtype=like.dtype, device=self._mesh.device_type)
        return tensor.detach().to(self._mesh.device_type, like.dtype)


def _code(value: object) -> int:
    """Whether a parameter requires, and has, a gradient, as two bits."""
    return value.requires_grad + 2 * (value.grad is not None) if isinstance(value, torch.Tensor) else 0
