"""The model being trained: its weights as they are, whatever wraps, shards, adapts or quantises it."""
