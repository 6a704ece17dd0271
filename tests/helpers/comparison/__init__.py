"""Programs that behave differently on torch's FSDP2 and here: the rows of ``docs/generated/compared-with-fsdp2.md``."""
