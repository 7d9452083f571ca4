"""The remote engine (`engine="remote"`): rollout engines in Ray actors, which a trainer samples from as if there were
one."""
