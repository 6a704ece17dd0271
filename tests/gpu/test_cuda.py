"""Training on CUDA over NCCL on one, two and four ranks, which share GPUs where there are fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import cases, settings
from tests.helpers.run_ranks import run_ranks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


pytestmark = pytest.mark.skipif(not GPUS, reason="needs a CUDA GPU")
WORLD_SIZES = (1, 2, 4)


@pytest.mark.behaviour("C-01")
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_on_cuda_equals_the_unsharded_model(world_size: int, reshard_after_forward: bool | None) -> None:
    run_ranks(cases.train_with_parity, world_size, "cuda", reshard_after_forward, timeout=180)


@pytest.mark.behaviour("C-01")
def test_training_on_cuda_with_a_smaller_mesh_equals_the_unsharded_model() -> None:
    run_ranks(cases.train_with_parity, 4, "cuda", 2, timeout=180)


@pytest.mark.behaviour("C-01", "D-01")
@pytest.mark.parametrize(
    "options", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_on_cuda_equals_torch(world_size: int, options: dict[str, torch.dtype]) -> None:
    run_ranks(cases.compare_with_peer, world_size, "cuda", options, timeout=180)


@pytest.mark.behaviour("D-02")
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_offloaded_training_equals_the_unsharded_model(world_size: int, pin_memory: bool) -> None:
    run_ranks(cases.train_offloaded, world_size, "cuda", pin_memory, timeout=180)


@pytest.mark.behaviour("A-13")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_model_built_on_cpu_moves_to_the_devices_of_the_mesh(world_size: int) -> None:
    run_ranks(cases.move_from_cpu, world_size, timeout=180)


@pytest.mark.behaviour("A-18")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_averages_are_kept_on_the_device(world_size: int) -> None:
    run_ranks(cases.average_weights, world_size, "cuda", timeout=180)


@pytest.mark.behaviour("C-03")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_no_full_parameter_stays_in_device_memory(world_size: int) -> None:
    run_ranks(cases.watch_memory, world_size, timeout=180)


@pytest.mark.behaviour("C-01")
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_host_does_not_wait_for_the_device_in_a_step(world_size: int, reshard_after_forward: bool) -> None:
    run_ranks(cases.step_without_host_waiting, world_size, reshard_after_forward, timeout=180)


@pytest.mark.behaviour("E-08")
def test_codecs_on_cuda_agree_with_cpu() -> None:
    run_ranks(cases.encode_as_on_cpu, 1, "cuda", timeout=300)


@pytest.mark.behaviour("E-08", "E-09")
@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_encoded_parameters_and_gradients_train_on_cuda(world_size: int) -> None:
    run_ranks(cases.train_encoded, world_size, "cuda", timeout=300)


@pytest.mark.behaviour("F-06")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_states_go_between_cpu_and_devices(world_size: int) -> None:
    run_ranks(cases.states_between_devices, world_size, "cuda", timeout=180)


@pytest.mark.behaviour("C-01", "A-06")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_in_many_settings_equals_the_unsharded_model(world_size: int) -> None:
    assert run_ranks(settings.train_in_settings, world_size, "cuda", timeout=300)


@pytest.mark.behaviour("M-04")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_compiled_models_train_as_the_unsharded_model(world_size: int) -> None:
    run_ranks(settings.train_compiled, world_size, "cuda", timeout=300)


@pytest.mark.behaviour("A-15")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_models_are_initialized_on_the_device(world_size: int) -> None:
    run_ranks(settings.initialize_on_device, world_size, "cuda", timeout=180)


@pytest.mark.behaviour("F-12")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_save_in_the_background_has_the_values_of_its_step(world_size: int, tmp_path: Path) -> None:
    run_ranks(settings.save_in_background, world_size, "cuda", tmp_path, timeout=180)


@pytest.mark.behaviour("H-05")
def test_a_missing_rank_is_named_before_nccl_ends_the_process() -> None:
    text = run_ranks(settings.wait_for_a_missing_rank, 2, "cuda", 20.0, timeout=100)[0]
    assert text.startswith("PeerError"), text
    assert "rank 1" in text
