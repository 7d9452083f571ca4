"""Streams of requests to an in-process engine, and records of the ids that each token is sampled from."""
