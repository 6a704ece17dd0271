"""The core: a complete FSDP, from the hooks of modules to the verbs of a launcher. Everything else attaches to it."""
