"""What plugins may count on: the protocols of components, and the data that they exchange with a run."""
