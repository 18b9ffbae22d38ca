"""A task that trains in a fraction of a second, with attention, noise in its own dropout, and augmentation."""

import torch
from torch import nn

from headwise.study import Task, VisionTransformer


class Tiny(Task):
    """Classify 4×4 images by their brightest quarter."""

    epochs: int = 3
    batch_size: int = 8
    held_out: int = 8
    log: str | None = None
    pause: float = 0.0

    def model(self):
        vit = VisionTransformer(
            classes=4, image_size=4, channels=1, patch=2, dim=8, depth=2, heads=2, head_dim=4, mlp_dim=8
        )
        return nn.Sequential(nn.Dropout(0.1), vit)

    def data(self, split):
        if self.log:
            with open(self.log, "a") as stream:
                stream.write(split + "\n")
        sizes = {"train": 36, "validation": 12, "test": 16}
        generator = torch.Generator().manual_seed(sizes[split])
        images = torch.randn(sizes[split], 1, 4, 4, generator=generator)
        return images, nn.functional.avg_pool2d(images, 2).flatten(1).argmax(1)

    def transform(self, inputs, generator):
        if generator is None:
            return inputs
        if self.pause:
            import time

            time.sleep(self.pause)
        return inputs + 0.1 * torch.randn(inputs.shape, generator=generator)


class Exploding(Tiny.__base__):
    """Return an infinite loss from the sixth step on."""

    epochs: int = 3
    batch_size: int = 8
    method_too: bool = True

    model = Tiny.model

    def data(self, split):
        return torch.randn(32, 1, 4, 4), torch.arange(32) % 4

    def transform(self, inputs, generator):
        return inputs

    def loss(self, output, targets):
        count[0] += torch.is_grad_enabled()
        return nn.functional.cross_entropy(output, targets) * (float("inf") if count[0] >= 6 else 1.0)


count = [0]


class Unseen(Tiny.__base__):
    """Hold no validation split, so that trials must hold out part of the training examples."""

    epochs: int = 1
    held_out: int = 8

    model, transform = Tiny.model, lambda self, inputs, generator: inputs

    def data(self, split):
        if split == "validation":
            return None
        return torch.arange(16.0).repeat_interleave(16).view(16, 1, 4, 4), torch.arange(16) % 4


class Slow(Tiny.__base__):
    """Train like Tiny, with a pause in every step, so that a test can reach into the middle of a run."""

    epochs: int = 8
    batch_size: int = 8
    pause: float = 0.05
    log: str | None = None

    model, data, transform = Tiny.model, Tiny.data, Tiny.transform


class Broken(Tiny.__base__):
    """Fail as a user's code may fail."""

    model = Tiny.model

    def data(self, split):
        return torch.zeros(3, 1, 4, 4), torch.zeros(2)


class Faulty(Tiny.__base__):
    """Raise in the training step."""

    model, data = Tiny.model, lambda self, split: (torch.zeros(3, 1, 4, 4), torch.zeros(3))


class Still(Tiny.__base__):
    """Train without any noise, so that two processes must give the numbers of one."""

    epochs: int = 2
    # 36 examples: the last batch is smaller, and split in unequal parts
    batch_size: int = 11
    evaluation_batch_size: int = 5

    data = Tiny.data
    log: str | None = None

    def model(self):
        return Tiny.model(self)[1]


class Aborting(Still):
    """Leave behind what aborts the process when the libraries' own destructors run, as a forgotten thread does."""

    def data(self, split):
        import ctypes

        c = ctypes.CDLL(None)
        getattr(c, "__cxa_atexit")(ctypes.cast(c.abort, ctypes.c_void_p), None, None)
        return Tiny.data(self, split)


class Resized(Tiny.__base__):
    """Have a setting of the model, and one that changes the examples."""

    pixels: int = 4
    dim: int = 8

    model = Tiny.model

    def data(self, split):
        return torch.zeros(4, 1, self.pixels, self.pixels), torch.arange(4)
