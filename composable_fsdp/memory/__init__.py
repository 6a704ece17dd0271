"""Streams, and the memory in which shards rest and parameters are gathered."""
