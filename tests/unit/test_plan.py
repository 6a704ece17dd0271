"""Plans of training steps: their figures against counted ones, their errors, reports, and the command."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from composable_fsdp import CPUOffloadPolicy, fully_shard
from composable_fsdp.errors import ConfigurationError, LifecycleError
from composable_fsdp.plan import ACCELERATORS, Accelerator, Plan, plan, sweep
from composable_fsdp.wrap import transformer_blocks
from tests._internals import CollectiveCost, Costs, Event, GroupSpec, Hook, pinned_bytes, simulate, simulated_job
from tests._internals import dry_run as s
from tests.helpers.command import Done, run_command

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DIM, LAYERS, RANKS, TOKENS = 64, 4, 8, 16
FULL = LAYERS * DIM * DIM * 4
"""The bytes of all parameters."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.linear(x).relu()
        return x + added


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


sgd = partial(torch.optim.SGD, lr=0.1)
BATCH = f"{TOKENS}x{DIM}:float32"


def planned(build: Callable[[], nn.Module] = Model, batch: Any = BATCH, **arguments: Any) -> Plan:
    return plan(build, batch, **{"policy": {Block}, "optimizer": sgd, **arguments})


@pytest.fixture(name="made", scope="module")
def _made() -> Plan:
    return planned()


@pytest.fixture(name="program")
def _program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    lines = [f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})", "from tests.unit.test_plan import Model, Block"]
    path.write_text("\n".join(["import sys", *lines, "def build():", "    return Model()", "number = 1", ""]))
    return path


def row(made: Plan, name: str) -> Any:
    return next(each for each in made.rows if each.name == name)


def test_the_rows_are_those_of_the_shards_and_groups(made: Plan) -> None:
    assert row(made, "parameters").bytes == FULL // RANKS
    assert FULL // RANKS <= row(made, "gradients").largest <= FULL // RANKS + 32 * LAYERS  # with flags of their use
    assert row(made, "optimizer state").largest == 0
    # All small groups are fused, so all are unsharded together, beside the full gradients of one.
    assert row(made, "unsharded").largest == FULL + FULL // LAYERS
    assert made.peak_bytes == sum(each.bytes for each in made.rows)
    assert made.parameters == FULL // 4
    assert made.groups == LAYERS + 1
    assert made.peak_place.startswith("backward of blocks.")


