"""Runs the steps of programs, and programs on a sharded model. All values of a rank are noted for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from composable_fsdp import (
    Cast,
    CommunicationPolicy,
    DataParallelMeshDims,
    ErrorFeedback,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    initialize,
    no_sync,
    register_fsdp_forward_method,
)
from composable_fsdp.trace import Recorder, TraceEvent, listeners
from tests._internals import state_of
from tests.helpers.assert_trace import ledger
from tests.helpers.forward_mode import load_forward_mode
from tests.helpers.fuzz.model import (
    BlockModule,
    Clock,
    Hidden,
    LeafModule,
    Part,
    build,
    first_and_rest,
    freeze,
    in_order,
    parts,
    randomise,
    states,
)
from tests.helpers.fuzz.programs import Leaf, Placing, Program, ShardCall, Step, groups

BATCH = 3
SEED = 7
"""The seed of initialisation."""

# eps is as large as the gradients, so that Adam does not amplify gradients that are only rounding.
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, weight_decay=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, weight_decay=0.1, fused=True),
}


# Residuals are kept exactly: what ``Int8`` rounds would depend on the largest value of a block of a bucket.
_BF16 = ErrorFeedback(Cast(), keep=Cast(torch.float32))
FEEDBACK = CommunicationPolicy(reduce_scatter=_BF16, min_numel=1)


@dataclass
class Run:
    """The values of a rank, in order: losses, gradients of inputs and parameters, parameters. Empty after an error."""

    labels: list[tuple[str, int]] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    error: str = ""

    def note(self, label: str, value: torch.Tensor | None) -> None:
        flat = torch.empty(0, dtype=torch.float64) if value is None else value.detach().reshape(-1).double().clone()
        self.labels.append((f"{label} is None" if value is None else label, flat.numel()))
        self.values.append(flat)


class Driver:
    """Hooks around the passes of ``play``, which do nothing here, and the backward."""

    def before_forward(self, step: Step) -> None: ...
    def before_backward(self, step: Step, is_last: bool) -> None: ...
    def backward(self, loss: torch.Tensor, x: torch.Tensor, step: Step, is_last: bool, *, retain_graph: bool) -> None:
        loss.backward(retain_graph=retain_graph)

    def after_backward(self, step: Step, is_last: bool) -> None: ...
    def before_optimizer(self, step: Step) -> None: ...


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def inside(program: Program) -> Iterator[None]:
    """The context in which the steps of ``program`` run. All of its modes must be there at the end."""
    contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
        "dispatch mode": _Dispatched,
        "function mode": BaseTorchFunctionMode,
    }
    with contexts.get(program.inside, nullcontext)() as mode:
        yield
        if program.inside == "dispatch mode":
            assert _get_current_dispatch_mode() is mode
        if program.inside == "function mode":
            assert _get_current_function_mode() is mode


def play(model: Part, program: Program, step: Step, seed: int, driver: Driver, run: Run) -> None:
    width, hidden = program.width, program.hidden
    generator = torch.Generator().manual_seed(seed)

    def batch() -> torch.Tensor:
        return torch.randn(BATCH, width, generator=generator, dtype=torch.float64)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states: dict[str, Hidden | None] = {"none": None, "list": [x], "dict": {"input": x}}
        held = states[hidden]
        first, rest = first_and_rest(model(x, hidden=held))
        first = first.double()
        second = (first.sin() if rest is None else rest.double().cos()).mean()
        if held is not None:
            assert in_order(held)[0] is x
            second = second + torch.stack([state.double().cos().mean() for state in in_order(held)]).mean()
        return first.square().mean(), second

    def evaluate(when: str) -> None:
        for then, mode in step.evaluate:
            if then == when:
                context: AbstractContextManager[object] = getattr(torch, mode)()
                x = batch()
                with context:
                    values = torch.stack(forward(x))
                run.note(f"evaluation {when}", values.clone())

    def backward(i: int, losses: tuple[torch.Tensor, torch.Tensor], *, is_last: bool) -> None:
        first, second = losses
        roots = {
            "all": [first + second],
            "twice": [first + second, first + second],
            "first": [first],
            "second": [second],
            "first, then second": [first, second],
        }[step.backwards[i]]
        for number, root in enumerate(roots, 1):
            ends = is_last and number == len(roots)
            if root.requires_grad:
                driver.before_backward(step, ends)
                driver.backward(root, inputs[i], step, ends, retain_graph=number < len(roots))
                driver.after_backward(step, ends)

    def forward_with_tangents(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not step.tangents:
            return forward(x)
        load_forward_mode()
        with forward_ad.dual_level():
            both = map(forward_ad.unpack_dual, forward(forward_ad.make_dual(x, x.detach().cos())))
            first, second = (primal if tangent is None else primal + tangent for primal, tangent in both)
        return first, second

    evaluate("before")
    if step.abandoned:
        forward(batch())
    inputs = [batch().requires_grad_(step.input_grad) for _ in step.backwards]
    number = len(inputs)
    order = list(range(number))
    if step.order == "in turn":
        for i in order:
            driver.before_forward(step)
            losses = [forward_with_tangents(inputs[i])]
            run.note(f"loss {i}", torch.stack(losses[0]))
            if i == 0:
                evaluate("between")
            backward(i, losses[0], is_last=i == number - 1)
    else:
        driver.before_forward(step)
        losses = [forward_with_tangents(x) for x in inputs]
        evaluate("between")
        run.note("losses", torch.stack([torch.stack(pair) for pair in losses]))
        if step.order == "joined":
            first, second = zip(*losses, strict=True)
            joined = torch.stack(first).sum(), torch.stack(second).prod()
            backward(0, joined, is_last=True)
        else:
            if step.order == "late, reversed":
                order.reverse()
            for i in order:
                backward(i, losses[i], is_last=i == order[-1])
    for x in inputs:
        if step.input_grad:
            run.note("gradient of inputs", x.grad)
    driver.before_optimizer(step)
    evaluate("after")


class Sharded(Driver):
    """Prepares every pass of the sharded model as the step specifies."""

    def __init__(self, model: Part, roots: list[FSDPModule], recorder: Recorder) -> None:
        self.model = model
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.roots = roots
        self.recorder = recorder
        self.contexts = ExitStack()
        """The contexts around the current backward."""
        self.is_clean = False
        """True if all parameters must be sharded: the last pass was a backward that keeps none."""

    def begin(self, step: Step) -> None:
        for root in self.roots:
            root.set_reduce_scatter_max_input_buffers(step.in_flight or 1)
            root.set_manual_backward_finalization(step.finish.startswith("finalize"))

    def before_forward(self, step: Step) -> None:
        self.is_clean = False
        if step.reshard is not None:
            for root in self.roots:
                root.set_reshard_after_forward(step.reshard)
        if step.by_hand.startswith("unshard before"):
            for module in self.modules:
                module.unshard(async_op=step.by_hand.endswith("async"))

    def before_backward(self, step: Step, is_last: bool) -> None:
        is_last, ends = is_last and step.finish != "synchronize", is_last
        for root in self.roots:
            root.set_requires_all_reduce(is_last or step.hold != "all-reduce")
            root.set_requires_gradient_sync(is_last or step.hold not in ("all", "roots"))
            if step.hold == "roots":
                root.set_requires_gradient_sync(True)
                root.set_requires_gradient_sync(is_last, recurse=False)
            root.set_reshard_after_backward(step.keep == "never" or (step.keep == "until last" and ends))
            root.set_is_last_backward(ends or not step.is_last)
        if step.hold.startswith("no_sync") and not is_last:
            part = states(self.model)[-1] if step.hold == "no_sync of a part" else self.model
            self.contexts.enter_context(no_sync(part, sharded=step.hold.endswith("sharded")))
        if step.by_hand == "reshard between":
            for module in self.modules:
                module.reshard()

    def backward(self, loss: torch.Tensor, x: torch.Tensor, step: Step, is_last: bool, *, retain_graph: bool) -> None:
        if is_last or not step.split:
            super().backward(loss, x, step, is_last, retain_graph=retain_graph)
            return
        _, found = stage_backward_input([loss], [torch.ones_like(loss)], [x], self.model.parameters())
        stage_backward_weight(self.model.parameters(), found)

    def after_backward(self, step: Step, is_last: bool) -> None:
        self.contexts.close()
        # Every backward begins at the root of the tree, but may not reach an inner model that is its own root.
        self.is_clean = step.keep != "always" and is_last and isinstance(self.model, FSDPModule)

    def reset(self) -> None:
        """Reset the model after a step that may have failed."""
        self.contexts.close()
        for root in self.roots:
            root.reset_iter_state()

    def generate(self, x: torch.Tensor, forwards: int) -> None:
        """Unshard all groups and run forwards, which do not communicate."""
        chosen = {state_of(module): state_of(module).options.reshard for module in self.modules}
        for module in self.modules:
            module.unshard()
        for root in self.roots:
            root.set_reshard_after_forward(False)
        with torch.no_grad():
            for _ in range(forwards):
                self.model(x)
        for state, reshard in chosen.items():
            state.group.reshard()
            state.change(reshard=reshard)

    def before_optimizer(self, step: Step) -> None:
        if step.finish == "synchronize":
            for root in self.roots:
                root.synchronize_gradients()
        elif step.finish != "backward":
            roots = {state_of(root): root for root in self.roots}.values()  # type: ignore[arg-type]  # lists share one
            handles = [root.finalize_backward(async_op=step.finish == "finalize, async") for root in roots]
            for handle in filter(None, handles):
                handle.wait()
        if self.is_clean:
            check_memory(self.recorder)
        if step.by_hand == "unshard after":
            for module in self.modules:
                module.unshard(async_op=True)
            torch.cpu.synchronize()  # the optimizer writes to shards, which these all-gathers read


def mesh_of(program: Program, thread: int) -> DeviceMesh:
    """Return the mesh of all ranks. Its dims have names if parameters are placed on it before they are sharded. A mesh
    dim of all ranks has the default process group in thread 0, and its own process group in other threads."""
    shape, names = program.mesh, None
    if program.placing is not None:
        shape, names = (*shape, program.tensor_ranks), ("replicate", "shard", "tensor")[-1 - len(shape) :]
    backends: dict[Any, Any] | None = dict.fromkeys(range(len(shape)), "gloo") if thread else None
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=backends)


def place(model: Part, placing: Placing, mesh: DeviceMesh) -> None:
    """Replace all parameters that will be sharded by DTensors, each once."""
    on = mesh if placing.full else mesh["tensor"]
    names, placed = on.mesh_dim_names or (), dict[nn.Parameter, tuple[nn.Parameter, list[Placement]]]()
    for number, part in enumerate(parts(model)):
        if not isinstance(part, LeafModule) or part.node.ignored:
            continue
        is_partial = placing.arrival == "partial" or (placing.arrival == "either" and number % 2 == 1)
        on_data: Placement = Partial() if is_partial else Replicate()
        own = list(part.named_parameters(recurse=False))
        # DTensor adds the gradients of a shared parameter in one backward, so they must have the same placements.
        shared = (placed[parameter][1] for _, parameter in own if parameter in placed)
        part.arrive = next(shared, [Partial() if name == "tensor" else on_data for name in names])
        for name, parameter in own:
            if parameter not in placed:
                full = DTensor.from_local(parameter.detach(), on, [Replicate()] * on.ndim, run_check=False)
                placed[parameter] = nn.Parameter(full), part.arrive
            setattr(part, name, placed[parameter][0])


def mesh_options(program: Program, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the arguments of ``fully_shard`` that specify the mesh."""
    if program.placing is None:
        return {"mesh": mesh}
    data = (mesh.mesh_dim_names or ())[:-1]
    if not program.placing.full:
        return {"mesh": mesh[data]}
    return {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims("shard", data[:-1])}


