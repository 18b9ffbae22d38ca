"""The one attention computation and its kernels."""