@pytest.mark.parametrize("waits", ["streams", "host"])
def test_the_peak_is_what_a_ledger_counts(waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated device, as ``benchmarks/memory.py`` does."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    device, network, ledger = (importlib.import_module(f"sim.{each}") for each in ("device", "network", "ledger"))
    libraries = importlib.import_module("libraries")
    links = network.Network(device.Device(flops=1.0, bandwidth=1.0))
    ranks = network.simulated_ranks(links, RANKS) if waits == "streams" else libraries.fake_ranks(RANKS)
    counted = ledger.Ledger()
    with ranks as mesh, FakeTensorMode(allow_non_fake_inputs=True), counted:
        model = Model()
        fully_shard(model, policy={Block}, mesh=mesh)
        optimizer, batch = sgd(model.parameters(), momentum=0.9), torch.zeros(TOKENS, DIM)
        for _ in range(2):
            counted.forget_peak()
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    device_of = ACCELERATORS["h100-80gb" if waits == "streams" else "cpu"]
    made = planned(optimizer=partial(sgd, momentum=0.9), device=device_of)
    assert made.peak_bytes == pytest.approx(counted.peak, rel=0.005)


@pytest.mark.parametrize("device", ["h100-80gb", "cpu"])
def test_a_parameter_without_gradient_has_neither_gradient_nor_state(device: Any) -> None:
    class Unused(Block):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(DIM, DIM))

    def build() -> nn.Module:
        return nn.Sequential(Unused(), Unused())

    found = planned(build, policy={Unused}, optimizer=torch.optim.AdamW, device=device)
    assert row(found, "parameters").bytes == 2 * 2 * DIM * DIM * 4 // RANKS
    assert row(found, "optimizer state").bytes == 2 * (2 * DIM * DIM * 4 // RANKS + 4)


def test_nothing_is_allocated_for_a_large_model() -> None:
    """The parameters alone have 4 TB. Models on the meta device have the same plan as others."""

    def build(device: str) -> nn.Module:
        with torch.device(device):
            return nn.Linear(1 << 20, 1 << 20, bias=False)

    plans = [planned(partial(build, device), "1x1048576:float32", policy=None, mesh="64") for device in ("cpu", "meta")]
    assert plans[0].parameters == 1 << 40
    assert not plans[0].fits
    assert plans[0].rows == plans[1].rows


def test_a_step_takes_its_operations_and_exposed_collectives() -> None:
    fast = planned(device=Accelerator(tflops=1, gbit=1e6, gib=1, latency_us=0, per_rank_us=0, efficiency=1))
    slow = planned(device=Accelerator(tflops=1, gbit=1, gib=1, latency_us=0, per_rank_us=0, efficiency=1))
    assert slow.seconds - fast.seconds == pytest.approx(slow.exposed - fast.exposed, rel=0.01)
    # One or two all-gathers and a reduce-scatter, each of 7/8 of the bytes, and computation beside some.
    sent = FULL * (RANKS - 1) / RANKS
    assert 1.5 * sent < slow.exposed * 1e9 / 8 < 3.05 * sent
    assert sum(each.end - each.begin for each in slow.spans if each.stream == "compute") < fast.seconds


def test_axes_within_a_host_use_its_links() -> None:
    accelerator = Accelerator(tflops=1, gbit=1, link_gbit=100, gib=1, latency_us=0, per_rank_us=0)
    one, hybrid, several = (
        planned(mesh="2x4", device=replace(accelerator, ranks_per_host=ranks)).exposed for ranks in (8, 4, 2)
    )
    assert one < 0.1 * hybrid < 0.05 * several


def test_recomputation_keeps_the_inputs_of_groups_only(made: Plan) -> None:
    batch = f"4096x{DIM}:float32"
    plain, lean = planned(batch=batch), planned(batch=batch, recompute=True)
    # Two of three tensors of a block are kept without: its input, and the output of the linear layer.
    assert plain.peak_bytes - lean.peak_bytes > (LAYERS - 2) * 4096 * DIM * 4
    assert lean.mfu * lean.seconds > 1.2 * plain.mfu * plain.seconds  # forward runs twice


def test_offload_moves_shards_to_the_host(made: Plan) -> None:
    offloaded = planned(optimizer=torch.optim.AdamW, offload_policy=CPUOffloadPolicy())
    assert row(offloaded, "parameters").bytes == 0
    assert offloaded.host_bytes >= 4 * FULL // RANKS
    assert offloaded.exposed > made.exposed
    text = "the offload of all parameters or of none, and no offload_policy by name"
    with pytest.raises(ConfigurationError, match=text):
        planned(offload_policy={"0.weight": CPUOffloadPolicy()})


def test_page_locked_memory_is_rounded_up_to_powers_of_two() -> None:
    held = [
        plan(partial(nn.Linear, 96, 96, bias=False), "8x96:float32", mesh="1", offload_policy=policy)
        for policy in (CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False))
    ]
    flat = 4 * 96 * 96
    assert held[0].host_bytes - held[1].host_bytes == 2 * (pinned_bytes(flat) - flat)  # shards and gradients


def test_groups_need_less_memory_than_one() -> None:
    whole = planned(policy=None)
    assert whole.groups == 1
    assert planned(policy=transformer_blocks()).peak_bytes < whole.peak_bytes


def test_a_model_that_shards_itself_is_taken_as_it_is(made: Plan) -> None:
    def build() -> nn.Module:
        return fully_shard(Model(), policy={Block})

    assert plan(build, BATCH, optimizer=sgd).rows == made.rows


def test_it_fits_up_to_the_memory_of_the_device(made: Plan) -> None:
    gib = made.peak_bytes / 2**30
    small = Accelerator(tflops=1, gbit=1, gib=1, reserved_gib=0)
    assert replace(made, device=replace(small, gib=gib * 1.01)).fits
    assert not replace(made, device=replace(small, gib=gib * 0.99)).fits


