"""A run on disk, and for a reader: its trajectories in a terminal or as a page, and a report of all it did."""
