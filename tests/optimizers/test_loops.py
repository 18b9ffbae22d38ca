"""The optimizers by head in the loops of others: transformers' Trainer, Lightning, Accelerate, FSDP2, and a watch."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from processes import in_two_processes
from small_models import HOSTS, Own, fresh

import headwise

ATTACHED = ("Hyperball", "Stiefel", "CautiousDecay", "AlphaDecay")


def made(model, kind="Muon", rate=0.01):
    """Return an optimizer of a model: Muon by head, or another kind attached to it."""
    decay = 0.0 if kind in ("Hyperball", "Stiefel") else 0.1
    groups = headwise.parameter_groups(model, lr=rate, weight_decay=decay)
    optimizer = headwise.Muon(groups, per="head")
    if kind == "CautiousDecay":
        headwise.CautiousDecay(optimizer)
    elif kind in ATTACHED:
        settings = {"every": 2, "least": 4} if kind == "AlphaDecay" else {}
        getattr(headwise, kind)(optimizer, groups, **settings)
    return optimizer


def own():
    torch.manual_seed(0)
    return Own()


def batch(seed):
    return torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(seed))


def plain_steps(model, optimizer, count, after=lambda: None):
    for seed in range(count):
        optimizer.zero_grad()
        model(batch(seed)).square().mean().backward()
        optimizer.step()
        after()


def alike(model, other):
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", ["Muon", *ATTACHED])
def test_accelerate_takes_the_same_steps(kind):
    from accelerate import Accelerator

    model, twin = own(), own()
    plain_steps(twin, made(twin, kind), 3)
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, made(model, kind))
    for seed in range(3):
        optimizer.zero_grad()
        accelerator.backward(prepared(batch(seed)).square().mean())
        optimizer.step()
    alike(model, twin)


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, at):
        ids = torch.randint(1, 50, (8,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("kind", ["Muon", "Hyperball"])
def test_the_trainer_trains_saves_and_resumes(kind, tmp_path):
    from transformers import Trainer, TrainingArguments

    def trained(folder, steps, resume=None):
        model = fresh(HOSTS["llama"])
        optimizer = made(model, kind)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=2, save_steps=2, use_cpu=True,
            report_to=[], disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Sequences(), optimizers=(optimizer, schedule))
        trainer.train(resume_from_checkpoint=resume)
        return model

    whole = trained(tmp_path / "a", 4)
    trained(tmp_path / "b", 2)
    resumed = trained(tmp_path / "b", 4, resume=str(tmp_path / "b" / "checkpoint-2"))
    alike(whole, resumed)


@pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*LeafSpec:FutureWarning", "ignore:.*treespec:FutureWarning")
@pytest.mark.parametrize("kind", ["Muon", "CautiousDecay"])
def test_lightning_takes_the_same_steps(kind, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = own()

        def training_step(self, x, at):
            return self.net(x).square().mean()

        def configure_optimizers(self):
            return made(self.net, kind)

    module, twin = Module(), own()
    plain_steps(twin, made(twin, kind), 3)
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader([batch(seed) for seed in range(3)], batch_size=None)
    trainer.fit(module, loader)
    alike(module.net, twin)


def test_a_watch_and_a_method_beside_it_change_no_step():
    host = HOSTS["own"]
    model = fresh(host)
    twin = copy.deepcopy(model)
    watched = headwise.watch(model, every=1, on_alert=None)
    plain_steps(model, made(model), 3, watched.step)
    plain_steps(twin, made(twin), 3)
    watched.remove()
    alike(model, twin)
    handle = headwise.regularize(twin, headwise.DropHead(p=0.1))
    # no forgotten call is told: one is made after each step
    plain_steps(twin, made(twin), 3, handle.after_step)


def steps_of(name, model, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        HOSTS[name].run(model).square().mean().backward()
        optimizer.step()


def sharded(rank, port, kinds, expected):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name in ("llama", "own"):
        for kind in kinds:
            model = fresh(HOSTS[name])
            if name == "llama":
                fully_shard(model, mesh=mesh)
                optimizer = made(model, kind)
            else:
                # as Accelerate does: the groups get the shards of their parameters
                names = {id(p): own for own, p in model.named_parameters()}
                optimizer = made(model, kind)
                fully_shard(model, mesh=mesh)
                for group in optimizer.param_groups:
                    group["params"] = [model.get_parameter(names[id(p)]) for p in group["params"]]
            steps_of(name, model, optimizer)
            for (place, ours), theirs in zip(model.named_parameters(), expected[name, kind], strict=True):
                # keys' biases have no gradient but rounding, which AdamW makes as large as any
                if not place.endswith("qkv.bias"):
                    torch.testing.assert_close(ours.full_tensor(), theirs)
    model = own()
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="Here the weights are sharded and stored in one: build the optimizer before"):
        made(model)
    torch.distributed.destroy_process_group()


def test_shards_of_fsdp2_take_the_steps_of_one_process():
    kinds = ["Muon", *ATTACHED]
    expected = {}
    for name in ("llama", "own"):
        for kind in kinds:
            model = fresh(HOSTS[name])
            steps_of(name, model, made(model, kind))
            expected[name, kind] = [p.detach() for p in model.parameters()]
    in_two_processes(sharded, kinds, expected)


def test_weights_that_only_a_forward_gathers_are_refused_by_name():
    model = own()
    model.blocks[0].attn.qkv.weight.ds_id = 1
    with pytest.raises(ValueError, match=r"partitioned by DeepSpeed ZeRO-3"):
        made(model)