def test_a_sweep_puts_the_fastest_plan_that_fits_first() -> None:
    found = sweep(Model, BATCH, {"mesh": ["8"], "recompute": [True, False]}, policy={Block}, optimizer=sgd)
    assert len(found) == 2
    times = [made.seconds for _, made in found]
    assert times == sorted(times)
    assert found[0][0]["recompute"] is False


class Returned(NamedTuple):
    """As models of transformers return it."""

    loss: torch.Tensor
    past_key_values: object


class Generates(Model):
    """Keeps a cache of the inputs of its blocks, if its config says so."""

    def __init__(self, *, use_cache: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=use_cache)

    def forward(self, x: torch.Tensor) -> Any:
        kept = [x.repeat(4, 1).tanh() for _ in self.blocks] if self.config.use_cache else None
        return Returned(super().forward(x) + sum(each.mean() for each in kept or ()), kept)


def test_a_kept_cache_is_told() -> None:
    kept, none = (planned(partial(Generates, use_cache=value), f"4096x{DIM}:float32") for value in (True, False))
    assert (kept.keeps_cache, none.keeps_cache) == (True, False)
    assert kept.peak_bytes > none.peak_bytes
    assert "; a key/value cache is kept, which model.config.use_cache = False avoids" in str(kept)
    assert "; no key/value cache is kept" in str(none)


