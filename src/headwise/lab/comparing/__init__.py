"""Comparison of methods on a task: paired by seed, resumable, repeatable."""
