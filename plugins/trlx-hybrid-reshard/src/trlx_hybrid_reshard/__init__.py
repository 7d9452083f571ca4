"""Weight resharding between training and rollout layouts: a plan of which rank sends which slice of which parameter to
whom."""
