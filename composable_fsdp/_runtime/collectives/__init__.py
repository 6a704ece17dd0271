"""All-gathers and reduce-scatters of buckets of parameters."""
