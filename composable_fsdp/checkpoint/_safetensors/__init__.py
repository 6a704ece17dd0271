"""Checkpoints as safetensors files.

The safetensors library writes complete files from full tensors. torch's ``HuggingFaceStorageWriter`` writes all data
three times, and its consolidation loses scalars and integer tensors; its reader ignores the index. So files are written
here, block by block, and read through the library's slices.
"""
