"""Each statistic written from its definition, on the whole matrix in float64, one row after the other where that is
plainest."""

import dataclasses
import math

import torch


class Whole:
    """Holds the whole matrices of a call in float64: logits, weights, who may see whom, which queries count."""

    def __init__(self, reading):
        self.reading = r = reading
        repeat = r.heads // r.k.shape[1]
        q, k = r.q.double(), r.k.double().repeat_interleave(repeat, 1)
        self.v = r.v.double().repeat_interleave(repeat, 1)
        logits = q @ k.mT * r.scale
        if r.softcap is not None:
            logits = r.softcap * torch.tanh(logits / r.softcap)
        allowed = torch.ones_like(logits, dtype=torch.bool)
        if r.mask is not None and r.mask.dtype == torch.bool:
            allowed = allowed & r.mask
        elif r.mask is not None:
            logits = logits + r.mask.double()
            allowed = allowed & (r.mask > -1e30)
        if r.causal:
            allowed = allowed.tril()
        self.allowed = allowed
        self.logits = logits.masked_fill(~allowed, -math.inf)
        self.columns = self.logits
        if r.sinks is not None:
            sink = r.sinks.double()[:, None, None].expand(r.batch, -1, r.queries, 1)
            self.columns = torch.cat([self.logits, sink], -1)
        everything = torch.softmax(self.columns, -1)
        self.everything = everything
        self.weights = everything[..., : r.keys]
        self.counts = allowed.sum(-1)
        self.column_counts = self.counts + (r.sinks is not None)
        real = torch.ones(r.batch, r.queries, dtype=torch.bool) if r.real_queries is None else r.real_queries
        self.real = (self.counts > 0) & real[:, None]
        self.entropy = -torch.special.xlogy(everything, everything).sum(-1)

    def mean(self, values, counted=None):
        counted = self.real if counted is None else counted
        return torch.stack([values[:, h][counted[:, h]].mean() for h in range(self.reading.heads)])

    def maps(self):
        """Yields per sample the flattened maps (H, T·N) of the queries that count."""
        for b in range(self.reading.batch):
            yield (self.weights[b] * self.real[b][..., None]).nan_to_num(0.0).flatten(1)


def attention_entropy(whole, previous):
    return whole.mean(whole.entropy)


def entropy_share(whole, previous):
    return whole.mean(whole.entropy / whole.column_counts.log(), whole.real & (whole.column_counts > 1))


def lowest_entropy(whole, previous):
    counted = whole.real & (whole.column_counts > 1)
    if not counted.any():
        return torch.full((whole.reading.heads,), math.nan)
    return whole.entropy.masked_fill(~counted, math.inf).amin((0, 2))


def max_logit(whole, previous):
    return whole.logits.masked_fill(~whole.real[..., None], -math.inf).amax((0, 2, 3))


