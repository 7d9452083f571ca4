"""Plugins: the hooks they implement, the host that calls them, the components they offer, and the choice of these."""
