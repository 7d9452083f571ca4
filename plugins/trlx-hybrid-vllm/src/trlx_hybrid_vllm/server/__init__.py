"""vLLM in processes of its own: what a remote engine is made of, and how weights reach it."""
