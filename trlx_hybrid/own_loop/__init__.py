"""The hybrid engine, for training loops without a TRL trainer."""