def logit_bound(whole, previous):
    r = whole.reading
    bounds = torch.zeros(r.batch, r.heads, dtype=torch.float64)
    for b in range(r.batch):
        for h in range(r.heads):
            q = r.q[b, h].double().norm(dim=-1)[whole.real[b, h]].max()
            k = r.k[b, h * r.k.shape[1] // r.heads].double().norm(dim=-1)
            seen = whole.allowed[b, h][whole.real[b, h]].any(0)
            bounds[b, h] = q * k[seen].max() * r.scale
    return bounds.amax(0)


def sink_mass(whole, previous):
    heaviest = []
    for b in range(whole.reading.batch):
        heads = [whole.weights[b, h][whole.real[b, h]].mean(0).max() for h in range(whole.reading.heads)]
        heaviest.append(torch.stack(heads))
    return torch.stack(heaviest).mean(0)


def peaked_rows(whole, previous):
    peaked = (whole.weights.amax(-1) > 0.9).double()
    return whole.mean(peaked, whole.real & (whole.column_counts > 1))


def _cosines(here, there):
    return torch.stack(
        [
            torch.nn.functional.cosine_similarity(a[:, None], b[None], dim=-1, eps=0)
            for a, b in zip(here.maps(), there.maps())
        ]
    ).mean(0)


def head_redundancy(whole, previous):
    cosine = _cosines(whole, whole)
    heads = cosine.shape[0]
    return torch.stack([cosine[h][torch.arange(heads) != h].mean() for h in range(heads)])


def layer_redundancy(whole, previous):
    return _cosines(whole, previous).amax(-1)


def layer_redundancy_mean(whole, previous):
    return _cosines(whole, previous).mean(-1)


def _real_tokens(reading, tokens=None):
    for b in range(reading.batch):
        x = (reading.hidden if tokens is None else tokens)[b].double()
        yield x if reading.real_queries is None else x[reading.real_queries[b]]


def mean_cosine(sequences):
    means = []
    for x in sequences:
        cosine = torch.nn.functional.cosine_similarity(x[:, None], x[None], dim=-1)
        means.append(cosine[~torch.eye(len(x), dtype=torch.bool)].mean())
    return torch.stack(means).mean()[None]


def share_about_mean(sequences):
    return torch.stack([(x - x.mean(0)).norm() / x.norm() for x in sequences]).mean()[None]


def token_cosine(whole, previous):
    return mean_cosine(_real_tokens(whole.reading))


def high_frequency(whole, previous):
    return share_about_mean(_real_tokens(whole.reading))


def stream_cosine(whole, previous):
    return mean_cosine(_real_tokens(whole.reading, whole.reading.stream))


def stream_high_frequency(whole, previous):
    return share_about_mean(_real_tokens(whole.reading, whole.reading.stream))


def final_cosine(whole, previous):
    return mean_cosine(_real_tokens(whole.reading, whole.reading.final))


def final_high_frequency(whole, previous):
    return share_about_mean(_real_tokens(whole.reading, whole.reading.final))


def nonlocal_functional(whole, previous):
    square = (whole.v[:, :, :, None] - whole.v[:, :, None]).square().sum(-1)
    return whole.mean((whole.weights.nan_to_num(0.0) * square).sum(-1)).mean()[None]


def gradient_cosine(whole, previous):
    """The gradients themselves, by autograd: of J for a symmetric kernel, of half its terms with u_j held still for the
    other."""
    r = whole.reading
    k = r.k.double().repeat_interleave(r.heads // r.k.shape[1], 1)
    symmetric = Whole(dataclasses.replace(r, q=k)).everything[..., : r.keys].nan_to_num(0.0)
    gradients = []
    for kernel in (symmetric, whole.weights.nan_to_num(0.0)):
        u = whole.v.clone().requires_grad_()
        square = (u[:, :, :, None] - u.detach()[:, :, None]).square().sum(-1)
        (gradient,) = torch.autograd.grad((kernel * square).sum() / 2, u)
        gradients.append(gradient)
    cosine = torch.nn.functional.cosine_similarity(*gradients, dim=-1, eps=0)
    return whole.mean(cosine, whole.real & (whole.counts > 1))


def output_norm(whole, previous):
    return whole.mean(whole.reading.output.double().norm(dim=-1))


def attention_distance(whole, previous):
    tokens = torch.arange(whole.reading.keys)
    away = (tokens[:, None] - tokens).abs().double()
    return whole.mean((whole.weights * away).sum(-1) / whole.weights.sum(-1))


def later_keys(whole, previous):
    """One query after the other: which of the real keys behind it may it see?"""
    r = whole.reading
    # Keys that some real query of some head sees.
    real = (whole.allowed & whole.real[..., None]).any(2).any(1)
    means = []
    for h in range(r.heads):
        shares = [
            whole.allowed[b, h, i, i + 1 :][real[b, i + 1 :]].double().mean()
            for b in range(r.batch)
            for i in range(r.keys - 1)
            if whole.real[b, h, i] and real[b, i + 1 :].any()
        ]
        means.append(torch.stack(shares).mean())
    return torch.stack(means).amax()[None]


def _floor(size, keys):
    if keys < 2:
        return 0.0
    beta = math.exp(-size * math.sqrt(keys / (keys - 1)))
    whole = 1 + (keys - 1) * beta
    return math.log(whole) + size * math.sqrt(keys * (keys - 1)) * beta / whole


def entropy_floor_centred(whole, previous):
    rows = torch.zeros_like(whole.entropy)
    for index in whole.real.nonzero().tolist():
        b, h, i = index
        row = whole.columns[b, h, i]
        row = row[row > -math.inf]
        rows[b, h, i] = _floor(float((row - row.mean()).norm()), len(row))
    return whole.mean(rows)


def entropy_floor_spectral(whole, previous):
    r = whole.reading
    rows = torch.zeros_like(whole.entropy)
    for b, x in enumerate(_real_tokens(r)):
        norm = float(torch.linalg.matrix_norm(x @ x.T, 2))
        for h in range(r.heads):
            for i in range(r.queries):
                rows[b, h, i] = _floor(r.scale * float(r.product_norm[h]) * norm, int(whole.counts[b, h, i]))
    return whole.mean(rows)


def query_norm(whole, previous):
    return whole.mean(whole.reading.q.double().norm(dim=-1))


def _over_seen_keys(whole, tensor):
    r, means = whole.reading, []
    for h in range(r.heads):
        found = []
        for b in range(r.batch):
            # a key counts once, where any real query of this sample and head may look at it
            seen = (whole.allowed[b, h] & whole.real[b, h][:, None]).any(0)
            found.append(tensor[b, h * tensor.shape[1] // r.heads].double().norm(dim=-1)[seen])
        means.append(torch.cat(found).mean())
    return torch.stack(means)


def key_norm(whole, previous):
    return _over_seen_keys(whole, whole.reading.k)


def value_norm(whole, previous):
    return _over_seen_keys(whole, whole.reading.v)


def massive_activations(whole, previous):
    ratios = []
    for x in _real_tokens(whole.reading, whole.reading.stream):
        sizes = sorted(x.abs().flatten().tolist())
        ratios.append(sizes[-1] / sizes[(len(sizes) - 1) // 2])
    return torch.tensor([max(ratios)], dtype=torch.float64)


def log_sum_exp(whole, previous):
    return whole.mean(whole.columns.logsumexp(-1))


def largest_log_sum_exp(whole, previous):
    return whole.columns.logsumexp(-1).masked_fill(~whole.real, -math.inf).amax((0, 2))


def min_logit(whole, previous):
    lowest = whole.logits.masked_fill(~whole.allowed, math.inf).amin(-1)
    return lowest.masked_fill(~whole.real, math.inf).amin((0, 2))


def top_key_distance(whole, previous):
    return whole.mean((whole.logits.argmax(-1) - torch.arange(whole.reading.queries)).abs().double())


def top_key_share(whole, previous):
    """One sample and head after the other: how many queries have the commonest largest key?"""
    samples = []
    for b in range(whole.reading.batch):
        heads = []
        for h in range(whole.reading.heads):
            keys = whole.logits[b, h][whole.real[b, h]].argmax(-1).tolist()
            heads.append(max(map(keys.count, keys)) / len(keys))
        samples.append(torch.tensor(heads, dtype=torch.float64))
    return torch.stack(samples).mean(0)


def sink_weight(whole, previous):
    return whole.mean(whole.everything[..., -1])


def sink_closed(whole, previous):
    return whole.mean((whole.everything[..., -1] < 0.05).double())


def sink_open(whole, previous):
    return whole.mean((whole.everything[..., -1] > 0.95).double())


def _of_gates(whole, values):
    """Averages over the channels and queries of each head, gathered in one list."""
    real = whole.real.expand(-1, whole.reading.heads, -1)
    return torch.stack([values[:, h][real[:, h]].double().mean() for h in range(whole.reading.heads)])


def gate_mean(whole, previous):
    return _of_gates(whole, whole.reading.gate)


def gate_closed(whole, previous):
    return _of_gates(whole, whole.reading.gate < 0.05)


def gate_open(whole, previous):
    return _of_gates(whole, whole.reading.gate > 0.95)


def _writes(whole, written):
    streams = torch.cat(list(_real_tokens(whole.reading, whole.reading.stream)))
    return (torch.cat(list(_real_tokens(whole.reading, written))).norm(dim=-1) / streams.norm(dim=-1)).mean()[None]


def attention_write(whole, previous):
    return _writes(whole, whole.reading.attention_write)


def mlp_write(whole, previous):
    return _writes(whole, whole.reading.mlp_write)
