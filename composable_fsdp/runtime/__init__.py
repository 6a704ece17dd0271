"""The moving parts: parameters, groups, what is decided, what is done, and the hooks that start it."""
