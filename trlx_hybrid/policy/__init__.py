"""Access to the model being trained and to its weights, whatever wraps, shards, adapts or quantises the model."""
