"""Metrics that are added to TRL's log: of a step's time and computation, and of components and plugins."""
