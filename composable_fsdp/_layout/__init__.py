"""Offsets and sizes of shards and buckets, as numbers, and the copies that follow them. Pure: no process groups."""
