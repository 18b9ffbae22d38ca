"""The data sets of the built-in studies: where they come from, how they are checked, how they are read."""
