"""Guess a number."""
