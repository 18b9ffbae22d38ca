"""Comparing: experiments, training, engines and their command; needs the extra study."""
