"""The weight paths that reach into vLLM's memory."""
