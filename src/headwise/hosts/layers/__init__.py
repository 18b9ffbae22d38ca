"""What every host reads off an attention layer: its code, what it declares, its branch and residual, and how it is
hooked."""
