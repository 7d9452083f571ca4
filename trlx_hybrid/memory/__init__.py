"""Whose memory it is: what the trainer holds leaves the device for the rollout, and the books on all owners."""
