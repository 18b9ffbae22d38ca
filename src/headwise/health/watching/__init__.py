"""Watching: the health of every head while a model trains, without changing a bit of the training."""
