"""Programs that behave differently on torch's FSDP2 and here: the rows of ``docs/compared-with-fsdp2.md``."""
