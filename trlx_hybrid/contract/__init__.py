"""The contract with plugins: the protocols of components, and the data that they exchange with a run."""
