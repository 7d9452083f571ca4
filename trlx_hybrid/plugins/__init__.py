"""Plugins: the hooks they implement, the host that calls the hooks, the components that plugins offer, and the choice
of those that a run uses."""
