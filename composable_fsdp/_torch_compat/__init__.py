"""The only files that know torch's own FSDP."""
