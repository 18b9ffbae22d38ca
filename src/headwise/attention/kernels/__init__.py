"""Kernels of the attention computation: row statistics in one pass, and the largest logits."""
