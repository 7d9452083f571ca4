"""Sampling of a batch within TRL's `_generate`: through the session's engine, with tools, in rounds."""
