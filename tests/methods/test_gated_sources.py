import pytest
import torch
from naive import qkv
from torch.nn import functional as F

from headwise.attend.core.site import Site
from headwise.attend.methods import GatedOutput
from headwise.testing.calls import attend_with, fit_standalone, standalone_site

NAMES = ("weight", "down", "up", "output_weight", "output_down", "output_up", "bias")


def fitted_with_numbers(method, q, k, x):
    """Fit a method with random parameters, and return it with them by name."""
    fitted = fit_standalone([method], standalone_site(q, k, hidden=x))
    state, found = fitted.states[0], {}
    for name in NAMES:
        try:
            found[name] = torch.nn.init.normal_(state.tensor(name))
        except AttributeError:
            continue
    return fitted, found


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("source", ["input", "output", "both"])
@pytest.mark.parametrize("start", ["open", "half", "one"])
@pytest.mark.parametrize("per", ["head", "element"])
def test_the_gate_is_written_out_from_its_sources(per, start, source, rank):
    q, k, v = qkv()
    x = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(4))
    method = GatedOutput(per=per, start=start, source=source, rank=rank)
    fitted, learned = fitted_with_numbers(method, q, k, x)
    plain, size = attend_with([], q, k, v)[0], 4 if per == "element" else 1
    wanted = []
    for head in range(3):
        logits = torch.zeros(2, 6, size)
        for name, read in (("", x), ("output_", plain[:, head])):
            if name + ("weight" if rank is None else "down") not in learned:
                continue
            if rank is None:
                logits = logits + read @ learned[f"{name}weight"].view(3, size, -1)[head].T
            else:
                inner = F.silu(read @ learned[f"{name}down"].view(3, rank, -1)[head].T)
                logits = logits + inner @ learned[f"{name}up"][head]
        if start == "open":
            logits = logits + learned["bias"].view(3, size)[head]
        wanted.append(plain[:, head] * torch.sigmoid(logits) * (2 if start == "one" else 1))
    out = attend_with(fitted.methods, q, k, v, fitted=fitted, hidden=x)[0]
    torch.testing.assert_close(out, torch.stack(wanted, 1))
    # Each source is read exactly where it is named.
    assert any(name.startswith("output_") for name in learned) == (source != "input")
    assert bool({"weight", "down"} & learned.keys()) == (source != "output")


def test_low_rank_gates_start_where_full_ones_do_and_learn():
    q, k, v = qkv()
    x, plain = torch.randn(2, 6, 5), attend_with([], q, k, v)[0]
    for start, factor in (("open", 0.98201379), ("half", 0.5), ("one", 1.0)):
        method = GatedOutput(source="both", rank=3, per="element", start=start)
        fitted = fit_standalone([method], standalone_site(q, k, hidden=x))
        out = attend_with(fitted.methods, q, k, v, fitted=fitted, hidden=x)[0]
        torch.testing.assert_close(out, plain * factor)
        out.square().sum().backward()
        assert all((fitted.states[0].tensor(name).grad != 0).any() for name in ("up", "output_up"))


def test_the_random_projections_depend_on_the_seed_and_not_on_torchs_generator():
    q, k, _ = qkv()
    x = torch.randn(2, 6, 5)

    def down(torch_seed):
        torch.manual_seed(torch_seed)
        fitted = fit_standalone([GatedOutput(source="both", rank=3)], standalone_site(q, k, hidden=x))
        return fitted.states[0].tensor("down"), fitted.states[0].tensor("output_down")

    (first, of_output), (again, _) = down(0), down(1)
    assert torch.equal(first, again)
    assert first.shape == (9, 5) and of_output.shape == (9, 4)
    assert 0.5 < first.std() * 5**0.5 < 1.5


def test_a_gate_of_the_output_needs_no_input():
    q, k, v = qkv()
    fitted, _ = fitted_with_numbers(GatedOutput(source="output"), q, k, torch.randn(2, 6, 5))
    attend_with(fitted.methods, q, k, v, fitted=fitted, hidden=None)
    assert GatedOutput(source="output").refuse(Site("x", torch.nn.Module(), joint=True)) is None
    assert "image and text" in GatedOutput(source="both").refuse(Site("x", torch.nn.Module(), joint=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "query"}, "source must be one of 'input', 'output', 'both', got 'query'"),
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"source": "output", "channels": 3}, 'which source="output" does not read'),
    ],
)
def test_settings_that_fit_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GatedOutput(**settings)
