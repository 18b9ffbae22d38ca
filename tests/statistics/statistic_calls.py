"""Every kind of call that a host makes, as a reading and as the plain tensors a definition needs."""

import torch

from headwise.health.statistics import Reading

HEADS, SIZE, WIDTH = 4, 16, 24


def _tensors(seed, batch=3, queries=37, keys=None, groups=HEADS, strength=1.5):
    draw = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    q = torch.randn(batch, HEADS, queries, SIZE, generator=draw) * strength
    k = torch.randn(batch, groups, keys, SIZE, generator=draw) * strength + 0.5
    v = torch.randn(batch, groups, keys, SIZE + 4, generator=draw)
    hidden = torch.randn(batch, queries, WIDTH, generator=draw) + 0.7
    output = torch.randn(batch, HEADS, queries, SIZE + 4, generator=draw)
    gate = torch.sigmoid(4 * torch.randn(batch, HEADS, queries, SIZE + 4, generator=draw))
    stream, final = (torch.randn(batch, queries, WIDTH, generator=draw) + shift for shift in (0.3, 1.1))
    return {
        "q": q,
        "k": k,
        "v": v,
        "hidden": hidden,
        "stream": stream,
        "final": final,
        "output": output,
        "product_norm": torch.rand(HEADS, generator=draw) * 1e-3,
        "gate": gate,
        "attention_write": torch.randn(batch, queries, WIDTH, generator=draw) * 0.3,
        "mlp_write": torch.randn(batch, queries, WIDTH, generator=draw) * 3,
    }


def _plain(seed):
    return _tensors(seed)


def _causal(seed):
    return _tensors(seed) | {"causal": True}


def _padded(seed):
    call = _tensors(seed)
    lengths = torch.tensor([37, 20, 5])
    real = torch.arange(37) < lengths[:, None]
    return call | {"mask": real[:, None, None], "real_queries": real}


def _padded_float(seed):
    call = _padded(seed)
    bias = torch.zeros(call["mask"].shape).masked_fill(~call["mask"], torch.finfo(torch.float32).min)
    return call | {"mask": bias.expand(-1, -1, 37, -1)}


def _left_padded(seed):
    call = _tensors(seed)
    real = torch.arange(37) >= torch.tensor([0, 9, 30])[:, None]
    mask = real[:, None, None] & torch.ones(37, 37, dtype=torch.bool).tril()
    # Rows of padding see no key at all, and nobody says that they are padding.
    return call | {"mask": mask}


def _left_padded_causal(seed):
    call = _tensors(seed)
    real = torch.arange(37) >= torch.tensor([0, 9, 30])[:, None]
    return call | {"mask": real[:, None, None], "causal": True, "real_queries": real}


def _sliding(seed):
    away = torch.arange(37)[:, None] - torch.arange(37)
    return _tensors(seed) | {"mask": ((away >= 0) & (away < 6))[None, None]}


def _grouped(seed):
    return _tensors(seed, groups=2) | {"causal": True}


def _cross(seed):
    call = _tensors(seed, queries=19, keys=43) | {"self_attention": False}
    mask = torch.arange(43) < torch.tensor([43, 20, 7])[:, None]
    return call | {"mask": mask[:, None, None]}


def _soft_capped(seed):
    return _tensors(seed, strength=4.0) | {"softcap": 5.0, "causal": True}


def _biased(seed):
    draw = torch.Generator().manual_seed(seed + 1)
    return _tensors(seed) | {"mask": torch.randn(1, HEADS, 37, 37, generator=draw) * 2, "scale": 1.0}


def _with_sinks(seed):
    return _tensors(seed) | {"sinks": torch.tensor([-1.0, 0.0, 2.0, 30.0]), "causal": True}


def _with_sinks_and_padding(seed):
    return _padded(seed) | {"sinks": torch.tensor([-1.0, 0.0, 2.0, 9.0])}


def _packed(seed):
    """Packs three documents into each sequence; the last holds padding that nobody sees."""
    document = torch.bucketize(torch.arange(37), torch.tensor([8, 20, 32]))
    real = document < 3
    alike = (document[:, None] == document) & real & torch.ones(37, 37, dtype=torch.bool).tril()
    return _tensors(seed) | {"mask": alike[None, None], "real_queries": real.expand(3, -1)}


def _one_key_rows(seed):
    return _tensors(seed) | {"mask": torch.eye(37, dtype=torch.bool)[None, None]}


def _collapsed(seed):
    """Builds logits at an offset of 450 whose gaps are 1 to 10 nats, so that the entropy is small and its digits
    matter."""
    call = _tensors(seed)
    draw = torch.Generator().manual_seed(seed + 2)
    q = torch.randn(3, HEADS, 37, SIZE, generator=draw) * 0.05
    k = torch.randn(3, HEADS, 37, SIZE, generator=draw) * 0.05
    q[..., 0], q[..., 1] = 45.0, 4.0
    k[..., 0] = 40.0
    gaps = torch.rand(3, HEADS, 37, generator=draw) ** 0.2 * 9 + 1
    k[..., 1] = -gaps
    k[..., 5, 1] = 0.0
    return call | {"q": q, "k": k}


CALLS = {
    name.removeprefix("_").replace("_", " "): build
    for name, build in list(globals().items())
    if name.startswith("_") and callable(build) and name != "_tensors"
}


def reading(kind, seed=0):
    """Builds the reading of one kind of call."""
    return Reading(**CALLS[kind](seed))


def call_names():
    return sorted(CALLS)
