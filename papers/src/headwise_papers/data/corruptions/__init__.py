"""The corruptions of CIFAR-10-C, made here from their published definitions."""
