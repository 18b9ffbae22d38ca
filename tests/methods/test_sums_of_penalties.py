"""What penalties are divided by: layers, real queries, and the queries of all processes."""

import pytest
import torch
from naive import penalty, qkv, seen_weights, weights
from processes import in_two_processes
from torch import nn

import headwise
from headwise.attend.core.unread_penalties import Entry
from headwise.attend.methods import Decorrelation, EntropyPenalty, RelaxedAttention
from headwise.attend.regularizing.penalties import joint_mean


class Layers(nn.Module):
    def __init__(self, n):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(n))

    def forward(self, x):
        # each layer sees the same input
        return torch.stack([layer(x, x, x, need_weights=False)[0] for layer in self.layers])


def loss_of(method, model):
    handle = headwise.regularize(model.train(), method)
    model(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)))
    return handle.loss().detach()


@pytest.mark.parametrize(("method", "divisor"), [(Decorrelation(), 3), (EntropyPenalty(strength=1.0), 1)])
def test_decorrelation_is_a_mean_over_layers_and_entropy_a_sum(method, divisor):
    whole = loss_of(method, Layers(3))
    each = []
    for index in range(3):
        model = Layers(3)
        model.layers = model.layers[index : index + 1]
        each.append(loss_of(type(method)(strength=method.strength), model))
    torch.testing.assert_close(whole, sum(each) / divisor)


@pytest.mark.parametrize("form", ["fast", "textbook"])
def test_uniform_weights_are_over_the_keys_and_not_the_queries(form):
    q, k, _ = qkv(t=3, n=7)
    found = seen_weights(RelaxedAttention(gamma=0.3), q, k, form=form, cross=True)
    torch.testing.assert_close(found, 0.7 * weights(q, k) + 0.3 / 7)


def entry(total, weight, strength=None):
    return Entry(torch.tensor(total), torch.tensor(weight), False, strength, None, None, None)


@pytest.mark.parametrize(("total", "weight", "wanted"), [(3.0, 1.0, 3.0), (3.0, 2.0, 1.5), (0.0, 0.0, 0.0)])
def test_a_sum_over_one_query_is_divided_by_one_and_over_none_is_zero(total, weight, wanted):
    assert float(joint_mean([entry(total, weight)], torch.device("cpu"))) == wanted


def test_a_call_with_one_query_of_one_sample_has_its_own_entropy():
    q, k, v = qkv(b=1, h=2, t=1, n=6)
    a = weights(q, k)
    torch.testing.assert_close(penalty(EntropyPenalty(strength=1.0), q, k, v, cross=True), (a * a.log()).sum(-1).mean())


def norms_of_processes(rank, port, folder):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    x = torch.tensor([3.0, 1.0] if rank == 0 else [4.0, 2.0], requires_grad=True)
    squares = Entry(x[0].square(), torch.tensor(1.0 + rank), False, torch.tensor(2.0), None, None, None)
    plain = Entry(x[1], torch.tensor(1.0 + 2 * rank), False, None, None, None, None)
    loss = joint_mean([squares, plain], torch.device("cpu"))
    loss.backward()
    torch.save((loss.detach(), x.grad), folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_norms_of_two_processes_are_roots_of_the_sum_of_their_squares(tmp_path):
    in_two_processes(norms_of_processes, tmp_path)
    (first, first_slope), (second, second_slope) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    leaf = torch.tensor([3.0, 4.0, 1.0, 2.0], requires_grad=True)
    a, b, c, d = leaf.unbind()
    wanted = 2 * (a.square() + b.square()).sqrt() / 3 + (c + d) / 4
    wanted.backward()
    torch.testing.assert_close((first + second) / 2, wanted.detach())
    # data parallelism averages the gradients of the processes
    torch.testing.assert_close(torch.stack([first_slope, second_slope]).T.flatten() / 2, leaf.grad)
