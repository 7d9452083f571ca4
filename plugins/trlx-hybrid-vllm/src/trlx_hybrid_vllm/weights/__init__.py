"""Ways to bring the policy's weights into an in-process vLLM engine (shared memory, copies, LoRA adapters, merging),
and the record of where in vLLM's memory each parameter of the policy is kept.
"""
