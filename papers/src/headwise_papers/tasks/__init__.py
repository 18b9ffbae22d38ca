"""The tasks of the studies: their data, models and metrics."""
