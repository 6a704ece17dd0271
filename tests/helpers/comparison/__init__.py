"""Programs that torch's FSDP2 and this library answer differently: the rows of ``docs/compared-with-fsdp2.md``."""
