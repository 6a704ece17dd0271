"""Checkpoints as safetensors files."""
