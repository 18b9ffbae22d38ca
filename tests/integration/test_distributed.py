"""DDP and FSDP2 on two gloo processes against one process with the joined batch."""

import os
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
from grids import part_of_grid, requested
from processes import in_two_processes
from small_models import HOSTS, fresh

import headwise
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY

NAMES = list(shelf.__all__)
EXACT = [name for name in NAMES if not REGISTRY[name].random]
KEPT = ("Decorrelation", "EntropyPenalty", "GatedOutput", "NeuTRENO", "QKClip", "QKNorm", "SigmaReparam", "ZLoss")
# With settings at which they draw, at the strength that shows it.
DRAWING = [repr(REGISTRY[name](**REGISTRY[name].strong)) for name in NAMES if REGISTRY[name].random]
DRAWING += ["RelaxedAttention(gamma=0.5, fuzziness=0.3)", "Decorrelation(strength=10.0, probes=3)"]
# of each kind of draw one: of columns, in a row, of a penalty
KEPT_DRAWING = (repr(REGISTRY["DropColumn"](**REGISTRY["DropColumn"].strong)), *DRAWING[-2:])
# A batch norm reads the batch of its own process, as torch's does under DDP: two halves are not the whole.
OF_NO_BATCH = {"ReAttention": {"norm": "none"}}


def batch(padded):
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(1, 50, (4, 9), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        # Unequal shards: the first half is almost whole, the second mostly padding.
        mask[0, 8:], mask[2, 3:], mask[3, 2:] = 0, 0, 0
    return ids, mask


def step_gradients(name, rank, world, padded, steps=2):
    model = fresh(HOSTS["bert-padded"])
    cls = REGISTRY[name]
    # A strength of 1000 would only scale the rounding of the penalty with it.
    method = cls(**OF_NO_BATCH.get(name, {} if cls.penalizes else cls.strong))
    handle = headwise.regularize(model, method, example={"input_ids": torch.ones(1, 4, dtype=torch.long)})
    wrapped = model
    if world > 1:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    ids, mask = batch(padded)
    size = len(ids) // world
    ids, mask = ids[rank * size : (rank + 1) * size], mask[rank * size : (rank + 1) * size]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    grads, losses = {}, []
    for _ in range(steps):
        optimizer.zero_grad()
        out = wrapped(input_ids=ids, attention_mask=mask).logits
        # A mean of shard means is the joined batch's: padded tokens count in `out`, and the shards are of one size.
        loss = out.mean() + handle.loss()
        loss.backward()
        losses.append(loss.detach())
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        handle.after_step()
    return grads, {n: p.detach().clone() for n, p in model.named_parameters()}, torch.stack(losses)


def own_step(text, wrap=lambda model: model):
    """Return the loss and the gradients of one step on the same batch in every process."""
    model = fresh(HOSTS["bert-padded"])
    handle = headwise.regularize(
        model, *headwise.parse(text), example={"input_ids": torch.ones(1, 4, dtype=torch.long)}
    )
    ids, mask = batch(padded=True)
    # DDP's hooks hold the wrapper weakly.
    wrapped = wrap(model)
    out = wrapped(input_ids=ids, attention_mask=mask).logits
    loss = out.square().mean() + handle.loss()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _draws(rank, folder, texts):
    for i, text in enumerate(texts):
        loss, grads = own_step(text)
        for grad in grads.values():
            torch.distributed.all_reduce(grad)
        wrapped = own_step(
            text, lambda model: torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        )
        torch.save((loss, {key: grad / 2 for key, grad in grads.items()}, *wrapped), folder / f"draws {i} {rank}.pt")


def _ddp(rank, port, folder, jobs, texts):
    _start(rank, port)
    _draws(rank, folder, texts)
    for i, (name, padded) in enumerate(jobs):
        try:
            found = step_gradients(name, rank, 2, padded)
            torch.save(found, folder / f"{i}.{rank}.pt")
        except Exception:
            (folder / f"{i}.{rank}.error").write_text(traceback.format_exc())
            raise
    torch.distributed.destroy_process_group()


def _start(rank, port):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)


@pytest.fixture(scope="module")
def ddp(request):
    folder = Path(tempfile.mkdtemp())
    jobs = requested(request, "name", "padded")
    texts = [text for (text,) in requested(request, "text")]
    in_two_processes(_ddp, folder, jobs, texts)
    found = {
        job: [torch.load(folder / f"{i}.{rank}.pt", weights_only=True) for rank in range(2)]
        for i, job in enumerate(jobs)
    }
    for i, text in enumerate(texts):
        found[text] = [torch.load(folder / f"draws {i} {rank}.pt", weights_only=True) for rank in range(2)]
    return found


# without padding one method: shards of unequal weight are the harder case
@pytest.mark.parametrize(
    ("name", "padded"),
    part_of_grid(
        [(name, padded) for name in EXACT for padded in (False, True)],
        [("Decorrelation", False), *((name, True) for name in KEPT)],
    ),
)
def test_two_processes_equal_one_with_the_joined_batch(ddp, name, padded):
    grads, parameters, losses = step_gradients(name, 0, 1, padded)
    (got_grads, got_parameters, first_losses), (_, _, second_losses) = ddp[name, padded]
    torch.testing.assert_close((first_losses + second_losses) / 2, losses, rtol=1e-5, atol=1e-6)
    for key, value in grads.items():
        scale = max(1.0, float(value.abs().max()))
        assert (got_grads[key] - value).abs().max() <= 1e-6 * scale, key
    for key, value in parameters.items():
        assert (got_parameters[key] - value).abs().max() <= 1e-6 * max(1.0, float(value.abs().max())), key


