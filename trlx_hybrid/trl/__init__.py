"""Code that knows TRL's trainers; trainer.py is the only file that imports TRL."""
