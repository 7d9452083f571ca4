"""Code that knows TRL's trainers. Only trainer.py, attach.py, borrowed.py and recipe.py import TRL."""
