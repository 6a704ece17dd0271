"""Time and memory beside FSDP2, in sections of ``gpu_report.py``: trainings, steps of optimizers, and codecs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from gpu_profile import device_events, host_waits
from gpu_result import Result
from gpu_target import (
    MB,
    OURS,
    PAIR,
    PEER,
    TOLERANCE,
    Target,
    adam,
    batch_of,
    last_error,
    sharded,
    step,
    width_of,
)
from libraries import LIBRARIES, shard
from models import Decoder
from report import interleaved, ratios, spread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_fsdp import (
    Cast,
    CommunicationPolicy,
    ErrorFeedback,
    Float8,
    Int8,
    Muon,
    offload_optimizer,
    owner_step,
    set_local_steps,
)
from tests.gpu.sharing import without_warnings_of_torch
from tests.helpers.run_ranks import kill_ranks, run_ranks

__all__ = ["add_codecs", "add_training", "codecs", "optimizers", "rank_codecs", "rank_training", "training"]

LIBRARY_PAIR = (OURS, PEER)


def in_turn(target: Target, actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of two actions after two of each for warm-up. The order changes from round to round."""

    def timed(action: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            target.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            action()
            target.synchronize()
            return 1e3 * (time.perf_counter() - begin)

        return run

    variants = {name: timed(action) for name, action in actions.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        order = list(variants)[:: 1 - 2 * (number % 2)]
        found = interleaved({name: variants[name] for name in order}, 1, warm_up=0 if number else 2)
        for name, samples in found.items():
            times[name] += samples
    return times


def slowest(found: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the times of the slowest rank."""
    return {name: [max(each) for each in zip(*(of[name] for of in found), strict=True)] for name in found[0]}


def peaks(target: Target) -> dict[str, float]:
    if target.device == "simulated":
        return {}
    return {
        "peak reserved MB": torch.cuda.max_memory_reserved() / MB,
        "peak allocated MB": torch.cuda.max_memory_allocated() / MB,
    }


def forget(target: Target) -> None:
    """Free what nobody refers to, and begin peaks anew."""
    gc.collect()
    if target.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def differ(a: list[float], b: list[float], allowed: float) -> bool:
    return any(abs(x - y) > allowed * abs(y) for x, y in zip(a, b, strict=True))


# -- a decoder, compiled or not


class Training:
    """A decoder of 853 M parameters in bf16, or a small one on a simulated device, with AdamW and a batch."""

    def __init__(self, target: Target, library: str, mesh: DeviceMesh, compiles: bool) -> None:
        is_small = target.device == "simulated"
        sizes = (256, 64, 128, 32, 4, 2) if is_small else (32000, 2048, 5632, 512, 16, 16)
        torch.manual_seed(0)
        model = Decoder(*sizes)
        for block in model.blocks if compiles else ():
            block.compile(backend="aot_eager" if is_small else "inductor")
        shard(LIBRARIES[library], model, [*model.blocks, model.head], mesh, bf16=True)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not is_small)
        self.tokens = torch.randint(sizes[0], (2, 16) if is_small else (4, 2048))

    def step(self) -> torch.Tensor:
        loss = self.model(self.tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def rank_training(target: Target, compiles: bool, rounds: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return of each library the losses, the parameters and the peaks of three steps alone; and times in turn."""
    alone: dict[str, Any] = {}
    with target.mesh() as mesh, without_warnings_of_torch(), torch.device(target.type):
        for library in LIBRARY_PAIR:
            forget(target)
            trained = Training(target, library, mesh, compiles)
            losses = [float(trained.step()) for _ in range(3)]
            tokens = {
                "tokens": trained.tokens.numel(),
                "parameters": sum(p.numel() for p in trained.model.parameters()),
            }
            alone[library] = {"losses": losses, **tokens, **peaks(target)}
            del trained
        forget(target)
        both = {library: Training(target, library, mesh, compiles) for library in LIBRARY_PAIR}
        return alone, in_turn(target, {library: each.step for library, each in both.items()}, rounds)


Found = list[tuple[dict[str, Any], dict[str, list[float]]]]
"""What :func:`rank_training` returns, of all ranks."""


def training(target: Target, result: Result) -> None:
    """Train a decoder on one, two and all GPUs, eager and by compiled blocks, both libraries in turn."""
    for ranks in target.ranks():
        rounds = 2 if target.device == "simulated" else 20 if ranks <= target.count else 5
        for compiles in (False, True):
            kill_ranks()
            add_training(
                result, target, compiles, run_ranks(rank_training, ranks, target, compiles, rounds, timeout=150)
            )


def add_training(result: Result, target: Target, compiles: bool, found: Found) -> None:
    alone, times, rows = found[0][0], slowest([of for _, of in found]), []
    where = f"{len(found)} ranks, blocks {'compiled' if compiles else 'eager'}"
    for library in LIBRARY_PAIR:
        row: dict[str, Any] = {"library": library, "GPUs": target.shared(len(found)), "step ms": spread(times[library])}
        row["tokens/s"] = 1e3 * len(found) * alone[library]["tokens"] / row["step ms"]["median"]
        rows.append(row | {key: of for key, of in alone[library].items() if key not in ("losses", "tokens")})
    rows[0]["ours/fsdp2"] = ratios(times[OURS], times[PEER])
    result.add(f"Training of a decoder, {where}", rows)
    ours, theirs = (alone[library]["losses"] for library in LIBRARY_PAIR)
    if differ(ours, theirs, TOLERANCE if len(found) == 1 else 2e-2):
        result.failures.append(f"{where}: losses {ours}, of FSDP2 {theirs}")
    ours_mb, theirs_mb = (row.get("peak reserved MB", 0.0) for row in rows)
    if ours_mb > 1.05 * theirs_mb:
        result.failures.append(f"{where}: peak reserved memory: ours {ours_mb:.0f} MB, FSDP2 {theirs_mb:.0f} MB")


# -- steps of optimizers

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(**options: Any) -> Optimizer:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


STEPS: dict[str, tuple[Optimizer, Optimizer]] = {
    "AdamW": (adamw(), adamw()),
    "AdamW, fused": (adamw(fused=True), adamw(fused=True)),
    "AdamW, capturable": (adamw(capturable=True, foreach=True), adamw(capturable=True, foreach=True)),
    "AdamW, offload_optimizer": (lambda model: offload_optimizer(adamw(fused=True)(model)), adamw(fused=True)),
    "Muon": (
        lambda model: Muon(matrices(model), lr=1e-3),
        lambda model: torch.optim.Muon(matrices(model), lr=1e-3),
    ),
    "Adafactor, owner_step": (
        lambda model: owner_step(torch.optim.Adafactor(model.parameters())),
        lambda model: torch.optim.Adafactor(model.parameters()),
    ),
}
"""Optimizers of ours, and those of torch on FSDP2's DTensors with which they are compared."""
ONLY_CUDA = ("AdamW, fused", "AdamW, capturable")


def rank_optimizer(target: Target, name: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return of each library the peak of a step above rest and its host waits, or an error; and times in turn."""
    is_small = target.device == "simulated"
    sizes = (256, 64, 128, 32, 4, 1) if is_small else (8192, 1024, 2816, 512, 8, 4)
    found: dict[str, Any] = {}
    kept: dict[str, torch.optim.Optimizer] = {}
    with target.mesh() as mesh, without_warnings_of_torch(), torch.device(target.type):
        for library, make in zip(LIBRARY_PAIR, STEPS[name], strict=True):
            model = Decoder(*sizes)
            shard(LIBRARIES[library], model, list(model.blocks), mesh, bf16=True)
            model(torch.randint(sizes[0], (1, 16))).backward()
            set_local_steps(library == OURS)
            try:
                optimizer = make(model)
                for _ in range(2):
                    optimizer.step()
            except Exception as error:  # of torch on DTensors, which has its row then
                if library == OURS:
                    raise
                found[library] = {"problem": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
                continue
            found[library] = {"parameters": sum(p.numel() for p in model.parameters())}
            if not is_small:
                forget(target)
                before = torch.cuda.memory_allocated()
                optimizer.step()
                found[library]["peak above rest MB"] = (torch.cuda.max_memory_allocated() - before) / MB
                found[library]["host waits"] = host_waits(device_events(optimizer.step))
            kept[library] = optimizer
        set_local_steps(True)
        return found, in_turn(target, {library: each.step for library, each in kept.items()}, 5)


def optimizers(target: Target, result: Result) -> None:
    """Step each optimizer beside torch's on DTensors, without a forward."""
    names = [name for name in STEPS if target.device == "cuda" or name not in ONLY_CUDA]
    for ranks in target.ranks() if target.device == "cuda" else [PAIR]:
        rows = []
        for name in names:
            try:
                found = run_ranks(rank_optimizer, ranks, target, name, timeout=60)
            except AssertionError as error:
                result.failures.append(f"{name} on {ranks} ranks: {last_error(error)}")
                continue
            times = slowest([of for _, of in found])
            for library in LIBRARY_PAIR:
                row = {"optimizer": name, "ranks": ranks, "library": library, **found[0][0][library]}
                if library in times:
                    row["step ms"] = spread(times[library])
                rows.append(row)
            if PEER in times:
                rows[-2]["ours/fsdp2"] = ratios(times[OURS], times[PEER])
        result.add(f"Steps of optimizers on {ranks} ranks", rows)


# -- codecs

CODECS: dict[str, CommunicationPolicy | None] = {
    "none": None,
    "bf16 gradients": CommunicationPolicy(reduce_scatter=Cast(torch.bfloat16)),
    "fp8": CommunicationPolicy(Float8(), Float8()),
    "int8": CommunicationPolicy(Int8(), ErrorFeedback(Int8())),
}


Losses = dict[str, list[torch.Tensor]]


def step_of(target: Target, model: nn.Module, losses: list[torch.Tensor]) -> Callable[[], object]:
    """Return a step with the same batch each time, which appends its loss to ``losses``."""
    optimizer, batch = adam(model), batch_of(target, dist.get_rank(), 0, width_of(target), 64)
    return lambda: losses.append(step(model, optimizer, batch))


def rank_codecs(target: Target) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the losses with each codec, and of FSDP2 without one, and milliseconds of steps."""
    losses: Losses = {}
    times: dict[str, list[float]] = {}
    with target.mesh() as mesh, without_warnings_of_torch():
        for name in (PEER, *CODECS):
            options = {"comm_policy": CODECS[name]} if CODECS.get(name) else {}
            library, losses[name] = PEER if name == PEER else OURS, []
            model = sharded(target, library, mesh, width_of(target), bf16=True, **options)
            times |= in_turn(target, {name: step_of(target, model, losses[name])}, 5)
    return values(losses), times


def values(losses: Losses) -> dict[str, list[float]]:
    return {name: [float(loss) for loss in found] for name, found in losses.items()}


def add_codecs(result: Result, encoding: str, found: Found) -> None:
    times, losses, rows = slowest([of for _, of in found]), found[0][0], []
    for codec in losses:
        loss, plain = losses[codec][-1], losses["none"][-1]
        rows.append({"codec": codec, "step ms": spread(times[codec]), "last loss": loss})
        rows[-1]["ours/fsdp2"] = None if codec == PEER else ratios(times[codec], times[PEER])
        if abs(loss - plain) > 0.05 * abs(plain):
            result.failures.append(f"{codec}, {encoding}: the last loss is {loss}, not {plain}")
    result.add(f"Seven steps of 4 blocks with codecs, {len(found)} ranks, encoding {encoding}", rows)


def codecs(target: Target, result: Result) -> None:
    """Train with codecs, compiled where the device has Triton, and not."""
    variants = {"compiled": {}, "eager": {"TORCHDYNAMO_DISABLE": "1"}} if target.device == "cuda" else {"eager": {}}
    for name, environment in variants.items():
        add_codecs(result, name, run_ranks(rank_codecs, target.most, target, timeout=120, environment=environment))
    if find_spec("torchao") is None:
        result.notes.append("torchao is not installed: float8 and MXFP8 all-gathers of its tensors have not run.")
        return
    rows = []
    for recipe in RECIPES:
        try:
            losses, times = run_ranks(rank_torchao, PAIR, target, recipe, timeout=60)[0]
        except AssertionError as error:
            rows.append({"recipe": recipe, "problem": last_error(error)[:160]})
            continue
        row = {"recipe": recipe, "losses differ": differ(losses[OURS], losses[PEER], TOLERANCE)}
        rows.append(row | {f"{library} ms": spread(times[library]) for library in LIBRARY_PAIR})
        if row["losses differ"]:
            result.failures.append(f"torchao's {recipe}: losses {losses}")
    result.add("torchao's recipes in both libraries", rows)


def float8(model: nn.Module, emulate: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    return convert_to_float8_training(model, config=config)


def mxfp8(model: nn.Module, emulate: bool) -> nn.Module:
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    recipe = MXFP8TrainingRecipe[f"MXFP8_{'EMULATED_' * emulate}RCEIL"]
    config = MXFP8TrainingOpConfig.from_recipe(recipe)
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    return model


RECIPES = {"float8 with FSDP all-gather": float8, "MXFP8": mxfp8}


def rank_torchao(target: Target, recipe: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the losses of both libraries, and times in turn."""
    losses: Losses = {library: [] for library in LIBRARY_PAIR}
    convert = partial(RECIPES[recipe], emulate=target.device != "cuda")
    with target.mesh() as mesh, without_warnings_of_torch():
        models = {
            library: sharded(target, library, mesh, width_of(target), bf16=True, convert=convert)
            for library in LIBRARY_PAIR
        }
        times = in_turn(target, {name: step_of(target, model, losses[name]) for name, model in models.items()}, 5)
    return values(losses), times
