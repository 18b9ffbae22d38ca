"""Compressing: the products of a head's weights cut to their rank, as smaller factors in a plain model."""
