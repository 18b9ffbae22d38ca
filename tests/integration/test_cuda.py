"""What only a CUDA device shows: the same draws and figures, both forms in bf16, compiled graphs, flex, a study."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from small_models import HOSTS, fresh

import headwise
from headwise.attend import methods as shelf
from headwise.attend.attention.largest_logits import largest_logits
from headwise.attend.attention.overlap import head_overlap
from headwise.attend.attention.second_derivatives import overlap_by_matrix
from headwise.attend.core.method import REGISTRY
from headwise.attend.core.random_draws import normal, uniform
from headwise.health.statistics import Queries, Reading, RowFigures, read
from headwise.health.statistics.figures_by_kernels import FIGURES, by_kernels
from headwise.testing.calls import attend_with

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NAMES = list(shelf.__all__)
# methods that have no meaning under a causal mask
NOT_CAUSAL = ("FeatScale", "LSA")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("host", ["own", "llama"])
def test_every_method_trains_on_the_device(name, host):
    if host == "llama" and name in NOT_CAUSAL:
        pytest.skip("has no meaning under a causal mask")
    model = fresh(HOSTS[host]).cuda()
    args, kwargs = HOSTS[host].batch()
    args, kwargs = [a.cuda() for a in args], {k: v.cuda() for k, v in kwargs.items()}
    cls = REGISTRY[name]
    handle = headwise.regularize(model, cls(**cls.strong), example=kwargs or tuple(args))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        out = model(*args, **kwargs)
        out = out if isinstance(out, torch.Tensor) else out[0]
        (out.square().mean() + handle.loss()).backward()
        optimizer.step()
        handle.after_step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_draws_are_those_of_the_cpu():
    q, k, v = (torch.randn(2, 4, 16, 32) for _ in range(3))
    method = headwise.DropHead(p=0.5)
    cpu, _ = attend_with([method], q, k, v)
    gpu, _ = attend_with([method], q.cuda(), k.cuda(), v.cuda())
    torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("draw", [uniform, normal])
@pytest.mark.parametrize("shape", [(7,), (2, 4, 33, 65)])
def test_compiled_draws_are_the_eager_ones_and_those_of_the_cpu(shape, draw):
    def drawn(key):
        return draw(key, 0x9ABCDEF0, shape, key.device)

    key = torch.tensor(0x12345678)
    eager = drawn(key.cuda())
    # the hash is exact, the logarithm and the cosine of a normal number are not
    tolerance = {"rtol": 0, "atol": 0 if draw is uniform else 1e-5}
    torch.testing.assert_close(torch.compile(drawn, fullgraph=True)(key.cuda()), eager, **tolerance)
    torch.testing.assert_close(eager.cpu(), drawn(key), **tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_agree_in_bf16(name):
    cls = REGISTRY[name]
    if not cls.matrix_free() or cls.overrides("build"):
        pytest.skip("has one form, or reads the weights of a layer, which this call has not")
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

    def result(form, *tensors):
        q, k, v, first = tensors
        out, penalty = attend_with([cls(**cls.strong)], q, k, v, form=form, first_values=first)
        return out.double(), penalty.double()

    fast, textbook = result("fast", *tensors), result("textbook", *tensors)
    exact = result("textbook", *(tensor.double() for tensor in tensors))
    for ours, theirs, right in zip(fast, textbook, exact, strict=True):
        # as near to fp64 as the textbook's form, to a factor and a rounding to bf16
        assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + 2**-8 * right.abs().max()


# inductor recommends TF32
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_a_compiled_step_on_the_device():
    model = fresh(HOSTS["own"]).cuda()
    headwise.regularize(model, headwise.DropHead(p=0.3), headwise.NeuTRENO(), headwise.RelaxedAttention())
    compiled = torch.compile(model, fullgraph=True)
    compiled(HOSTS["own"].batch()[0][0].cuda()).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


def _steps(name, captured):
    """Return the losses of three training steps after three others, and the counts of passes.

    With `captured` they are replays of a step that was captured by hand.
    """
    host, cls = HOSTS["own"], REGISTRY[name]
    model, x = fresh(host).cuda(), host.batch()[0][0].cuda()
    method = cls(**cls.strong)
    handle = headwise.regularize(model, method, example=(x,))
    # where weights stay, only the draws can make a step differ from the one before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if method.draws() else 0.01)

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean() + handle.loss()
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            handle.after_step()
    torch.cuda.current_stream().wait_stream(side)
    run = step
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()

        def run():
            graph.replay()
            return loss

    losses = []
    for _ in range(3):
        losses.append(run().clone())
        handle.after_step()
    return torch.stack(losses), handle.state()["counters"]


@pytest.mark.parametrize("name", NAMES)
def test_replays_of_a_step_captured_by_hand_are_the_steps_of_the_eager_loop(name):
    (eager, counts), (replayed, replays) = _steps(name, False), _steps(name, True)
    torch.testing.assert_close(replayed, eager, rtol=1e-4, atol=1e-5)
    assert replays == counts
    if REGISTRY[name](**REGISTRY[name].strong).draws():
        assert len(replayed.unique()) == 3


def _on(device, host):
    """Return the small model of a host and its batch on a device."""
    args, kwargs = HOSTS[host].batch()
    return fresh(HOSTS[host]).to(device), [a.to(device) for a in args], {k: v.to(device) for k, v in kwargs.items()}


# transformers asks for the mask in an older way
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize("attention", [None, "headwise"])
def test_a_model_of_flex_attention_trains_as_with_fused_attention(attention):
    from transformers import LlamaConfig, LlamaForCausalLM

    # heads of 16, the least that flex attention's kernel takes
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    tokens = torch.arange(256).view(2, 128).cuda()
    methods = [headwise.NeuTRENO(), headwise.DropHead(p=0.5)]
    # edits the weights, which the model's own kernel does not give away
    methods += [headwise.RelaxedAttention()] if attention else []
    grads = []
    for kernel in ("sdpa", "flex_attention"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).cuda().train()
        model.set_attn_implementation(kernel)
        headwise.regularize(model, *methods, **({"attention": attention} if kernel == "flex_attention" else {}))
        model(input_ids=tokens, labels=tokens).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for fused, flex in zip(*grads, strict=True):
        torch.testing.assert_close(flex, fused, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("host", ["own", "llama"])
def test_figures_of_every_head_are_those_of_the_cpu(host):
    found = []
    for device in ("cpu", "cuda"):
        model, args, kwargs = _on(device, host)
        watch = headwise.watch(model, every=1)
        with torch.no_grad():
            model(*args, **kwargs)
        watch.step()
        found.append({(r["site"], r["head"], r["statistic"]): r["value"] for r in watch.records()})
        watch.remove()
    cpu, gpu = found
    assert cpu.keys() == gpu.keys() and len([value for value in gpu.values() if math.isfinite(value)]) > 10
    torch.testing.assert_close(
        torch.tensor(list(gpu.values())), torch.tensor([cpu[key] for key in gpu]), rtol=1e-3, atol=1e-4, equal_nan=True
    )


def test_a_study_trains_on_the_device(tmp_path):
    pytest.importorskip("vl_convert", reason="the report needs it")
    command = "compare digits --method DropHead(p=0.2) --seeds 2 --epochs 1 --train-size 100 --jobs 2 --device cuda"
    done = subprocess.run(
        [sys.executable, "-m", "headwise", *command.split(), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("result.json")]
    assert len(results) == 4
    assert {result["hardware"]["device"] for result in results} == {torch.cuda.get_device_name()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("size", "causal", "padded"), [(64, True, False), (80, False, True), (256, True, False)])
def test_the_kernel_of_the_largest_logit_gives_that_of_the_matrix(size, causal, padded, dtype):
    q, k = (torch.randn(2, 700, 4, size, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(2))
    real = torch.arange(700, device="cuda") < torch.tensor([[700], [333]], device="cuda") if padded else None
    mask = None if real is None else real[:, None, None]
    got = largest_logits(q, k, mask, causal, size**-0.5, real)
    s = q.double() @ k.double().mT * size**-0.5
    seen = torch.ones(s.shape[-2:], dtype=torch.bool, device="cuda")
    seen = seen.tril() if causal else seen
    seen = seen if real is None else seen & real[:, None, None] & real[:, None, :, None]
    want = s.masked_fill(~seen, float("-inf")).amax((-1, -2))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    # a head that its norms keep below a number is not read, and says no more than that
    below = largest_logits(q, k, mask, causal, size**-0.5, real, enough=1e4)
    assert ((below >= got) & (below <= 1e4)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("size", "causal"), [(64, True), (80, False), (256, True)])
def test_the_kernels_of_the_overlap_of_heads_give_that_of_the_matrix_and_its_gradients(size, causal, dtype):
    q, k = (torch.randn(2, 700, 4, size, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(2))
    real = torch.arange(700, device="cuda") < torch.tensor([[700], [333]], device="cuda")
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    want = overlap_by_matrix(*wide, None, real, None, causal, size**-0.5)
    s = wide[0].detach() @ wide[1].detach().mT * size**-0.5
    seen = torch.ones(s.shape[-2:], dtype=torch.bool, device="cuda")
    lse = s.masked_fill(~(seen.tril() if causal else seen), float("-inf")).logsumexp(-1)
    got = head_overlap(q, k, lse.float(), None, real, None, causal, size**-0.5)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=0)
    for have, right in zip(torch.autograd.grad(got.sum(), (q, k)), torch.autograd.grad(want.sum(), wide), strict=True):
        assert (have.double() - right).norm() <= (1e-4 if dtype == torch.float32 else 1e-2) * right.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernels_of_a_reading_give_the_figures_of_the_pytorch_form(causal, rows, dtype):
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(3))
    given = Reading(q, k, v, causal=causal, known_bound=1.0)
    queries = Queries.of(given, rows, torch.Generator().manual_seed(0))
    needs = set(FIGURES) - {"on_text"}
    found = by_kernels(given, queries, needs)
    assert set(found) == needs
    exact = Reading(q.double(), k.double(), v.double(), causal=causal, known_bound=math.inf)
    right = RowFigures(exact, needs, queries)
    for name in needs:
        want, have = getattr(right, name), found[name].double()
        if name == "descent":
            want, have = (torch.where(queries.counts > 1, x, 0.0) for x in (want, have))
        bound = 2e-3 if dtype == torch.bfloat16 and name in ("roughness", "descent") else 1e-4
        assert (want - have).abs().max() <= bound * want.abs().max(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [True, False])
def test_the_kernels_of_tokens_give_the_figures_of_the_pytorch_form(padded, dtype):
    x = torch.randn(5, 333, 768, device="cuda", dtype=dtype) + 0.5
    q = torch.zeros(5, 1, 333, 16, device="cuda")
    lengths = torch.tensor([333, 200, 1, 0, 77], device="cuda")
    real = (torch.arange(333, device="cuda") < lengths[:, None]) if padded else None
    names = ["token_cosine", "high_frequency", "stream_cosine", "stream_high_frequency", "massive_activations"]
    given = Reading(q, q, q, hidden=x, stream=x * 2, real_queries=real)
    found = read(given, names)
    assert len(given.kept) == 2
    # The kernels leave fp64 to the PyTorch form.
    right = read(replace(given, hidden=x.double(), stream=(x * 2).double()), names)
    for name in names:
        assert torch.allclose(found[name].value(), right[name].value(), rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("name", [None, *NAMES])
def test_captured_steps_and_evaluations_of_a_study_give_the_losses_of_the_plain_loop(name):
    from accelerate import Accelerator

    from headwise.lab.experiments.evaluation import Evaluation
    from headwise.lab.studies.vision_transformer import VisionTransformer
    from headwise.lab.training.evaluate import evaluate
    from headwise.lab.training.evaluation_graphs import EvaluationGraphs
    from headwise.lab.training.step_graphs import StepGraphs
    from headwise.lab.training.train import Training, train_epoch
    from headwise.study import Task

    class Bright(Task):
        batch_size: int = 8
        evaluation_batch_size: int = 8

        def model(self):
            return VisionTransformer(
                classes=4, image_size=8, channels=1, patch=2, dim=32, depth=2, heads=2, head_dim=16, mlp_dim=32
            )

    images = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for captured in (False, True):
        task = Bright()
        torch.manual_seed(0)
        model = task.model().cuda()
        handle = None
        if name is not None:
            cls = REGISTRY[name]
            handle = headwise.regularize(model, cls(**cls.strong), example=images[:2], seed=1)
        # a rate that single precision holds
        optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-9, fused=True)
        training = Training(task, model, optimizer, Accelerator(), 0, handle)
        training.clock.memory.peak = 1
        if captured:
            fitted = handle.fitted if handle else []
            training.graphs = StepGraphs(optimizer, torch.device("cuda"), fitted)
            training.evaluation_graphs = EvaluationGraphs(torch.device("cuda"), fitted)
        examples, losses = (images, torch.arange(64).cuda() % 4), []
        for epoch in (1, 2):
            losses.append(train_epoch(training, examples, epoch, lambda *_: None).loss)
            losses.append(evaluate(training, Evaluation("test"), examples)["loss"])
        found.append(torch.tensor(losses))
    assert training.graphs.told() == "captured as CUDA graphs"
    assert training.evaluation_graphs.told() == "test: captured as CUDA graphs"
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=0)
