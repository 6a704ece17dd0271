"""Steps of optimizers that need whole parameters: each parameter is updated by one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from composable_fsdp._core.mesh import as_dtensor
from composable_fsdp._core.params import local_part
from composable_fsdp._extents import Box, ShardExtent, like
from composable_fsdp.errors import ArgumentTypeError, ConfigurationError
from composable_fsdp.optim._local_step import gradient_of
from composable_fsdp.optim._owner_exchange import Exchange, OwnerPlans, is_planned, title_of
from composable_fsdp.optim._owner_plan import newton_schulz_cost
from composable_fsdp.optim._owner_units import Slot, Tiling, Unit, tiling_of
from composable_fsdp.optim._replaced_step import Step, replace_step, update_of, with_closure
from composable_fsdp.policies import checks_keywords

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def _cost(shape: torch.Size) -> float:
    """Return about the operations of a matrix product of the size of a parameter of ``shape``, of vectors the elements.

    It fits optimizers whose time is that of products and decompositions of matrices, such as Shampoo and SOAP.
    """
    if len(shape) < 2:
        return float(shape.numel())
    return newton_schulz_cost(shape[0], shape[1:].numel())


@checks_keywords
def owner_step(optimizer: OptimizerT, *, bucket_bytes: int = 256 << 20) -> OptimizerT:
    """Make ``optimizer`` update each sharded parameter on one rank, its *owner*, as a whole plain tensor.

    It is for optimizers whose update of an element depends on other elements of the same parameter, such as Adafactor,
    Shampoo and SOAP. On DTensors they run with many collectives for each parameter, or not at all. Here a step has two
    all-to-alls for each bucket of parameters, and the results are bitwise those of the unsharded step. (State that is
    transposed in memory, such as eigenvectors of ``torch.linalg.eigh``, becomes contiguous, which may change the
    rounding of products with it.) For Muon, :class:`Muon` sends less.

    The optimizer's own ``step`` runs on the owner, with the parameter, its gradient and its state. All three are sent,
    and parameter and state come back, so that state rests sharded: ``state`` holds DTensors, those of the parameter's
    shape placed as the parameter, and others cut on dim 0 over the same mesh axes. Numbers and tensors without dims are
    the same on every rank. The first step of a parameter has two more collectives, because its new state is not known
    to other ranks, and the owner keeps that state whole until then.

    All else is unchanged: schedulers, gradient scalers, hooks, closures and checkpoints see no difference. Plain
    parameters are updated as before. All ranks of a mesh must call ``step`` together, with gradients of the same
    parameters. A pickle or a copy of the optimizer is an ordinary optimizer with the same state.

    Args:
        optimizer: an optimizer whose update of a parameter depends on that parameter, its gradient, its state and its
            group only. Its state for a parameter is a dict, of tensors, numbers, and lists, tuples and dicts of them.
        bucket_bytes: the bytes of a bucket's messages on a rank, including state. A step takes about twice as many, or
            6 times the largest parameter with its state if that is more.

    Returns:
        The same object. Keep it: its ``step`` alone does not keep it alive.

    Raises:
        ConfigurationError: the ``step`` of the object has been replaced already.

    A step raises a ``DivergenceError`` on all ranks of a mesh if they have gradients of different parameters, and a
    ``PeerError`` on all of them if an update raises on its owner.

    Example::

        optimizer = owner_step(torch.optim.Adafactor(model.parameters(), lr=1e-2))
    """
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(f"owner_step takes an optimizer, like torch.optim.Adafactor(...), not {optimizer!r}.")
    if bucket_bytes <= 0:
        raise ConfigurationError(f"bucket_bytes must be positive, not {bucket_bytes}.")
    update = update_of(optimizer, "owner_step")
    replace_step(optimizer, with_closure(update, partial(_carry_out, update, OwnerPlans(bucket_bytes))))
    return optimizer


# -- the state of a parameter, whole and sharded


@dataclass(frozen=True)
class _Leaf:
    """A tensor of the state: its shape, its dtype and the kind of its device: many step counts are in host memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str = field(compare=False)  # owners compute on the mesh's device, also for shards in host memory


@dataclass(frozen=True)
class _Form:
    """The structure of the state of a parameter: the tree, and the properties of each leaf without its value.

    A leaf is a :class:`_Leaf` for a tensor, the class ``int``, ``float`` or ``bool`` for a number, or any other value.
    """

    tree: Any
    leaves: tuple[Any, ...]

    @staticmethod
    def of(state: Mapping[str, Any]) -> _Form:
        """Return the form of ``state``, which has values, or leaves in their places."""
        values, tree = pytree.tree_flatten(dict(state))
        return _Form(tree, tuple(_described(value) for value in values))

    @property
    def numbers(self) -> list[int]:
        """The indices of the leaves that are numbers."""
        return [index for index, leaf in enumerate(self.leaves) if leaf in _NUMBERS]

    @property
    def tensors(self) -> list[int]:
        return [index for index, leaf in enumerate(self.leaves) if isinstance(leaf, _Leaf)]


