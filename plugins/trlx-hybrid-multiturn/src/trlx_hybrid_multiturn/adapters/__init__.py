"""Environments of other libraries, as this plugin's. Each file imports its library only when it is used."""
