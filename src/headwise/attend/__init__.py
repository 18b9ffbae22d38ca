"""Regularizing: methods, the attention that they act on, and the hosts by which models reach it. Needs torch alone."""
