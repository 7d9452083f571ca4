"""Ray integration: placement of actors, worker groups that are called as one object, and scripts that run across
nodes."""
