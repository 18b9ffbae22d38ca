"""The corruptions of CIFAR-10-C, implemented from their published definitions."""
