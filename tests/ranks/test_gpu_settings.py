"""The trainings of ``tests/gpu/settings.py`` on CPU, so that they run before a GPU is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import settings
from tests.helpers.run_ranks import run_ranks


@pytest.mark.behaviour("C-01", "A-06")
def test_training_in_many_settings_equals_the_unsharded_model() -> None:
    assert "tensor parallel" in run_ranks(settings.train_in_settings, 2, "cpu")[0]


@pytest.mark.behaviour("A-15")
def test_models_are_initialized_equally_with_one_seed() -> None:
    run_ranks(settings.initialize_on_device, 2, "cpu")


@pytest.mark.behaviour("F-12")
def test_a_save_in_the_background_has_the_values_of_its_step(tmp_path: Path) -> None:
    run_ranks(settings.save_in_background, 2, "cpu", tmp_path)
