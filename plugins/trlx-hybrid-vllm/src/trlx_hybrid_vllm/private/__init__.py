"""Everything of vLLM that this plugin uses beyond its documented names."""
