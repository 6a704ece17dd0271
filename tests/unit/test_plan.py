"""Plans of training steps: their figures against counted ones, their errors, reports, and the command."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from composable_fsdp import CPUOffloadPolicy, fully_shard
from composable_fsdp.errors import ConfigurationError, LifecycleError
from composable_fsdp.plan import ACCELERATORS, Accelerator, Plan, plan
from composable_fsdp.plan.make_plan import as_loss as plan_loss
from composable_fsdp.wrap import transformer_blocks
from tests._internals import Event, GroupSpec, Hook, simulate, simulated_job
from tests._internals import dry_run as s
from tests.helpers.command import Done, run_command

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


def test_a_parameter_without_gradient_has_neither_gradient_nor_state() -> None:
    class Unused(Block):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(DIM, DIM))

    def build() -> nn.Module:
        return nn.Sequential(Unused(), Unused())

    found = planned(build, policy={Unused}, optimizer=torch.optim.AdamW)
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
        ({"batch": "4by4"}, "a shape is written as '4x4096' or '8x512:bfloat16', not '4by4'."),
        ({"batch": "4x4:float7"}, "module 'torch' has no attribute 'float7'"),
        ({"build": nn.Linear}, "without values: TypeError: Linear.__init__() missing 2 required"),
        ({"loss": lambda _: plan_loss([])}, "the model returns list, in which plan finds no loss. Pass loss="),
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
    with pytest.raises(ConfigurationError, match=r"twice|already"):
        planned(lambda: fully_shard(Model()))


def test_a_process_with_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(LifecycleError, match="Call plan before init_process_group"):
        planned()


@pytest.mark.parametrize(("figure", "value"), [("tflops", 0), ("gib", -1), ("latency_us", float("nan"))])
def test_figures_of_accelerators_are_checked(figure: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"the {figure} of an Accelerator must be positive"):
        Accelerator(**{"tflops": 1, "gbit": 1, "gib": 1, figure: value})


def test_the_help_has_the_devices_and_the_figures_that_options_replace(run: Callable[..., Done]) -> None:
    text = " ".join(run("--help", environment={"COLUMNS": "400"}).stdout.split())
    assert all(name in text for name in ACCELERATORS)
    device = ACCELERATORS["h100-80gb"]
    for figure in (device.tflops, device.gbit, round(device.gib, 1), device.ranks_per_host):
        assert f"in place of the device's (of an h100-80gb: {figure:g})" in text


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
    assert "fits with" not in found.stdout
    needs = run(f"{program}:Factory.own", *OPTIONS)
    assert (needs.exit_code, "TypeError: Factory.own() missing 1 required positional" in needs.stderr) == (2, True)


@pytest.mark.parametrize(
    ("fitting", "last"),
    [
        ({"recompute": True, "reshard_after_forward": False}, "fits with --recompute --reshard false: 36.75 GiB, 50 %"),
        ({"offload_policy": CPUOffloadPolicy()}, "fits with --recompute --reshard true --offload: 36.75 GiB, 50 %"),
        ({"policy": 0}, "no set of --recompute, --reshard and --offload fits: take more ranks (--mesh), or a smaller"),
    ],
)
def test_a_model_that_does_not_fit_has_exit_code_1_and_options_that_fit(
    run: Any, program: Path, made: Plan, monkeypatch: pytest.MonkeyPatch, fitting: dict[str, Any], last: str
) -> None:
    """Nothing is planned."""

    def plan(build: object, batch: object, *, device: Accelerator, **options: Any) -> Plan:
        fits = fitting.items() <= options.items()
        return replace(made, device=device, peak_bytes=int((0.5 if fits else 1.2) * device.bytes))

    monkeypatch.setattr("composable_fsdp.plan.plan", plan)
    done = run(f"{program}:build")
    assert (done.exit_code, "does NOT fit: " in done.stdout) == (1, True), done
    assert done.stderr == "planning with other options, which takes as long for each ...\n"
    assert done.stdout.splitlines()[-1].startswith(last)
    found = run(f"{program}:build", "--json")
    assert (found.exit_code, json.loads(found.stdout)["fits"]) == (1, False)


def test_warnings_about_a_run_are_silent(run: Callable[..., Done], program: Path) -> None:
    program.write_text(
        "import warnings, torch\n"
        "def build():\n    warnings.warn('of another', stacklevel=1)\n"
        "    return torch.nn.Linear(64, 64)\n"
    )
    done = run(f"{program}:build", *OPTIONS, "--policy", "none")
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("{}:nothing",),
            "MODULE:FUNCTION: AttributeError: 'types.SimpleNamespace' object has no attribute 'nothing'",
        ),
        (("{}:number",), "has no function 'number'."),
        (("absent.py:build",), "FileNotFoundError: [Errno 2] No such file or directory: "),
        (("absent.module:build",), "ModuleNotFoundError: No module named 'absent'"),
        (("{}",), "is no FILE.py:FUNCTION"),
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
    text = f"error: '{program}:build' is no FILE.py:FUNCTION or MODULE:FUNCTION: "
    assert re.fullmatch(rf"{re.escape(text)}\w+Error: .*\n", done.stderr), done.stderr


@pytest.mark.parametrize("option", ["--dtype", "--policy", "--reshard", "--optimizer"])
def test_another_word_is_refused_before_the_model_is_made(run: Callable[..., Any], option: str) -> None:
    done = run("absent.py:build", option, "int4")
    assert (done.exit_code, "invalid choice: 'int4'" in done.stderr) == (2, True), done.stderr


MIB = 1 << 20
NAMES = "abc"


def chain_of(names: Sequence[str], ahead: int) -> s.Schedule:
    """Return the schedule of a forward of groups in the order of ``names`` and of its backward, one reduction each. The
    next ``ahead`` groups are gathered before the wait for one, and a reduction waits for the one before it."""
    steps: list[s.Step] = []

    def gathers(order: Sequence[str], at: int) -> tuple[s.Action, ...]:
        new = order[at + ahead :][:1] if at and ahead else order[at : at + 1 + ahead]
        return (*(s.Action("gather", (name,)) for name in new), s.Action("wait", (order[at],)))

    for at, name in enumerate(names):
        steps.append(s.Step(Event(Hook.PRE_FORWARD, name), gathers(names, at)))
        steps.append(s.Step(Event(Hook.POST_FORWARD, name), (s.Action("free", (name,)),)))
    order = names[::-1]
    for at, name in enumerate(order):
        steps.append(s.Step(Event(Hook.PRE_BACKWARD, name), gathers(order, at)))
        if name not in order[at + 1 :]:
            waits = (s.Action("wait for", number=1),) if len(set(order[at:])) < len(set(order)) else ()
            steps.append(s.Step(Event(Hook.GRAD_READY, name), (*waits, s.Action("reduce", (name,)))))
        steps.append(s.Step(Event(Hook.POST_BACKWARD, name), (s.Action("free", (name,)),)))
    return s.Schedule((*steps, s.Step(Event(Hook.END_BACKWARD), (s.Action("wait for", number=1),))))


def simulated(
    schedule: s.Schedule, *, latency: float, compute: float, gb_s: float = 1e15, **options: Any
) -> tuple[float, float]:
    """Return the seconds and the exposed part of a schedule of groups of 1 MiB on 8 ranks."""
    accelerator = Accelerator(
        tflops=1, gbit=1e15, gib=1, latency_us=1e6 * latency, per_rank_us=0, memory_gb_s=gb_s, efficiency=1
    )
    times, specs = dict.fromkeys(NAMES, compute), dict.fromkeys(NAMES, GroupSpec(MIB, MIB, 8, **options))
    return simulate(schedule, specs, accelerator, times, times)


@pytest.mark.parametrize(
    ("ahead", "exposed"),
    [(1, 3.0), (0, 7.0)],  # the first gather of each pass, or three gathers in each; and the last reduction
)
def test_a_prefetched_chain_exposes_the_first_gather_and_the_last_reduction(ahead: int, exposed: float) -> None:
    found = simulated(chain_of(NAMES, ahead), latency=1.0, compute=2.0, separate_reduce=True)
    assert found == pytest.approx((12.0 + exposed, exposed), abs=1e-6)


def test_the_host_waits_for_a_reduction_before_it_launches_the_next_one() -> None:
    """Reductions of 3 s, beside computation of 1 s a group: forward, c, and then three reductions."""
    specs = dict.fromkeys(NAMES, GroupSpec(0, 3 * 8 * MIB // 7, 8))
    accelerator = Accelerator(
        tflops=1, gbit=8 * MIB / 1e9, gib=1, latency_us=0, per_rank_us=0, memory_gb_s=1e15, efficiency=1
    )
    times = dict.fromkeys(NAMES, 1.0)
    seconds, exposed = simulate(chain_of(NAMES, 1), specs, accelerator, times, times)
    assert (seconds, exposed) == pytest.approx((4 + 3 * 3, 4 + 3 * 3 - 6), rel=1e-3)


def test_the_time_of_a_group_is_that_of_all_its_runs() -> None:
    once, repeated = (simulated(chain_of(order, 0), latency=0.0, compute=1.0) for order in (NAMES, 2 * NAMES))
    assert repeated == pytest.approx(once)


def test_messages_are_copied_once_by_the_first_wait_of_their_groups() -> None:
    actions = (s.Action("gather", tuple(NAMES)), s.Action("wait", ("a",)), s.Action("wait", ("b",)))
    fused = s.Schedule((s.Step(Event(Hook.PRE_FORWARD, "a"), actions),))
    seconds, exposed = simulated(fused, latency=0.0, compute=0.0, gb_s=2 * MIB / 1e9, copied_bytes=MIB)
    assert (seconds, exposed) == pytest.approx((3.0, 0.0), abs=1e-6)


def test_replicas_add_their_all_reduce() -> None:
    plain, hybrid = (simulated(chain_of(NAMES, 1), latency=0.5, compute=2.0, replicas=n)[0] for n in (1, 4))
    assert hybrid == pytest.approx(plain + 1.0, abs=1e-6), "the last one, which nothing hides"


def test_collectives_take_a_latency_for_each_message_and_their_bytes() -> None:
    accelerator = Accelerator(tflops=1, gbit=8e-9, gib=1, latency_us=1e6, per_rank_us=3e6)  # a byte per second
    assert accelerator.collective_seconds(8, 1) == 0.0
    assert accelerator.collective_seconds(8, 2) == pytest.approx(1.0 + 3.0 + 4.0)
    assert accelerator.collective_seconds(8, 2, messages=2) == pytest.approx(2 * (1.0 + 3.0) + 4.0)
