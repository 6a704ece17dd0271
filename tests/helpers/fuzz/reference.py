"""Runs programs on one unsharded model, and compares a sharded run with the result. The reference runs the steps of all
ranks in turn and uses no collectives. For mixed precision it keeps a second set of parameters in the dtypes in which
modules compute, and implements the policy in plain arithmetic: gradients are cast, accumulated, summed over ranks,
divided, and cast again. With error feedback, each rank sends ``gradient + old residual - new residual``. So the
gradients that were received since the beginning differ from the exact ones by the last residuals, of which only a bound
is known here: see :class:`Feedback`. The reference takes its steps with the received gradients as far as they are
within the bounds. With exact ones the parameters would differ after the first step, and a deep recursive model
multiplies that difference: 1e-3 of a gradient in the first step can be 7% of one in the third."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.helpers.fuzz.model import (
    Clock,
    Group,
    Hidden,
    LeafModule,
    Pair,
    Part,
    add,
    build,
    freeze,
    in_order,
    randomise,
    states,
)
from tests.helpers.fuzz.programs import Leaf, Placing, Precision, Program, Step, groups, node_infos
from tests.helpers.fuzz.run import (
    OPTIMIZERS,
    SEED,
    Driver,
    Run,
    TrainingFactory,
    construct_in_order,
    dtype_of,
    has_dim,
    inside,
    mesh_of,
    play,
    train_sharded,
    training_factories,
)
from tests.helpers.threads import run_in_threads

TOLERANCES = {"float64": (1e-9, 1e-11), "float32": (1e-4, 1e-5), "bfloat16": (0.05, 0.1)}
"""Relative and absolute tolerances, by the coarsest dtype of a program.

The absolute tolerance is multiplied by the largest value of the tensor. If large addends cancel, as in a layer that
runs nine times, only their rounding remains, and the rounding of one bf16 weight is added nine times. Programs in
float64 detect real errors.
"""


ROUNDING = 2.0**-8
"""The largest relative error of a value that is rounded to bf16."""

ROUNDING_OF_SUMS = 2.0**-20
"""A bound of the relative error of gradients that are cast to fp32, and summed over ranks and residuals."""


class Feedback:
    """What a sharded parameter may still have to receive of its gradients, which are sent with error feedback.
    ``missing`` is the sum of all exact gradients without that of all received ones. Invariant of the library: it is the
    sum of all residuals, divided by the number of ranks: those of the shard axis, and those of pieces and sums on the
    replicate axis. A residual is the rounding of what was sent last, a gradient and the residual from before it:
    ``bound`` follows from this. Residuals are lost, and remain in ``missing``, if ``requires_grad`` of a parameter in
    the group changes. ``lost`` bounds these, and the rounding to fp32, which has no residual."""

    def __init__(self, parameter: torch.Tensor, mesh: Sequence[int]) -> None:
        shard, *replicate = reversed([size > 1 for size in mesh])
        self.rounding = ROUNDING * (1 + ROUNDING) ** 2 * (shard + 2 * sum(replicate))
        self.missing, self.bound, self.lost = (torch.zeros_like(parameter, dtype=torch.float64) for _ in range(3))

    def send(self, size: torch.Tensor) -> None:
        """Note a reduction of gradients whose absolute values have the mean ``size``."""
        self.lost += ROUNDING_OF_SUMS * size
        self.bound = self.rounding * (size.double() + self.bound)

    def lose_residuals(self) -> None:
        """Note that the library may lose the residuals, or keep them."""
        self.lost += self.bound

    def expect(self, exact: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Return the value nearest to ``received`` that this parameter may receive in a step."""
        middle, allowed = exact.double() + self.missing, self.bound + self.lost
        expected = received.clamp(middle - allowed, middle + allowed)
        self.missing = middle - expected
        return expected