_NUMBERS = (int, float, bool)


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Leaf(tuple(value.shape), value.dtype, value.device.type)
    return type(value) if type(value) in _NUMBERS else value


def _state_tiling(parameter: DTensor, shape: tuple[int, ...]) -> Tiling:
    if shape == tuple(parameter.shape):
        return tiling_of(parameter)
    if not shape:
        return Tiling(shape)
    return tiling_of(as_dtensor(torch.empty(0), parameter.device_mesh, _state_placements(parameter), shape))


def _state_placements(parameter: DTensor) -> tuple[Placement, ...]:
    return tuple(Replicate() if p.is_replicate() else Shard(0) for p in parameter.placements)


def placed(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the state as it rests, which a loaded one may not do."""
    if not value.ndim or not isinstance(parameter, DTensor):
        return value
    mesh = parameter.device_mesh
    same = value.shape == parameter.shape
    placements = tuple(parameter.placements) if same else _state_placements(parameter)
    if isinstance(value, DTensor):
        return value if value.placements == placements else value.redistribute(mesh, placements)
    return _at_rest(parameter, _extent(parameter, tuple(value.shape)).take(value).contiguous(), tuple(value.shape))


def _extent(parameter: DTensor, shape: tuple[int, ...]) -> ShardExtent:
    """Return the part of this rank of a tensor of the state of ``shape``."""
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return _state_tiling(parameter, shape).extent(tuple(coordinate))


def _at_rest(parameter: DTensor, local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if shape == tuple(parameter.shape):
        return like(parameter, local)
    return as_dtensor(local, parameter.device_mesh, _state_placements(parameter), shape)


def _new_shard(parameter: DTensor, leaf: _Leaf) -> torch.Tensor:
    """Return a new tensor for the state ``leaf`` of ``parameter``."""
    device = local_part(parameter).device
    if not leaf.shape:
        return torch.empty((), dtype=leaf.dtype, device=device if device.type == leaf.device_type else leaf.device_type)
    local = torch.empty(_extent(parameter, leaf.shape).local_shape, dtype=leaf.dtype, device=device)
    return _at_rest(parameter, local, leaf.shape)


# -- the step


def _carry_out(update: Step, plans: OwnerPlans, optimizer: Optimizer, **options: Any) -> Any:
    """Update the sharded parameters by their owners, then the plain ones."""
    groups = optimizer.param_groups
    found = [(p, group) for group in groups for p in group["params"]]
    sharded = [(p, group) for p, group in found if isinstance(p, DTensor) and is_planned(p)]
    parameters = [p for p, _ in sharded]
    with torch.no_grad():
        tasks = [_Task(partial(update, optimizer, **options), optimizer, p, group) for p, group in sharded]
        forms = [(task.dtype, task.form) for task in tasks]
        for exchange, keys in plans.of(parameters, lambda: [[task.unit()] for task in tasks], forms):
            in_order = [tasks[index] for index, _ in keys]
            exchange.run([None if task.gradient is None else task for task in in_order])
            _share_new_state(exchange, in_order)
        for task in tasks:
            if task.gradient is not None:
                task.finish()
    increment_version([p for p in parameters if p.grad is not None])
    everything = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [p for p in group["params"] if not isinstance(p, DTensor)]
        return update(optimizer, **options)  # also counts the steps of groups that have counters
    finally:
        for group, params in zip(groups, everything, strict=True):
            group["params"] = params


class _Task:
    """The update of one parameter in one step.

    Inputs are the parameter, its gradient, and the tensors and the numbers of its state. Outputs are the same without
    the gradient. The first number says whether the state has another form afterwards.
    """

    def __init__(
        self, update: Callable[[], Any], optimizer: Optimizer, parameter: DTensor, group: Mapping[str, Any]
    ) -> None:
        self.update, self.optimizer, self.parameter, self.group = update, optimizer, parameter, group
        self.gradient = gradient_of(parameter)
        self.dtype = parameter.dtype if self.gradient is None else self.gradient.dtype
        values, tree = pytree.tree_flatten(dict(optimizer.state.get(parameter, {})))
        placed_values = [placed(v, parameter) if isinstance(v, torch.Tensor) else v for v in values]
        self._hold(placed_values, _Form(tree, tuple(_described(value) for value in placed_values)))
        self.new_state: dict[str, Any] | None = None
        """The state after the update, on the owner, if its form is new."""

    def _hold(self, values: list[Any], form: _Form) -> None:
        """Hold the leaves of the state, which has ``form``."""
        self.values, self.form = values, form
        self.numbers = torch.zeros(1 + len(form.numbers), dtype=torch.float64)
        tensors = [self.parameter, *(values[index] for index in form.tensors)]
        self.parts = [*(local_part(tensor).detach() for tensor in tensors), self.numbers]

    def expect(self, form: _Form) -> Unit:
        """Make room for state of a new ``form``. Return the unit that brings it from the owner."""
        p = self.parameter
        self._hold([_new_shard(p, leaf) if isinstance(leaf, _Leaf) else leaf for leaf in form.leaves], form)
        self.parts = self.parts[1:]
        return Unit((), self._slots()[1:], 1.0)

    def unit(self) -> Unit:
        p, slots = self.parameter, self._slots()
        return Unit((Slot(tiling_of(p), self.dtype), *slots[:-1]), slots, _cost(p.shape), title_of(p))

    def _slots(self) -> tuple[Slot, ...]:
        """Return the outputs: the parameter, and the tensors and the numbers of its state."""
        p, leaves = self.parameter, [self.form.leaves[index] for index in self.form.tensors]
        state = [Slot(_state_tiling(p, leaf.shape), leaf.dtype) for leaf in leaves]
        numbers = Slot(Tiling((len(self.numbers),)), torch.float64)
        return (Slot(tiling_of(p), p.dtype), *state, numbers)

    def load(self, slot: int, box: Box) -> torch.Tensor:
        return box.of_part(local_part(self.gradient) if slot == 0 else self.parts[slot - 1])

    def compute(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.new_state is not None:
            outputs, self.new_state = self._state_outputs(self.new_state), None
            return outputs
        gradient, value, *tensors = inputs
        whole = nn.Parameter(value)
        if gradient.dtype != whole.dtype:
            cast(Any, whole).grad_dtype = gradient.dtype
        whole.grad = gradient
        values = list(self.values)
        for index, tensor in zip(self.form.tensors, tensors, strict=True):
            values[index] = tensor.to(self.values[index].device) if not tensor.ndim else tensor
        state = pytree.tree_unflatten(values, self.form.tree)
        optimizer = self.optimizer
        groups, states = optimizer.param_groups, optimizer.state
        try:
            optimizer.param_groups = [{**self.group, "params": [whole]}]
            optimizer.state = type(states)(dict, {whole: state} if state else {})
            self.update()
            after = dict(optimizer.state.get(whole, {}))
        finally:
            optimizer.param_groups, optimizer.state = groups, states
        if _Form.of(after) == self.form:
            return (whole.detach(), *self._state_outputs(after))
        self.new_state = after
        return (whole.detach(), *tensors, torch.eye(len(self.numbers), dtype=torch.float64)[0])

    def _state_outputs(self, state: dict[str, Any]) -> Sequence[torch.Tensor]:
        values, _ = pytree.tree_flatten(state)
        numbers = [0.0, *(float(values[index]) for index in self.form.numbers)]
        return (*(values[index] for index in self.form.tensors), torch.tensor(numbers, dtype=torch.float64))

    def store(self, slot: int, box: Box, piece: torch.Tensor) -> None:
        box.of_part(self.parts[slot]).copy_(piece)

    def finish(self) -> None:
        """Put the new state into the optimizer."""
        numbers = self.numbers.tolist()[1:]
        for index, number in zip(self.form.numbers, numbers, strict=True):
            self.values[index] = self.form.leaves[index](number)
        state = pytree.tree_unflatten(self.values, self.form.tree)
        if state or self.parameter in self.optimizer.state:
            self.optimizer.state[self.parameter] = state


# -- state with a new form


def _share_new_state(exchange: Exchange, tasks: Sequence[_Task]) -> None:
    """Send the state of those of ``tasks`` whose state has a new form, from the owners to all members.

    Which these are, all members know, so that they all make the same collectives.
    """
    changed = [index for index, task in enumerate(tasks) if task.numbers[0].item()]
    if not changed:
        return
    # Torch warns when a tree is unpickled, so its leaves are described in place.
    own = {i: pytree.tree_map(_described, state) for i in changed if (state := tasks[i].new_state) is not None}
    described = {i: state for of_rank in exchange.gathered(own).values() for i, state in of_rank.items()}
    units = [tasks[index].expect(_Form.of(described[index])) for index in changed]
    owners = [exchange.owners[index] for index in changed]
    again = Exchange(exchange.members, units, exchange.limit, exchange.copies, owners)
    again.run([tasks[index] for index in changed])
