"""vLLM in separate processes: the parts of a remote engine, and the way that weights reach it."""
