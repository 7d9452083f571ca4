"""The seam to TRL: all that knows its trainers, and in trainer.py the only import of it."""
