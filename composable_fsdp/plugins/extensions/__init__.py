"""Parameters whose tensors have FSDP hooks, or a class to keep."""
