"""Streams of full parameters in buckets, to programs that want whole weights."""
