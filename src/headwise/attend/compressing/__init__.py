"""Compression of a model: the products of each head's weights are cut to their pseudo-rank."""
