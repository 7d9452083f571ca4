"""vLLM in separate processes: the parts of a remote engine, and the weight path to it."""
