"""Numerics: precision, masks, and the choice between a kernel and its PyTorch form; nothing here knows a layer.

Ground, as `files` and `borders` are: methods and statistics compute with the same functions.
"""
