"""Checkpoints on disk in the format of torch.distributed.checkpoint."""
