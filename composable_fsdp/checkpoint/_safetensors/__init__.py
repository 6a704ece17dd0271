"""Checkpoints as safetensors files.

The safetensors library writes complete files from full tensors. torch's ``HuggingFaceStorageWriter`` writes all data
twice, and its consolidation leaves scalars at zero and raises for integer tensors; its reader ignores the index. So
files are written here, block by block, and read through the library's slices. ``test_checkpoint_of_torch.py`` shows it.
"""