@pytest.mark.parametrize("device", ["h100-80gb", "cpu"])
def test_the_peak_is_what_torchs_tracker_counts(device: Any) -> None:
    momentum = partial(sgd, momentum=0.9)
    with (
        simulated_job((RANKS,), has_streams=ACCELERATORS[device].has_streams) as (mesh, _),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        model = fully_shard(Model(), policy={Block}, mesh=mesh)
        optimizer, batch = momentum(model.parameters()), torch.zeros(TOKENS, DIM)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((batch,))
        for step in range(2):
            with tracker:
                if step:
                    optimizer.step()
                    optimizer.zero_grad()
                model(batch).backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    made = planned(optimizer=momentum, device=device)
    assert peak["Total"] == made.peak_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": "2x2x2"}, "mesh must be a number of ranks, or replicas x shards such as '8x64', not '2x2x2'."),
        ({"device": "h300"}, "there are no figures for the device 'h300'. Known are a100-80gb, h100-80gb"),
        ({"device": 3}, "device must be an Accelerator or the name of a known one, not 3."),
        ({"batch": "4by4"}, "a shape is written as '4x4096' or '8x512:bfloat16', not '4by4'."),
        ({"batch": "4x4:float7"}, "torch has no dtype 'float7'."),
        ({"batch": 7}, "batch must be a tensor, a shape such as"),
        ({"build": lambda: 3}, "build must return an nn.Module, not int."),
        ({"build": nn.Linear}, "plan calls Linear() without arguments, but: missing a required argument: "),
        ({"auto_wrap_policy": 1}, "it is FSDP1's. Pass policy="),
        ({"batch": "4x3:float32"}, "the model cannot be built and run on tensors without values: RuntimeError: "),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        planned(**arguments)
    assert message in str(error.value)
    assert not dist.is_initialized()


def test_a_forward_that_reads_values_is_explained() -> None:
    class Reads(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() else x

    with pytest.raises(ConfigurationError, match=r"DataDependentOutputException.*must not depend on values"):
        planned(Reads)


def test_options_for_a_sharded_model_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="build has sharded the model already, so plan cannot apply policy"):
        planned(lambda: fully_shard(Model()))


def test_a_model_that_is_sharded_in_part_is_refused() -> None:
    def build() -> nn.Module:
        model = Model()
        fully_shard(model.blocks[0])
        return model

    with pytest.raises(ConfigurationError, match="but not the model itself"):
        planned(build, policy=None)


def test_a_process_with_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(LifecycleError, match="Call plan before init_process_group"):
        planned()


@pytest.mark.parametrize(("figure", "value"), [("tflops", 0), ("gib", -1), ("gbit", "1"), ("latency_us", float("nan"))])
def test_figures_of_accelerators_are_checked(figure: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"the {figure} of an Accelerator must be a number and"):
        Accelerator(**{"tflops": 1, "gbit": 1, "gib": 1, figure: value})


def test_the_help_has_the_devices_and_the_figures_that_options_replace(run: Callable[..., Done]) -> None:
    text = " ".join(run("--help", environment={"COLUMNS": "400"}).stdout.split())
    assert all(name in text for name in ACCELERATORS)
    device = ACCELERATORS["h100-80gb"]
    for figure in (device.tflops, device.gbit, round(device.gib, 1), device.ranks_per_host):
        assert f"in place of the device's (of an h100-80gb: {figure:g})" in text


def test_the_picture_of_a_plan_is_drawn(made: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    monkeypatch.syspath_prepend(BENCHMARKS)
    importlib.import_module("plan_accuracy").draw(made, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(name="run")
def _run() -> Iterator[Callable[..., Done]]:
    before = list(sys.path)
    yield partial(run_command, "plan")
    sys.path[:] = before


OPTIONS = ("--batch", f"{TOKENS}x{DIM}:bfloat16", "--mesh", "2x4", "--optimizer", "sgd")


def test_the_command_plans_a_program(run: Callable[..., Done], program: Path) -> None:
    done = run(f"{program}:build", *OPTIONS, "--gbit", "100", "--ranks-per-host", "4", "--json")
    assert done.exit_code == 0, done
    found = json.loads(done.stdout)
    assert found["mesh"] == "2x4"
    assert (found["device"]["gbit"], found["device"]["ranks_per_host"]) == (100, 4)
    assert found["fits"] is True


def test_the_functions_of_classes_build_models(run: Callable[..., Done], program: Path) -> None:
    program.write_text(
        f"{program.read_text()}\nclass Factory:\n    build = staticmethod(build)\n    def own(self): ...\n"
    )
    found = run(f"{program}:Factory.build", *OPTIONS)
    assert (found.exit_code, "fits: " in found.stdout) == (0, True), found
    assert "cheapest set" not in found.stdout
    needs = run(f"{program}:Factory.own", *OPTIONS)
    assert (needs.exit_code, needs.stderr) == (
        2,
        "error: plan calls Factory.own() without arguments, but: missing a required argument: 'self'. Write a function "
        "that returns the model.\n",
    )


@pytest.fixture(name="peaks")
def _peaks(made: Plan, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The parts of the device's memory that plans take, by the end of the settings' text. Nothing is planned."""
    shares: dict[str, float] = {}

    def sweep(
        _: object, __: object, settings: dict[str, list[Any]], **common: Any
    ) -> list[tuple[dict[str, Any], Plan]]:
        found = []
        for values in product(*settings.values()):
            each = dict(zip(settings, values, strict=True))
            seconds = 1.0 + each["recompute"] + each.get("reshard_after_forward", 0)
            share = min(part for text, part in shares.items() if str(each).endswith(text))
            peak = int(share * common["device"].bytes)
            found.append((each, replace(made, device=common["device"], seconds=seconds, peak_bytes=peak)))
        return sorted(found, key=lambda pair: (not pair[1].fits, pair[1].seconds))

    def plan(build: object, batch: object, *, recompute: bool, **common: Any) -> Plan:
        return sweep(build, batch, {"recompute": [recompute]}, **common)[0][1]

    monkeypatch.setattr("composable_fsdp.plan.sweep", sweep)
    monkeypatch.setattr("composable_fsdp.plan.plan", plan)
    return shares


@pytest.mark.parametrize(
    ("fitting", "last"),
    [
        (
            "{'recompute': True, 'reshard_after_forward': False}",
            "cheapest set that fits: --recompute --reshard false (",
        ),
        ("CPUOffloadPolicy(pin_memory=True)}", "cheapest set that fits: --recompute --offload --reshard true ("),
        (
            "other",
            "no set of --recompute, --reshard and --offload fits: take more ranks (--mesh), or a smaller --batch",
        ),
    ],
)
def test_a_model_that_does_not_fit_has_exit_code_1_and_the_set_that_fits(run, program, peaks, fitting, last) -> None:
    peaks.update({"": 1.2, fitting: 0.5})
    done = run(f"{program}:build")
    assert (done.exit_code, "does NOT fit: " in done.stdout) == (1, True), done
    assert done.stderr == "planning with other options, which takes as long for each ...\n"
    assert done.stdout.splitlines()[-1].startswith(last)
    found = run(f"{program}:build", "--json")
    assert (found.exit_code, json.loads(found.stdout)["fits"]) == (1, False)


def test_warnings_of_other_libraries_are_silent(run: Callable[..., Done], program: Path) -> None:
    program.write_text(
        "import logging, warnings\nimport composable_fsdp, torch\n"
        "def build():\n    warnings.warn('of another', stacklevel=1)\n"
        "    logger = logging.getLogger('another')\n    logger.addHandler(logging.StreamHandler())\n"
        "    logger.warning('logged')\n"
        "    warnings.warn('ours', composable_fsdp.errors.PlainParameterWarning, stacklevel=1)\n"
        "    return torch.nn.Linear(64, 64)\n"
    )
    done = run(f"{program}:build", *OPTIONS, "--policy", "none")
    assert (done.exit_code, done.stderr) == (0, "warning: ours\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{}:nothing",), "has no function 'nothing'."),
        (("{}:number",), "has no function 'number'."),
        (("absent.py:build",), "there is no file absent.py."),
        (("absent.module:build",), "absent.module cannot be imported: ModuleNotFoundError: No module named 'absent'"),
        (("{}",), "is no FILE.py:FUNCTION."),
        (("{}:build.more",), "has no function 'build.more'."),
        (("{}:build", "--batch", "4096"), "--batch 4096 has one number, but BATCHxTOKENS is expected, such as 1x4096."),
    ],
)
def test_errors_of_the_command_are_one_line(run, program: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(*(each.format(program) for each in arguments))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["import absent", "def build(:", "raise OSError('two\\nlines')"])
def test_an_error_of_the_program_is_one_line(run: Callable[..., Done], program: Path, text: str) -> None:
    program.write_text(f"{text}\n")
    done = run(f"{program}:build")
    assert done.exit_code == 2
    assert re.fullmatch(rf"error: {program} cannot be imported: \w+Error: .*\n", done.stderr), done.stderr


@pytest.mark.parametrize("option", ["--dtype", "--policy", "--reshard", "--optimizer"])
def test_another_word_is_refused_before_the_model_is_made(run: Callable[..., Any], option: str) -> None:
    done = run("absent.py:build", option, "int4")
    assert (done.exit_code, "invalid choice: 'int4'" in done.stderr) == (2, True), done.stderr


MIB = 1 << 20
NAMES = "abc"
SECONDS = st.floats(0, 1)


def chain_of(names: Sequence[str], ahead: int) -> s.Schedule:
    """Return the schedule of a forward of groups in the order of ``names`` and of its backward, one reduction each. The
    next ``ahead`` groups are gathered before the wait for one, and a reduction waits for the one before it."""
    steps: list[s.Step] = []

    def gathers(order: Sequence[str], at: int) -> tuple[s.Action, ...]:
        new = order[at + ahead :][:1] if at and ahead else order[at : at + 1 + ahead]
        return (*(s.Gather((name,)) for name in new), s.Wait(order[at]))

    for at, name in enumerate(names):
        steps.append(s.Step(Event(Hook.PRE_FORWARD, name), gathers(names, at)))
        steps.append(s.Step(Event(Hook.POST_FORWARD, name), (s.Free(name),)))
    order = names[::-1]
    for at, name in enumerate(order):
        steps.append(s.Step(Event(Hook.PRE_BACKWARD, name), gathers(order, at)))
        if name not in order[at + 1 :]:
            reduce = s.Reduce((name,))
            waits = (s.WaitReduce(1),) if len(set(order[at:])) < len(set(order)) else ()
            steps.append(s.Step(Event(Hook.GRAD_READY, name), (*waits, reduce)))
        steps.append(s.Step(Event(Hook.POST_BACKWARD, name), (s.Free(name),)))
    return s.Schedule((*steps, s.Step(Event(Hook.END_BACKWARD), (s.WaitReduce(1),))))


def specs_of(**options: Any) -> dict[str, GroupSpec]:
    return dict.fromkeys(NAMES, GroupSpec(MIB, MIB, ranks=8, **options))


def costs_of(latency: float, compute: float, bandwidth: float = 1e18) -> Costs:
    cost = CollectiveCost(latency, bandwidth)
    times = dict.fromkeys(NAMES, compute)
    return Costs(cost, cost, times, times)


def test_a_prefetched_chain_exposes_the_first_gather_and_the_last_reduction() -> None:
    timeline = simulate(chain_of(NAMES, 1), specs_of(separate_reduce=True), costs_of(latency=1.0, compute=2.0))
    assert timeline.exposed == pytest.approx(3.0, abs=1e-6), "the first gather of each pass, and the last reduction"
    assert timeline.seconds == pytest.approx(15.0, abs=1e-6)


def test_without_prefetching_every_gather_is_exposed() -> None:
    timeline = simulate(chain_of(NAMES, 0), specs_of(separate_reduce=True), costs_of(latency=1.0, compute=2.0))
    assert timeline.exposed == pytest.approx(7.0, abs=1e-6), "three gathers in each pass and the last reduction"


def test_the_host_waits_for_a_reduction_before_it_launches_the_next_one() -> None:
    costs = replace(costs_of(0.0, compute=1.0), shard=CollectiveCost(0.0, MIB))
    specs = {name: replace(spec, full_bytes=0, gradient_bytes=3 * 8 * MIB // 7) for name, spec in specs_of().items()}
    spans = {span.label: span for span in simulate(chain_of(NAMES, 1), specs, costs).spans}
    assert spans["gradients ready b"].begin == pytest.approx(spans["reduce c"].begin)
    assert spans["gradients ready a"].begin == pytest.approx(spans["reduce c"].end) == pytest.approx(7.0)


@given(SECONDS, SECONDS, SECONDS, st.integers(0, 3))
def test_a_step_takes_at_least_its_computation_and_its_wire_and_more_with_a_longer_latency(
    latency: float, more: float, compute: float, ahead: int
) -> None:
    plan = chain_of(NAMES, ahead)
    timeline = simulate(plan, specs_of(), costs_of(latency, compute))
    wire = sum(span.end - span.begin for span in timeline.spans if span.stream != "compute")
    assert timeline.seconds >= max(6 * compute, wire) - 1e-9
    assert timeline.exposed >= -1e-9
    assert simulate(plan, specs_of(), costs_of(latency + more, compute)).seconds >= timeline.seconds - 1e-9


def test_the_time_of_a_group_is_that_of_all_its_runs() -> None:
    costs = costs_of(latency=0.0, compute=1.0)
    once, repeated = (simulate(chain_of(order, 0), specs_of(), costs) for order in (NAMES, 2 * NAMES))
    assert repeated.seconds == pytest.approx(once.seconds)


def test_messages_are_copied_once_by_the_first_wait_of_their_groups() -> None:
    costs = replace(costs_of(0.0, 0.0), copy_bandwidth=MIB)
    specs = specs_of(gather_copied_bytes=MIB)
    fused = s.Schedule((s.Step(Event(Hook.PRE_FORWARD, "a"), (s.Gather(tuple("abc")), s.Wait("a"), s.Wait("b"))),))
    assert [(span.label, span.end - span.begin) for span in simulate(fused, specs, costs).spans[1:]] == [
        ("copy out of gather a", 3.0)
    ]


def test_replicas_add_their_all_reduce() -> None:
    plain, hybrid = specs_of(), specs_of(replicas=4)
    seconds = [
        simulate(chain_of(NAMES, 1), specs, costs_of(latency=0.5, compute=2.0)).seconds for specs in (plain, hybrid)
    ]
    assert seconds[1] == pytest.approx(seconds[0] + 1.0, abs=1e-6), "the last one, which nothing hides"


def test_one_rank_sends_nothing() -> None:
    assert CollectiveCost(1.0, 1.0).seconds(MIB, 1) == 0.0
    assert CollectiveCost(1.0, 0.5 * MIB, per_rank=3.0).seconds(MIB, 2) == 1.0 + 3.0 + 1.0
    assert CollectiveCost(1.0, 0.5 * MIB, per_rank=3.0).seconds(MIB, 2, messages=2) == 2 * (1.0 + 3.0) + 1.0
