"""Gradients that autograd is asked for at sharded parameters, as in ``loss.backward(inputs=[p])``.

Modules compute with the unsharded parameters, so the sharded ones, which were listed before the forward, are not in the
graph: torch would return without a gradient. ``backward`` gets the unsharded ones in their place, whose gradients are
reduced to the sharded ones as always. ``torch.autograd.grad`` returns the gradients of one rank, so it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.autograd import Variable

from composable_fsdp._core.params import ShardedParameter, find_parameter
from composable_fsdp._core.seams import Observer
from composable_fsdp._core.state import FSDPState, GlobalHooks
from composable_fsdp.errors import ParameterError


class RequestedGradients(Observer):
    """Passes calls of autograd's engine on with unsharded parameters, while there is a sharded model that has run."""

    def before_assembly(self, root: FSDPState, states: Mapping[str, FSDPState]) -> None:
        for state in states.values():
            _engine_calls.keep_for(state)


def _install() -> Callable[[], None]:
    original: Any = Variable._execution_engine

    class Engine(type(original)):  # type: ignore[misc]
        def run_backward(self, outputs: Sequence[Any], *settings: Any, accumulate_grad: bool, **others: Any) -> Any:
            if len(settings) > _INPUTS and settings[_INPUTS]:
                inputs = _unsharded(outputs, settings[_INPUTS], accumulates=accumulate_grad)
                settings = (*settings[:_INPUTS], inputs, *settings[_INPUTS + 1 :])
            return original.run_backward(outputs, *settings, accumulate_grad=accumulate_grad, **others)

    engine: Any = Engine()

    def remove() -> None:
        if Variable._execution_engine is engine:  # otherwise another one may call this one
            Variable._execution_engine = original

    Variable._execution_engine = engine
    return remove


_INPUTS = 3
"""The position of ``inputs`` after the outputs in calls of the engine."""

_engine_calls = GlobalHooks(_install)


def _unsharded(outputs: Sequence[Any], inputs: Sequence[Any], *, accumulates: bool) -> tuple[Any, ...]:
    """Return ``inputs`` with the unsharded forms of sharded parameters of which ``outputs`` used the unsharded form.

    Raises:
        ParameterError: ``autograd.grad`` was called at such parameters, or both forms of one were used.
    """
    found = {k: p for k, each in enumerate(inputs) if (p := find_parameter(each)) is not None and p.sharded is each}
    leaves = _leaves_of(outputs) if found else set()
    listed: dict[int, ShardedParameter] = {k: p for k, p in found.items() if id(p.unsharded) in leaves}
    both = [_name_of(p) for p in listed.values() if p.unsharded is not p.sharded and id(p.sharded) in leaves]
    if both:
        raise ParameterError(
            f"gradients were asked for at parameters {', '.join(both)}, which were used both unsharded, by their "
            "modules, and sharded, by other operations: autograd has two tensors for each. Call backward() without "
            "inputs."
        )
    if listed and not accumulates:
        raise ParameterError(
            f"torch.autograd.grad was called at parameters {', '.join(map(_name_of, listed.values()))}, listed while "
            "they were sharded, but modules compute with the unsharded ones. Read each parameter from its module after "
            "the forward, for the full gradient of this rank, of a module with reshard_after_forward=False; or call "
            "loss.backward(inputs=[...]), for the gradient of all ranks in .grad."
        )
    return tuple(listed[k].unsharded if k in listed else each for k, each in enumerate(inputs))


def _name_of(parameter: ShardedParameter) -> str:
    state = None if parameter.state_ref is None else parameter.state_ref()
    return repr(parameter.name) if state is None else f"{parameter.name!r} of {state.name!r}"


def _leaves_of(outputs: Iterable[Any]) -> set[int]:
    """Return the ids of the leaves in the graph of ``outputs``, tensors or ``GradientEdge``."""
    waiting = [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]
    seen, leaves = set(waiting), set[int]()
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        new = {following for following, _ in node.next_functions} - seen
        seen |= new
        waiting.extend(new)
    return leaves
