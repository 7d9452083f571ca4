"""The policy's weights: how the engine comes by them, and the proof that it has them."""
