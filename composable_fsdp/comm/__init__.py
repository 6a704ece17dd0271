"""What moves bytes between ranks."""