class Reference(Driver):
    """The unsharded model. ``masters`` are the parameters of the optimizer, ``computing`` those of the modules."""

    def __init__(self, program: Program, clock: Clock) -> None:
        self.program, self.model = program, build(program, clock)
        if program.by_seed:
            torch.manual_seed(SEED)
            self.model.apply(randomise)
        self.computing = dict(self.model.named_parameters())
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in self.computing.items()}
        self.groups: dict[str, Group] = {}
        for prefix, part in self.model.named_modules():
            if isinstance(part, LeafModule):
                group = Group() if part.node.ignored else part.group
                self.groups |= {f"{prefix}.{name}".lstrip("."): group for name in part._parameters}
        for name, parameter in self.computing.items():
            dtype = dtype_of(precision_of(self.groups[name]).param)
            parameter.data = parameter.data.to(dtype or parameter.dtype)
        for part in states(self.model):
            cast_around(part)
        found = node_infos(program.tree)
        everything = {p.state for p in found}
        self.holding = {"none": set(), "roots": {p.root for p in found}}
        self.holding |= dict.fromkeys(("all", "no_sync", "no_sync, sharded"), everything)
        self.holding["all-reduce"] = everything if len(program.mesh) == 2 and program.mesh[0] > 1 else set()
        self.holding["no_sync of a part"] = {part.group.path for part in states(states(self.model)[-1])}
        self.rank = 0
        self.data_ranks = prod(program.mesh)
        self.held: list[dict[str, torch.Tensor]] = [{} for _ in range(program.world_size)]
        """The gradients that each rank holds, ``[gradient, size]`` with its ``sizes``; ``sent`` has the same form."""
        self.sent: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(program.world_size)]
        self.sizes: dict[str, torch.Tensor] = {}
        """The sums of absolute gradients: of several in one backward, where reentrant checkpoints run inner ones."""
        for name, parameter in self.computing.items():
            parameter.register_hook(partial(self.note_size, name))
        self.feedback: dict[str, Feedback] = {}
        if program.feedback:
            self.feedback = {name: Feedback(p, program.mesh) for name, p in self.masters.items()}
        self.trainable = self.trainable_names()

    def begin(self, rank: int) -> None:
        self.rank = rank
        with torch.no_grad():
            for name, parameter in self.computing.items():
                parameter.copy_(self.masters[name])

    def after_backward(self, step: Step, is_last: bool) -> None:
        held = self.held[self.rank]
        for name, parameter in self.computing.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                gradient = gradient.to(dtype_of(precision_of(self.groups[name]).reduce) or gradient.dtype)
                both = torch.stack([gradient, self.sizes.pop(name).to(gradient.dtype)])
                held[name] = held[name] + both if name in held else both
        self.send(set() if is_last and step.finish != "synchronize" else self.holding[step.hold])

    def before_optimizer(self, step: Step) -> None:
        if step.finish == "synchronize":
            self.send(set())

    def note_size(self, name: str, gradient: torch.Tensor) -> None:
        size = gradient.abs()
        self.sizes[name] = self.sizes[name] + size if name in self.sizes else size

    def send(self, holding: Collection[object]) -> None:
        held = self.held[self.rank]
        sent = {name for name in held if self.groups[name].path not in holding}
        self.sent[self.rank].append({name: held[name] for name in sent})
        self.held[self.rank] = {name: gradient for name, gradient in held.items() if name not in sent}

    def finish(self) -> None:
        """Reduce the gradients of all ranks to the gradients of the masters."""
        if self.trainable != (trainable := self.trainable_names()):
            self.trainable = trainable
            for feedback in self.feedback.values():
                feedback.lose_residuals()
        for messages in zip(*self.sent, strict=True):
            for name in messages[0]:
                master = self.masters[name]
                total, size = torch.stack([message[name] for message in messages]).sum(0)
                mean = (total / self.data_ranks).to(master.dtype)
                master.grad = mean if master.grad is None else master.grad + mean
                if name in self.feedback:
                    self.feedback[name].send(size / self.data_ranks)
        self.sent = [[] for _ in self.sent]

    def trainable_names(self) -> set[str]:
        return {name for name, parameter in self.computing.items() if parameter.requires_grad}

    def receive(self, runs: Sequence[Run], position: int) -> None:
        """Replace gradients by those of the sharded run, from entry ``position`` on, as far as it may receive these."""
        for number, (name, feedback) in enumerate(self.feedback.items(), position):
            master = self.masters[name]
            if master.grad is None:
                continue
            dim, shards = shards_of(master.grad, self.groups[name], self.program)
            parts = [run.values[number] for run in runs[:: self.program.tensor_ranks][: len(shards)]]
            if [part.numel() for part in parts] == [shard.numel() for shard in shards]:  # else the labels differ too
                received = torch.cat([part.view_as(shard) for part, shard in zip(parts, shards, strict=True)], dim)
                master.grad = feedback.expect(master.grad, received).to(master.dtype)


def precision_of(group: Group) -> Precision:
    return Precision() if group.state is None else group.state.precision


def cast_around(part: Part) -> None:
    """Cast inputs and outputs of every call of ``part`` according to its mixed-precision policy."""
    state, forward = part.state, part.forward
    assert state is not None
    into = dtype_of(state.precision.param) if state.precision.cast_inputs else None
    out_of = dtype_of(state.precision.output)

    def casting(x: torch.Tensor, depth: int = 1, hidden: Hidden | None = None) -> Any:
        if into is None or hidden is None:
            return cast(forward(x if into is None else x.to(into), depth, hidden), out_of)
        inside = cast(hidden, into)
        try:
            return cast(forward(x.to(into), depth, inside), out_of)
        finally:
            for state in in_order(inside)[len(hidden) :]:
                add(hidden, state)

    if into is not None or out_of is not None:
        part.forward = casting  # type: ignore[method-assign]


def cast(output: Any, dtype: torch.dtype | None) -> Any:
    match output:
        case torch.Tensor():
            return output if dtype is None else output.to(dtype)
        case Pair(first, rest):
            return Pair(cast(first, dtype), cast(rest, dtype))
        case tuple() | list():
            return type(output)(cast(item, dtype) for item in output)
        case dict():
            return {key: cast(item, dtype) for key, item in output.items()}
        case _:
            return output


