"""Values of parameters before training: materialized, seeded, from rank 0."""
