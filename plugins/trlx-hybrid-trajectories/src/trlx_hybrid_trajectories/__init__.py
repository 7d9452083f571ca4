"""The trajectories of a run on disk, and for a reader: in a terminal, or as an HTML page. For any rollout."""
