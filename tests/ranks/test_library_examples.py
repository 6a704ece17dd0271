"""Test examples with models and trainers of other libraries, and with adapters."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.fresh_process import run_script_on_ranks

INSTALL = "make install"


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(library) is None, reason=f"needs {library}: {INSTALL}")


def parse_losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+) on rank 0", said, re.MULTILINE)]


@needs("transformers")
@pytest.mark.behaviour("F-11", "I-02")
def test_a_llama_trains_and_goes_back_to_transformers(tmp_path: Path) -> None:
    said = run_script_on_ranks(
        "examples/hf_llama.py", "--steps", "41", "--layers", "2", "--device", "cpu", "--out", str(tmp_path)
    )
    losses = parse_losses(said)
    assert losses[-1] < losses[0] - 1
    assert {"config.json", "model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    assert '"LlamaForCausalLM"' in (tmp_path / "config.json").read_text()
    assert "largest difference of logits after loading into transformers: 0.0e+00" in said


@needs("trl")
@pytest.mark.behaviour("I-02")
@pytest.mark.parametrize("options", [(), ("--sharded",)], ids=["by-the-trainer", "before"])
def test_trl_trains_a_llama_on_cpu_resumes_exports_and_generates(options: tuple[str, ...], tmp_path: Path) -> None:
    """Losses of two ranks, since both see other rows of one data set; ``make clients`` compares them with FSDP2's."""
    said = ""
    for steps in (("--steps", "60"), ("--steps", "75", "--resume")):
        arguments = ["run", "--allow-cpu", "examples/sft.py", "--out", str(tmp_path), *steps, *options]
        script = tmp_path / "command.py"
        script.write_text(f"from composable_fsdp.cli import main\nmain(arguments={arguments!r})\n")
        said += run_script_on_ranks(script)
    losses = [float(loss) for loss in re.findall(r"\{'loss': '?([\d.]+)", said)]
    assert len(losses) == 7, "6 of the first start, 1 of the resumed one"
    assert losses[-1] < losses[5] + 0.1 < 0.6, losses
    assert len(re.findall(r"the (?:sharded|exported) model continues: 7 8 9 10 11 12 13 14", said)) == 4, said
    assert "sharded nothing" not in said


@needs("lightning")
@pytest.mark.behaviour("I-02")
def test_fabric_trains_saves_and_resumes(tmp_path: Path) -> None:
    flags = ("--steps", "21", "--accelerator", "cpu", "--out", str(tmp_path / "checkpoint"))
    said = run_script_on_ranks("examples/lightning_fabric.py", *flags)
    losses = parse_losses(said)
    assert losses[-1] < losses[0] - 1
    assert "steps 10 to 20 again, from the checkpoint: losses are the same" in said


@needs("safetensors")
@pytest.mark.behaviour("C-05")
@pytest.mark.parametrize("keep", [False, True])
def test_adapters_train_with_a_frozen_base_and_are_saved_separately(keep: bool, tmp_path: Path) -> None:
    flags = ("--steps", "151", "--device", "cpu", "--out", str(tmp_path / "adapters.safetensors"))
    said = run_script_on_ranks("examples/lora.py", *flags, *(["--keep-base"] if keep else []))
    losses = parse_losses(said)
    assert losses[-1] < losses[0] / 50
    gathers = [int(number) for number in re.findall(r"on rank 0, (\d+) gathers", said)]
    adapters, bases = 9, 8  # forward and backward of four blocks, and the model's own group, which is empty
    assert gathers == ([adapters + bases // 2] + 3 * [adapters] if keep else 4 * [adapters + bases])
    assert "saved 8 adapters" in said
    assert "after loading the adapters into an unsharded base: 0.0e+00" in said
