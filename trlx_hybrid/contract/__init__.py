"""The contract between a run and its plugins: the protocols that a component (an engine, a weight sync, a rollout) must
fit, and the data that it exchanges with the run."""
