"""Weights on their way to the engine: versions, the choice of a weight sync, and the proof that a sync worked."""
