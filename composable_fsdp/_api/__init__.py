"""The implementation of the public functions and of ``FSDPModule``."""
