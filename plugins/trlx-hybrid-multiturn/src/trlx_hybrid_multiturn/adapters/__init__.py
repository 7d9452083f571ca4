"""Adapters for environments of other libraries. Each file imports its library only when it is used."""
