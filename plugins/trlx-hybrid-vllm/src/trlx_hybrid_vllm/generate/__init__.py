"""Requests for completions: their conversion for vLLM, and streams of them while the engine steps."""
