"""Recordings of a run and their views: trajectories in a terminal or as a page, and a report on the whole run."""
