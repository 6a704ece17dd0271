"""Agreement between ranks on what is saved and loaded, and the progress of a save."""
