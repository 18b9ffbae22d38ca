"""Experiments before anything runs: task, recipe, phases, arms and study."""
