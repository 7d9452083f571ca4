"""Recording of a run's batches, and replay of them in another run."""
