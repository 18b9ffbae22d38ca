"""Measure the health of every attention head while a model trains, without changing a bit of the training."""
