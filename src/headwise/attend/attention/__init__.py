"""The attention computation, its kernels, and the fitted layer that runs it."""
