"""The only folder that depends on torch's own FSDP and its private names."""
