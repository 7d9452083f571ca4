"""Memory of a run: offloading of trainer state during rollouts, and the ledger of bytes per owner."""
