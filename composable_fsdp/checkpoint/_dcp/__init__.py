"""Checkpoint directories in the format of ``torch.distributed.checkpoint`` (DCP)."""
