"""Studies that test the claims of the literature on attention regularizers; run one by `headwise compare NAME`."""
