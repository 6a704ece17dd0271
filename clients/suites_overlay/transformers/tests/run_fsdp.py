"""Transformers' ``FSDPTesterMixin`` for a dense model and one with experts: the distribution lacks its model tests."""

from __future__ import annotations

import unittest
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from .test_fsdp_mixin import FSDPTesterMixin

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


class Tester:
    """As much of a model tester as the mixin asks for."""

    def __init__(self, kind: type[PretrainedConfig], **options: Any) -> None:
        self.kind, self.options = kind, options

    def get_config(self) -> PretrainedConfig:
        return self.kind(**SMALL, **self.options)


class TestLlama(FSDPTesterMixin, unittest.TestCase):
    model_tester = Tester(LlamaConfig)


class TestQwen3Moe(FSDPTesterMixin, unittest.TestCase):
    model_tester = Tester(Qwen3MoeConfig, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1)
