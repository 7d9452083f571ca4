"""Weight paths that write into vLLM's memory, share it, or send to vLLM in other processes."""
