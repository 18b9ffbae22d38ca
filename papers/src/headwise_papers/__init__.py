"""Studies of the literature on attention regularizers: each tests what its source claims, found by `headwise compare
NAME`."""
