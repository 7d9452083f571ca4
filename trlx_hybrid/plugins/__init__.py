"""Plugins: the hooks they implement, the host that calls the hooks, the components on offer, and the choice among
them."""
