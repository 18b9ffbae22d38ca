"""The share of the later keys that queries may see, which a causal mask keeps at 0."""

import torch
from torch import Tensor

from headwise.health.statistics.statistic import RowFigures, SiteFacts, Statistic, Tally

# Elements of a mask that are read at once.
BLOCK = 1 << 22


class LaterKeys(Statistic):
    """Averages (visible keys j > i) / (real keys j > i) over real queries i, and takes the largest mean of a head.

    A real key is one that some real query may see, so that padding changes no share.

    0 under a causal mask (Vaswani et al. 2017, arXiv 1706.03762), 1 without any mask. It is read from the mask of the
    call alone: a layer that shifts its tokens, or a target that leaks in by the batch, is not seen.
    """

    name = "later_keys"
    unit = "share of later keys"
    reduction = "mean over real queries with a later key, then maximum over heads"
    per = "layer"

    def applies(self, facts: SiteFacts) -> str | None:
        if facts.windowed:
            return "the tokens of a window have no order in time"
        return None if facts.self_attention else "queries and keys are different tokens, and none is later"

    def tally(self, rows: RowFigures) -> Tally:
        reading = rows.reading
        if reading.mask is None:
            # No element of a mask is read, as none is there.
            counted = torch.full(
                (reading.heads,), float(reading.queries > 1), device=reading.q.device, dtype=torch.float32
            )
            return Tally(counted * float(not reading.causal), counted, None, False)
        real = (~reading.keys_unseen[0]).any(1).long()
        # Of each query, the real keys after it.
        later = real.flip(-1).cumsum(-1).flip(-1) - real
        at_hand = later.gather(1, rows.queries.positions.expand(reading.batch, -1))
        return rows.queries.mean(_seen(rows) / at_hand.clamp_min(1)[:, None], among=later)

    def finish(self, tally: Tally) -> Tensor:
        return tally.value().amax(-1, keepdim=True)


def _seen(rows: RowFigures) -> Tensor:
    """Return how many later keys each read query may see, (B,H,R), reading the mask in blocks of rows."""
    reading, positions = rows.reading, rows.queries.positions
    mask = reading.mask
    assert mask is not None
    size = max(1, BLOCK // max(1, mask.shape[0] * mask.shape[1] * reading.keys))
    keys = torch.arange(reading.keys, device=reading.q.device)
    parts = []
    for start in range(0, positions.shape[1], size):
        block = positions[:, start : start + size]
        consecutive = None if rows.queries.sampled else slice(start, start + size)
        allowed = reading.allowed(slice(None), block, consecutive)
        assert allowed is not None
        parts.append((allowed & (keys > block[:, None, :, None])).sum(-1))
    return torch.cat(parts, -1).expand(reading.batch, reading.heads, -1)