def apply(program: Program, model: Part, mesh: DeviceMesh) -> list[FSDPModule]:
    """Apply the ``fully_shard`` calls and setters of the program, and return the root modules."""
    sharded, options = states(model), mesh_options(program, mesh)
    if program.placing is not None:
        place(model, program.placing, mesh)
    ignored = {
        p for part in parts(model) if isinstance(part.node, Leaf) and part.node.ignored for p in part.parameters()
    }
    for modules in bottom_up(model):
        state = modules[0].state
        assert state is not None
        fully_shard(
            modules if modules[0].node.state is None else modules[0],
            **options,
            reshard_after_forward=state.reshard,
            shard_placement_fn=lambda p, state=state: Shard(state.dim) if has_dim(p, state) else None,  # type: ignore[misc]
            mp_policy=policy_of(state),
            ignored_params=ignored,
            shared_from=owners_of(model, modules[0]),
            comm_policy=FEEDBACK if program.feedback else None,
        )
        if state.method:
            for part in modules:
                register_fsdp_forward_method(part, "other")
    inner = {id(m) for part in sharded for m in part.modules() if m is not part}
    roots = [part for part in sharded if id(part) not in inner]
    for root in roots:
        below = states(root)
        for part in below:
            state = part.state
            assert state is not None
            assert isinstance(part, FSDPModule)
            if state.forward_prefetch is not None:
                part.set_modules_to_forward_prefetch([below[i % len(below)] for i in state.forward_prefetch])  # type: ignore[misc]
            if state.backward_prefetch is not None:
                part.set_modules_to_backward_prefetch([below[i % len(below)] for i in state.backward_prefetch])  # type: ignore[misc]
    return roots  # type: ignore[return-value]


