"""One rank of a distributed training that is watched; run as a script with the rank, the number of ranks and a
folder."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
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


def main(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    result = {}
    for kind in ("ddp", "fsdp2"):
        plain, *_ = train(kind, rank, ranks, False)
        losses, gathered, records, _ = train(kind, rank, ranks, True)
        result[kind] = {"plain": plain, "losses": losses, "gathered": gathered, "records": records}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
