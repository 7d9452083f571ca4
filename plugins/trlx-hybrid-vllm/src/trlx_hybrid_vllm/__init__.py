"""The in-process vLLM engine of trlx_hybrid: built from the trainer's live model, in the trainer's own process."""
