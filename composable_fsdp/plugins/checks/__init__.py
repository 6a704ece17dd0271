"""Checks of models, parameters, orders and optimizer steps, which refuse or warn of what would train wrongly."""
