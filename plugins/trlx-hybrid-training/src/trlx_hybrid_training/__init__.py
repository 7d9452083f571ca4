"""A plugin that makes the training part of a step faster: it computes log-probs of rows without padding, computes a
prompt once for the rows that share it, recomputes only as many layers as memory requires, and lets LoRA layers read and
write device memory fewer times."""
