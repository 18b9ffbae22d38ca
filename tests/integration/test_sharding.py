"""FSDP1, tensor and context parallelism, ZeRO-3: what cannot be right there is refused by name, alike on every
process."""

import os
from pathlib import Path

import pytest
import torch
from processes import in_two_processes
from small_models import HOSTS, PlainBlock, fresh

import headwise
from headwise import DropHead, EntropyPenalty, NuclearDecay, ProductDecay, QKClip, SigmaReparam

ON_WEIGHTS = [QKClip(threshold=0.01), ProductDecay(), NuclearDecay(), SigmaReparam()]
NAMES = [type(method).__name__ for method in ON_WEIGHTS]
# two processes that import everything take most of the time; test_distributed.py has the case of FSDP2
pytestmark = pytest.mark.grid


def _start(rank, port):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)


def attempt(do):
    try:
        do()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


def step(model, run, handle):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    (run(model).square().mean() + handle.loss()).backward()
    optimizer.step()
    handle.after_step()


def wrapped(model, orig):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({PlainBlock})
    return FullyShardedDataParallel(model, use_orig_params=orig, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def fsdp1(found):
    host = HOSTS["own"]
    for method in [*ON_WEIGHTS, DropHead(p=0.0), EntropyPenalty()]:
        for orig in (True, False):
            name = type(method).__name__
            model = fresh(host)
            handle = headwise.regularize(model, method)
            outer = wrapped(model, orig)
            found["fsdp1", "after", name, orig] = attempt(lambda m=outer, h=handle: step(m, host.run, h))
            outer = wrapped(fresh(host), orig)
            found["fsdp1", "before", name, orig] = attempt(
                lambda m=outer, one=method: headwise.regularize(m, one, example=host.example())
            )


def split(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {}
    for i in range(2):
        plan |= {f"model.layers.{i}.self_attn.{kind}_proj": ColwiseParallel() for kind in "qkv"}
        plan[f"model.layers.{i}.self_attn.o_proj"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def tensor_parallel(found, mesh):
    host = HOSTS["llama"]
    for method in [*ON_WEIGHTS[:3], DropHead(p=0.5)]:
        name = type(method).__name__
        model = fresh(host)
        handle = headwise.regularize(model, method)
        split(model, mesh)
        found["tp", "after", name] = attempt(lambda m=model, h=handle: step(m, host.run, h))
    for method in [*ON_WEIGHTS, DropHead(p=0.5)]:
        model = split(fresh(host), mesh)
        for example in (None, host.example()):
            found["tp", "before", type(method).__name__, example is None] = attempt(
                lambda m=model, one=method, e=example: headwise.regularize(m, one, example=e)
            )


def context_parallel(found, mesh):
    from torch.distributed.tensor.experimental import context_parallel

    for name in ("own", "llama"):
        for method in (DropHead(p=0.5), QKClip(threshold=0.01)):
            model = fresh(HOSTS[name])
            handle = headwise.regularize(model, method)
            with context_parallel(mesh, buffers=[torch.zeros(2, 8)], buffer_seq_dims=[1]):
                found["cp", name, type(method).__name__] = attempt(lambda m=model, n=name: HOSTS[n].run(m))
            # Outside of it the model goes on.
            found["cp", name, type(method).__name__, "outside"] = attempt(
                lambda m=model, n=name, h=handle: step(m, HOSTS[n].run, h)
            )


def _work(rank, port, folder):
    from torch.distributed.device_mesh import init_device_mesh

    _start(rank, port)
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    fsdp1(found)
    tensor_parallel(found, mesh)
    context_parallel(found, mesh)
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = Path(tmp_path_factory.mktemp("sharding"))
    in_two_processes(_work, folder)
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2))
    # A refusal on one process alone would leave the other waiting.
    assert first == second
    return first


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_fsdp1_is_refused_by_name_by_methods_on_weights(found, name, orig):
    for when in ("after", "before"):
        told = found["fsdp1", when, name, orig]
        assert name in told, told
        assert "sharded by FSDP1" in told, told
        assert "FSDP2" in told, told


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("name", ["DropHead", "EntropyPenalty"])
def test_methods_on_calls_go_on_under_fsdp1(found, name, orig):
    assert found["fsdp1", "after", name, orig] == "went through"


@pytest.mark.parametrize("name", [*NAMES[:3], "DropHead"])
def test_heads_that_are_split_after_regularize_are_told_in_the_first_call(found, name):
    told = found["tp", "after", name]
    assert "model.layers.0.self_attn is called with 2 of its 4 heads" in told
    assert "tensor parallelism" in told
    assert "example=" not in told


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("name", [*NAMES, "DropHead"])
def test_tensor_parallelism_is_refused_before_anything_changes(found, name, bare):
    told = found["tp", "before", name, bare]
    assert "model.layers.0.self_attn" in told
    assert "its heads are split over processes (tensor parallelism)" in told
    assert "FSDP2" in told
    assert "example=" not in told


@pytest.mark.parametrize("name", ["DropHead", "QKClip"])
@pytest.mark.parametrize("host", ["own", "llama"])
def test_context_parallelism_is_refused_in_the_call(found, host, name):
    told = found["cp", host, name]
    assert "cannot be reached by " + name in told
    assert "context parallelism" in told
    assert found["cp", host, name, "outside"] == "went through"


@pytest.mark.parametrize("method", ON_WEIGHTS, ids=NAMES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_zero_3_is_seen_by_what_it_writes_on_parameters(method, when):
    model = fresh(HOSTS["own"])
    handle = headwise.regularize(model, method) if when == "after" else None
    for index, parameter in enumerate(model.parameters()):
        # As deepspeed.zero marks and empties a partitioned parameter.
        parameter.ds_id, parameter.ds_shape = index, parameter.shape
    if handle is None:
        with pytest.raises(ValueError, match="partitioned by DeepSpeed ZeRO-3"):
            headwise.regularize(model, method)
    else:
        HOSTS["own"].run(model)
        with pytest.raises(RuntimeError, match=rf"{type(method).__name__}.*partitioned by DeepSpeed ZeRO-3"):
            handle.after_step()
