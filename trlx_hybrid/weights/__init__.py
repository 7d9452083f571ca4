"""The policy's weights: how the engine gets them, and the check that it has them."""
