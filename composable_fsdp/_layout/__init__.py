"""Offsets and sizes of shards and buckets, and the copies between them. Pure: no process groups."""
