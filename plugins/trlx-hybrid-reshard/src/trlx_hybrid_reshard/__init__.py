"""Weight resharding between the training and the rollout layout (how the trainer and how the engines shard the
parameters): a plan of which rank sends which slice of which parameter to whom."""
