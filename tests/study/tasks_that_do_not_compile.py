"""A task whose steps torch.compile cannot make one graph of."""

from tiny_task import Tiny


class Asking(Tiny):
    """Read a number of the model's output in Python."""

    def loss(self, output, targets):
        loss = super().loss(output, targets)
        return loss if float(loss.detach()) < 100 else 0.5 * loss