def train_reference(program: Program, actual: Sequence[Run]) -> list[Run]:
    """Return the expected run of each rank. ``actual`` are the sharded runs, which say what error feedback sent."""
    runs, clock = [Run() for _ in range(program.world_size)], Clock()
    reference = Reference(program, clock)
    optimizer = OPTIMIZERS[program.optimizer](reference.masters.values())
    for clock.step, step in enumerate(program.steps):
        optimizer.zero_grad()
        freeze(reference.model, clock.step)
        for rank, run in enumerate(runs):
            reference.begin(rank)
            with inside(program):
                play(reference.model, program, step, 100 * clock.step + rank, reference, run)
        reference.finish()
        reference.receive(actual, len(runs[0].values))
        for rank, run in enumerate(runs):
            for name, master in reference.masters.items():
                part = None if master.grad is None else shard_of(master.grad, reference.groups[name], program, rank)
                run.note(f"gradient of {name}", part)
        optimizer.step()
    for rank, run in enumerate(runs):
        for name, master in reference.masters.items():
            run.note(name, shard_of(master, reference.groups[name], program, rank))
    return runs


def shard_of(tensor: torch.Tensor, group: Group, program: Program, rank: int) -> torch.Tensor:
    if group.state is None:
        return tensor
    (dim, shards), index = shards_of(tensor, group, program), rank // program.tensor_ranks % program.mesh[-1]
    return shards[index] if index < len(shards) else tensor.narrow(dim, 0, 0)


def shards_of(tensor: torch.Tensor, group: Group, program: Program) -> tuple[int, Sequence[torch.Tensor]]:
    dim = group.state.dim if group.state is not None and has_dim(tensor, group.state) else 0
    return dim, tensor.chunk(1 if group.state is None else program.mesh[-1], dim)


def tolerance(program: Program) -> tuple[float, float]:
    used = {"float64"} | {info.node.dtype for info in node_infos(program.tree) if isinstance(info.node, Leaf)}
    for state in groups(program.tree).values():
        precision = state.precision
        used |= {name for name in (precision.param, precision.reduce, precision.output) if name is not None}
    if program.inside == "autocast":
        used.add("bfloat16")
    return TOLERANCES[next(name for name in reversed(TOLERANCES) if name in used)]


def difference(program: Program, actual: Run, expected: Run, rank: int) -> str:
    """Describe the first difference between two runs, or return an empty text."""
    if actual.labels != expected.labels:
        pairs = zip(actual.labels, expected.labels, strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), "their number")
        return f"rank {rank} and the reference have different entries: {first}"
    rtol, atol = tolerance(program)
    for position, ((label, _), a, b) in enumerate(zip(actual.labels, actual.values, expected.values, strict=True)):
        largest = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        if not torch.allclose(a, b, rtol=rtol, atol=atol * largest):
            return f"rank {rank}: {label} (entry {position}) is {a.tolist()}, expected {b.tolist()}"
    return ""


SWITCH_INTERVAL = 1e-4
"""The switch interval of threads in seconds. The default of 5 ms is most of the time of a program."""


def differences(programs: Sequence[Program]) -> dict[int, str]:
    """Train every program and return descriptions of failures by position. Each rank trains the references of some
    programs and reports only the failures of these."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    meshes: Meshes = {}
    runs = [attempt(partial(train, program, meshes)) for program in programs]
    gathered: list[list[list[Run]]] = [[] for _ in range(ranks)]
    dist.all_gather_object(gathered, runs)
    found = {}
    for i in range(rank, len(programs), ranks):
        threads = programs[i].threads
        texts = (compare(program, [runs[i][n] for runs in gathered]) for n, program in enumerate(threads))
        if text := next(filter(None, texts), ""):
            found[i] = text
    return found


Meshes = dict[tuple[int, tuple[int, ...], Placing | None], DeviceMesh]


def train(program: Program, meshes: Meshes) -> list[Run]:
    threads: list[list[TrainingFactory]] = []
    for number, each in enumerate(program.threads):
        key = number, each.mesh, each.placing
        if key not in meshes:
            meshes[key] = mesh_of(each, number)
        threads.append(training_factories(each, meshes[key]))
    if len(threads) == 1:
        return [train_sharded(threads[0])]
    threads = [construct_in_order(each, makers) for each, makers in zip(program.threads, threads, strict=True)]
    calls = [partial(attempt, lambda makers=makers: [train_sharded(makers)]) for makers in threads]  # type: ignore[misc]
    return [run for runs in run_in_threads(calls, SWITCH_INTERVAL) for run in runs]


def compare(program: Program, runs: Sequence[Run]) -> str:
    """Compare the runs of all ranks with the reference, and describe the first failure, or return an empty text."""
    if text := next((run.error for run in runs if run.error), ""):
        return text
    expected = attempt(lambda: train_reference(program, runs))
    if text := next((run.error for run in expected if run.error), ""):
        return f"the reference failed: {text}"
    texts = (difference(program, *pair, rank) for rank, pair in enumerate(zip(runs, expected, strict=True)))
    return next(filter(None, texts), "")


def attempt(train: Callable[[], list[Run]]) -> list[Run]:
    try:
        return train()
    except Exception:
        return [Run(error=traceback.format_exc())]
