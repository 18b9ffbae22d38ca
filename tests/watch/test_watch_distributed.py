"""Watching a model that is trained in two processes."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import in_two_processes
from small_models import Own

import headwise

VECTORS = torch.randn(8, 9, 32, generator=torch.Generator().manual_seed(1))


def wrapped(kind, model):
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(kind, rank, ranks, watching):
    torch.manual_seed(0)
    model = Own().train()
    # Fused projections are told apart by running a layer alone, which a sharded one cannot.
    watch = headwise.watch(model, every=2, on_alert=None) if watching and kind == "fsdp2" else None
    model = wrapped(kind, model)
    part = VECTORS.chunk(ranks)[rank]
    if watching and kind == "ddp":
        watch = headwise.watch(model, every=2, on_alert=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gathered = [], []
    gather = dist.all_gather_into_tensor

    def counting(*args, **kwargs):
        gathered.append(watch.steps)
        return gather(*args, **kwargs)

    for _ in range(4):
        loss = model(part).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if watching:
            dist.all_gather_into_tensor = counting
            watch.step()
            dist.all_gather_into_tensor = gather
    return losses, gathered, watch.records() if watching else [], watch and watch.reasons()


def both_kinds(rank, port, folder):
    ranks = 2
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    result = {}
    for kind in ("ddp", "fsdp2"):
        plain, *_ = train(kind, rank, ranks, False)
        losses, gathered, records, _ = train(kind, rank, ranks, True)
        result[kind] = {"plain": plain, "losses": losses, "gathered": gathered, "records": records}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    in_two_processes(both_kinds, folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def whole():
    torch.manual_seed(0)
    model = Own().train()
    watch = headwise.watch(model, every=2, on_alert=None)
    model(VECTORS)
    watch.step()
    watch.remove()
    return watch.records()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_ranks_together_read_what_one_process_reads_of_the_whole_batch(ranks, whole, kind):
    for rank in ranks:
        first = [r for r in rank[kind]["records"] if r["step"] == 0]
        found = {(r["site"], r["head"], r["statistic"]): r["value"] for r in first}
        expected = {(r["site"], r["head"], r["statistic"]): r["value"] for r in whole}
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert ranks[0][kind]["records"] == ranks[1][kind]["records"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_reading_is_one_collective_and_changes_no_bit(ranks, kind):
    for rank in ranks:
        assert rank[kind]["gathered"] == [0, 2]
        assert rank[kind]["losses"] == rank[kind]["plain"]
