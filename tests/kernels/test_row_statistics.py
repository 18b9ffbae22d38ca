"""Row statistics as one operator: the textbook's numbers and gradients, torch's own checks, one node in a compiled
graph."""

import pytest
import torch
from grids import part_of_grid
from small_models import Own

import headwise
from headwise.attend.attention.row_statistics import attend_rows, attend_rows_backward, registered_rows
from headwise.lab.training.measuring import counter

MASKS = ("none", "bool", "additive", "per head", "an empty row")


def made(kind, causal=False, dtype=torch.float64, rows=7, keys=7):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4, generator=g, dtype=dtype, requires_grad=True) for n in (rows, keys, keys))
    mask = {
        "none": None,
        "bool": torch.rand(2, 1, rows, keys, generator=g) > 0.3,
        "additive": torch.randn(1, 1, rows, keys, generator=g, dtype=dtype),
        "per head": torch.rand(2, 3, 1, keys, generator=g) > 0.3,
        "an empty row": torch.rand(2, 1, rows, keys, generator=g) > 0.3,
    }[kind]
    if kind in ("bool", "per head"):
        mask[..., 0] = True
    if kind == "an empty row":
        mask[:, :, 2] = False
    return q, k, v, mask, causal, 0.7


def textbook(q, k, v, mask, causal, scale):
    """The four outputs from the whole matrix; a row without any key gives zeros, and -inf as its log-sum-exp."""
    s = scale * q @ k.mT
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    empty = (s == float("-inf")).all(-1)
    s = s.masked_fill(empty[..., None], 0.0)
    p = s.softmax(-1).masked_fill(empty[..., None], 0.0)
    entropy = -torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0.0).sum(-1)
    return p @ v, s.logsumexp(-1), entropy, p.square().sum(-1), empty


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_values_and_gradients_are_the_textbooks(kind, causal):
    given = made(kind, causal)
    found, (*wanted, empty) = attend_rows(*given), textbook(*given)
    weights = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(i), dtype=x.dtype) for i, x in enumerate(wanted)
    ]
    # What a row without any key has as its log-sum-exp is read by nobody.
    weights[1] = weights[1].masked_fill(empty, 0.0)
    for place, (a, b) in enumerate(zip(found, wanted, strict=True)):
        shown = ~empty if place == 1 else slice(None)
        torch.testing.assert_close(a[shown], b[shown], rtol=1e-10, atol=1e-12)

    def gradients(outputs):
        total = sum(
            (w * x.masked_fill(empty, 0.0) if x.dim() == 3 else w * x).sum()
            for w, x in zip(weights, outputs, strict=True)
        )
        return torch.autograd.grad(total, given[:3])

    for a, b in zip(gradients(found), gradients(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("read", [(0,), (1,), (2,), (3,), (0, 2)])
def test_what_is_not_read_gives_no_gradient(read):
    given = made("bool")
    found, wanted = attend_rows(*given), textbook(*given)
    for a, b in zip(
        torch.autograd.grad(sum(found[i].square().sum() for i in read), given[:3], allow_unused=True),
        torch.autograd.grad(sum(wanted[i].square().sum() for i in read), given[:3], allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("causal", part_of_grid([False, True], [True]))
@pytest.mark.parametrize("kind", part_of_grid(MASKS, ["per head", "an empty row"]))
@pytest.mark.parametrize("dtype", part_of_grid([torch.float32, torch.bfloat16], [torch.float32]))
def test_torchs_own_checks_of_operators_pass(kind, causal, dtype):
    if kind == "additive" and dtype == torch.bfloat16:
        # an additive mask may be wider than q
        given = (*made("none", causal, dtype)[:3], made(kind)[3].float(), causal, 0.7)
    else:
        given = made(kind, causal, dtype)
    torch.library.opcheck(registered_rows, given)
    with torch.no_grad():
        outputs = attend_rows(*given)
    saved = [x.detach() for x in (*given[:3], *outputs)]
    torch.library.opcheck(attend_rows_backward, ([outputs[0], None, outputs[2], None], saved, *given[3:]))


def test_sums_over_many_values_stay_below_the_largest_number_of_fp16():
    g = torch.Generator().manual_seed(0)
    q, k, v = (0.01 * torch.randn(1, 1, n, 4, generator=g) for n in (3, 8192, 8192))
    out, *_ = attend_rows(q.half(), k.half(), (v + 20).half(), None, False, 1.0)
    # each row is nearly a mean, and 8,192 values of 20 add up to more than 65,504
    torch.testing.assert_close(out.float(), torch.full_like(out.float(), 20.0), rtol=0, atol=0.05)


def test_operators_check_strides_too():
    q, k, v = (torch.randn(2, 5, 3, 4).transpose(1, 2).requires_grad_() for _ in range(3))
    torch.library.opcheck(registered_rows, (q, k, v, None, True, 0.5))


def test_a_compiled_graph_holds_one_node_however_long_the_sequence_is():
    """Dynamo wrote out every block of queries once: a first causal step at T = 1024 then compiled for minutes."""
    nodes = []

    def count(graph, example):
        nodes.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    model = Own(depth=2, dim=32, heads=4, causal=True)
    handle = headwise.regularize(model, headwise.EntropyPenalty(), example=(torch.randn(1, 8, 32),))
    for tokens in (64, 1024):
        torch._dynamo.reset()
        torch.compile(model, backend=count, fullgraph=True)(torch.randn(1, tokens, 32))
    handle.remove()
    short, long = nodes
    assert len(short) == len(long)
    assert sum("attend_rows" in target for target in long) == 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_second_derivatives_are_those_of_the_matrix(kind, causal):
    q, k, v, *rest = made(kind, causal, rows=3, keys=3)

    def outputs(q, k, v):
        out, lse, entropy, square = attend_rows(q, k, v, *rest)
        return out, entropy, square, lse

    torch.autograd.gradgradcheck(outputs, (q, k, v), atol=1e-6)


def test_a_tensor_that_is_queries_and_keys_has_the_right_second_derivative():
    q, _, v, *rest = made("none")

    def slope(attend):
        (first,) = torch.autograd.grad(attend(q, q, v, *rest)[2].sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    torch.testing.assert_close(slope(attend_rows), slope(textbook), rtol=1e-9, atol=1e-11)


def test_without_an_observer_no_registered_operator_is_called():
    """A call of the registry costs the host three times as much."""
    given = made("none")
    with torch.profiler.profile() as seen:
        attend_rows(*given)[0].sum().backward()
    assert not [event.key for event in seen.key_averages() if "headwise::" in event.key]
    with counter() as counted:
        attend_rows(*given)[0].sum().backward()
    seen_by_counters = {str(operator) for operator in counted.get_flop_counts()["Global"]}
    assert seen_by_counters >= {"headwise.attend_rows", "headwise.attend_rows_backward"}
