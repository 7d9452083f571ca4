"""vLLM in separate processes: the server that runs there, and the transfer of the policy's weights to it."""
