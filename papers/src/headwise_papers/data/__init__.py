"""The data sets of the studies: their sources, checks and readers."""
