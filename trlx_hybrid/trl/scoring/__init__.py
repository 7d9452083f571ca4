"""Log-probs of sampled tokens: of the policy and the reference, from the rollout's scoring to the loss."""
