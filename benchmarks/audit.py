"""Time the weight statistics of a GPT-2-small-sized model, and the same spectra from the full products.

    python benchmarks/audit.py [--threads 2] [--products 12]

Bars: all weight statistics of 12 x 12 heads of width 768 in at most 5 s on two cores, and their spectra at least 20
times faster than singular values of the full 768 x 768 products.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

from headwise import Site, audit
from headwise.health.auditing.weights import threads, threads_for
from headwise.health.statistics.weights import read_weights, weight_reading

LAYERS, HEADS, WIDTH = 12, 12, 768


def layers() -> list[Site]:
    """Return the attention layers, with weights drawn as in GPT-2."""
    torch.manual_seed(0)
    sites = []
    for depth in range(LAYERS):
        module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
        sites.append(Site(f"layers.{depth}.attn", module, depth=depth))
    return sites


def seconds(run: Callable[[], object], times: int = 3) -> float:
    """Return the median time of a run."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def statistics_of(sites: list[Site]) -> list[dict[str, torch.Tensor]]:
    """Return every weight statistic of every layer."""
    found = []
    for site in sites:
        reading = weight_reading(site)
        with threads(threads_for(reading, torch.get_num_threads())):
            found.append(read_weights(reading))
    return found


def full_spectra(sites: list[Site], count: int) -> torch.Tensor:
    """Return singular values of the first `count` full products."""
    found = []
    for site in sites:
        for product in weight_reading(site).products.values():
            for head in range(HEADS):
                if len(found) == count:
                    return torch.stack(found)
                found.append(torch.linalg.svdvals(product.own[head].T @ product.shared[head]))
    return torch.stack(found)


def factor_spectra(sites: list[Site]) -> list[torch.Tensor]:
    """Return singular values of all products from their factors."""
    found = []
    for site in sites:
        reading = weight_reading(site)
        with threads(threads_for(reading, torch.get_num_threads())):
            found += [product.spectrum for product in reading.products.values()]
    return found


def whole_audit(folder: str) -> None:
    """Audit a folder with GPT-2's own config, whose fused layout is verified first."""
    audit(folder)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--products", type=int, default=12, help="full products to time; their time is scaled to all")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    sites, total = layers(), 2 * LAYERS * HEADS
    every = seconds(lambda: statistics_of(sites))
    start = time.process_time()
    statistics_of(sites)
    processor = time.process_time() - start
    factors = seconds(lambda: factor_spectra(sites))
    full = seconds(lambda: full_spectra(sites, chosen.products), 1) * total / chosen.products
    error = (factor_spectra(sites)[0][:2] - full_spectra(sites, 2)[:, : WIDTH // HEADS]).abs().max()
    rows = [
        ("all weight statistics", f"{every:.2f} s", "at most 5 s", every <= 5),
        ("  processor time of it", f"{processor:.2f} s", "", None),
        ("spectra from QR factors", f"{factors:.2f} s", "", None),
        (f"spectra of full products ({chosen.products} timed, scaled)", f"{full:.1f} s", "", None),
        ("full / factors", f"{full / factors:.0f} x", "at least 20 x", full / factors >= 20),
        ("largest difference of singular values", f"{float(error):.1e}", "", None),
    ]
    rows.append(("audit of a GPT-2 folder, disk to result", f"{_audit_of_folder():.2f} s", "", None))
    print(f"{LAYERS} x {HEADS} heads of width {WIDTH}, {chosen.threads} threads, torch {torch.__version__}")
    for name, value, bar, met in rows:
        print(f"{name:48} {value:>10}  {bar:16}{'' if met is None else 'met' if met else 'MISSED'}")


def _audit_of_folder() -> float:
    from transformers import GPT2Config, GPT2LMHeadModel

    with tempfile.TemporaryDirectory() as folder:
        GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
        return seconds(lambda: whole_audit(folder), 1)


if __name__ == "__main__":
    main()
