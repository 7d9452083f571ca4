"""The remote engine (`engine="remote"`): rollout engines in Ray actors, from which a trainer samples as if they were
one engine."""
