"""Shared by all hosts: reading a layer's code and declarations, following its branch to the residual, and hooks."""