def bottom_up(model: nn.Module) -> list[list[Part]]:
    """Return the modules to shard, by group. Inner modules come first; a list comes after all children of its block."""
    members: dict[object, list[Part]] = {}
    for part in states(model):
        members.setdefault(part.group.path, []).append(part)
    found: dict[object, list[Part]] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        for part in module.parts if isinstance(module, BlockModule) else ():
            if isinstance(part, Part) and part.state is not None:
                found.setdefault(part.group.path, members[part.group.path])
        if isinstance(module, Part) and module.node.state is not None:
            found.setdefault(module.group.path, [module])

    visit(model)
    return list(found.values())


def owners_of(model: nn.Module, user: Part) -> list[nn.Module]:
    """Return one module of each group that owns a parameter used by the group of ``user``."""
    sharded = {part.group.path: part for part in reversed(states(model))}
    paths = (
        part.owner_path
        for part in parts(model)
        if isinstance(part, LeafModule) and part.group.path == user.group.path and part.owner_path is not None
    )
    return [sharded[path] for path in dict.fromkeys(paths)]


def has_dim(tensor: torch.Tensor, state: ShardCall) -> bool:
    return -tensor.ndim <= state.dim < tensor.ndim


def dtype_of(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def policy_of(state: ShardCall) -> MixedPrecisionPolicy:
    p = state.precision
    return MixedPrecisionPolicy(dtype_of(p.param), dtype_of(p.reduce), dtype_of(p.output), p.cast_inputs)


class Training:
    """A program on this rank. The constructor builds and shards the model, and :meth:`run` trains it."""

    def __init__(self, program: Program, mesh: DeviceMesh) -> None:
        self.program, self.clock, self.recorder = program, Clock(), Recorder()
        self.model = build(program, self.clock)
        with recording(self.recorder):
            roots = apply(program, self.model, mesh)
            if program.by_seed:
                initialize(self.model, randomise, seed=SEED)
        self.driver = Sharded(self.model, roots, self.recorder)

    def run(self) -> Run:
        """Train the model and return the values of this rank."""
        run = Run()
        with recording(self.recorder):
            self.train(run)
            for module in self.driver.modules:
                module.reshard()
        check_memory(self.recorder)
        return run

    def train(self, run: Run) -> None:
        program, clock, model, driver, rank = self.program, self.clock, self.model, self.driver, dist.get_rank()
        parameters = dict(model.named_parameters())
        optimizer = OPTIMIZERS[program.optimizer](parameters.values())
        for clock.step, step in enumerate(program.steps):
            optimizer.zero_grad()
            freeze(model, clock.step)
            driver.begin(step)
            seed = 100 * clock.step + rank
            if step.fails != "never":
                clock.fails, clock.countdown = step.fails, step.fails_at
                with suppress(ArithmeticError), inside(program):
                    play(model, program, step, seed, driver, Run())
                clock.fails = "never"
                driver.reset()
                optimizer.zero_grad()
            if step.generate:
                forwards = rank if program.placing is None else 1  # tensor-parallel ones communicate by themselves
                driver.generate(torch.ones(BATCH, program.width, dtype=torch.float64), forwards)
            with inside(program):
                play(model, program, step, seed, driver, run)
            for name, parameter in parameters.items():
                if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                    assert parameter.grad.placements == parameter.placements, name
                run.note(f"gradient of {name}", local(parameter.grad))
            if any(parameter.grad is not None for parameter in parameters.values()):
                optimizer.step()  # without any gradient, while some are held, it is an error
        for name, parameter in parameters.items():
            run.note(name, local(parameter))


TrainingFactory = Callable[[], Training]


def training_factories(program: Program, mesh: DeviceMesh) -> list[TrainingFactory]:
    return [partial(Training, each, mesh) for each in dict.fromkeys((program, program.undisturbed))]


def construct_in_order(program: Program, makers: Sequence[TrainingFactory]) -> list[TrainingFactory]:
    """Return ``makers``, and call them now if all ranks must build the models of all threads in the same order. This is
    necessary if a constructor uses the default random generator, which threads share, or makes process groups."""
    smaller = any(type(state.reshard) is int for state in groups(program.tree).values())
    return [partial(next, iter([maker()])) for maker in makers] if program.by_seed or smaller else list(makers)


def train_sharded(makers: Sequence[TrainingFactory]) -> Run:
    """Train and return the values of this rank. Failed and repeated steps must give bitwise the same values."""
    run, *others = (maker().run() for maker in makers)
    for undisturbed in others:
        for (label, _), value, expected in zip(run.labels, run.values, undisturbed.values, strict=True):
            assert torch.equal(value, expected), f"{label} is {value} after failed steps, but {expected} without them"
    return run


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Add the events of this thread to ``recorder``. Events of other threads may have groups with the same names."""
    thread = get_ident()

    def record(event: TraceEvent) -> None:
        if get_ident() == thread:
            recorder.events.append(event)

    listeners.append(record)
    try:
        yield
    finally:
        listeners.remove(record)


def check_memory(recorder: Recorder) -> None:
    assert ledger(recorder) == {}, f"unsharded memory remains: {ledger(recorder)}"


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
