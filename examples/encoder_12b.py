"""A transformer of 12 B parameters for ``composable-fsdp plan examples/encoder_12b.py:build ...``."""

from torch import nn


def build() -> nn.Module:
    """Return 60 encoder layers of width 4096, for batches of shape ``(batch, tokens, 4096)``."""
    layers = (nn.TransformerEncoderLayer(4096, 32, 4 * 4096, batch_first=True) for _ in range(60))
    return nn.Sequential(*layers)
