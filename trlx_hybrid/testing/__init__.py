"""Helpers for tests of this package and of plugins: tiny real models, a tokenizer, tasks."""
