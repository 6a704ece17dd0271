"""The parts of ``examples/train_text.py``: a byte-level transformer, its text, and what is shown about the run."""
