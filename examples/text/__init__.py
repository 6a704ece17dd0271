"""The parts of the programs beside: a byte-level transformer, its text, and what is shown about a run."""
