"""The data and models of the built-in studies."""
