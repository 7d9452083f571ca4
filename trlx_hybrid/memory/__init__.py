"""Memory of a run: offloading of trainer state to host memory during rollouts, and measurement and prediction of the
bytes that the policy, gradients, optimizer and engine hold."""
