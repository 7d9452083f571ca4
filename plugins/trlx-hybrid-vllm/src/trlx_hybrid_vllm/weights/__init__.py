"""The weight paths to vLLM, and the maps from parameters to the memory that holds them."""