@pytest.mark.parametrize("text", part_of_grid(DRAWING, KEPT_DRAWING))
def test_processes_draw_apart_and_average_what_each_drew(ddp, text):
    (loss, grads, wrapped_loss, wrapped), (other_loss, _, _, other_wrapped) = ddp[text]
    assert abs(float(loss - other_loss)) > 1e-4 * abs(float(loss)), "both processes drew the same"
    # The first process draws what a single one draws: a run is no other for being the first of two.
    alone, _ = own_step(text)
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(wrapped_loss, loss, rtol=1e-5, atol=1e-6)
    assert wrapped.keys() == grads.keys() == other_wrapped.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(wrapped[key], grad, rtol=1e-4, atol=1e-6, msg=key)
        assert torch.equal(wrapped[key], other_wrapped[key]), key


# Every method trains sharded. One that is to be refused stands here, and its refusal must name it and FSDP.
REFUSED_BY_FSDP2: set[str] = set()


def settings(cls):
    # Here both processes hold the same batch; the norm over both copies is not that of one.
    return {**cls.strong, "per_map": True} if cls.__name__ == "AttentionNormPenalty" else cls.strong


def _fsdp(rank, port, folder, names):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _start(rank, port)
    mesh = init_device_mesh("cpu", (2,))
    for name in names:
        result = {}
        try:
            model = fresh(HOSTS["own"])
            cls = REGISTRY[name]
            handle = headwise.regularize(model, cls(**settings(cls)), example=HOSTS["own"].example())
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            losses, norms = _train(model, handle)
            result = {"losses": losses, "norms": norms}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        if rank == 0:
            torch.save(result, folder / f"{name}.pt")
    torch.distributed.destroy_process_group()


def _train(model, handle, steps=3):
    """Every process sees the whole batch, so that the mean over processes is the one-process gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = HOSTS["own"].run(model).square().mean() + handle.loss()
        loss.backward()
        norms.append(float(sum(_full(p.grad).square().sum() for p in model.parameters() if p.grad is not None).sqrt()))
        optimizer.step()
        handle.after_step()
        losses.append(float(loss.detach()))
    return losses, norms


def _full(grad):
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


@pytest.fixture(scope="module")
def fsdp(request):
    folder = Path(tempfile.mkdtemp())
    names = [name for (name,) in requested(request, "name")]
    in_two_processes(_fsdp, folder, names)
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in names}


@pytest.mark.parametrize("name", part_of_grid(NAMES, (*KEPT, "DropHead")))
def test_sharded_training_gives_the_loss_of_one_process_or_is_refused_by_name(fsdp, name):
    result = fsdp[name]
    if name in REFUSED_BY_FSDP2:
        assert name in result["error"] and "FSDP" in result["error"], result
        return
    assert "error" not in result, result["error"]
    cls = REGISTRY[name]
    model = fresh(HOSTS["own"])
    handle = headwise.regularize(model, cls(**settings(cls)), example=HOSTS["own"].example())
    losses, norms = _train(model, handle)
    if cls.random:
        assert all(torch.isfinite(torch.tensor(result["losses"])))
    else:
        assert result["losses"] == pytest.approx(losses, rel=1e-4)
        assert result["norms"] == pytest.approx(norms, rel=1e-3)


def _uneven(rank, port, folder):
    _start(rank, port)
    ids = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(rank))
    for name in ("EntropyPenalty", "Decorrelation", "QKClip"):
        model = fresh(HOSTS["bert-padded"])
        handle = headwise.regularize(model, REGISTRY[name]())
        watch = headwise.watch(model, every=1, on_alert=None)
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        optimizer, penalties, refused = torch.optim.SGD(model.parameters(), lr=1e-3), [], ""
        try:
            with wrapped.join():
                for _ in range(1 + 2 * rank):
                    out = wrapped(input_ids=ids).logits
                    penalties.append(handle.loss())
                    optimizer.zero_grad()
                    (out.square().mean() + penalties[-1]).backward()
                    optimizer.step()
                    handle.after_step()
                    watch.step(out.detach().mean())
        except RuntimeError as error:
            refused = str(error)
        alone = fresh(HOSTS["bert-padded"])
        own = headwise.regularize(alone, REGISTRY[name]())
        alone(input_ids=ids)
        steps = len({one["step"] for one in watch.records() if one["head"] is not None})
        found = {"penalties": [float(x) for x in penalties], "alone": float(_mean(own))}
        torch.save({**found, "steps": steps, "refused": refused}, folder / f"{name} {rank}.pt")
    # The refused forward left an exchange of join() that nobody waits for. gloo's threads would still hold its tensor
    # when the group goes, wait for Python's lock to let go of it, and be waited for by who holds the lock.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _mean(handle):
    handle.shared.uneven = True
    return handle.loss()


def test_processes_with_fewer_batches_are_not_waited_for_in_join(tmp_path):
    in_two_processes(_uneven, tmp_path)
    for rank in range(2):
        for name in ("EntropyPenalty", "Decorrelation"):
            found = torch.load(tmp_path / f"{name} {rank}.pt")
            assert len(found["penalties"]) == found["steps"] == 1 + 2 * rank and not found["refused"]
            assert found["penalties"][0] == pytest.approx(found["alone"], rel=1e-5) and found["alone"] != 0
        refused = torch.load(tmp_path / f"QKClip {rank}.pt")["refused"]
        assert "QKClip(threshold=100.0) needs numbers of all processes" in refused and "drop_last=True" in refused
