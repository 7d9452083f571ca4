"""Execution of tools: in threads, in processes, on an event loop, or in the trainer's thread."""
