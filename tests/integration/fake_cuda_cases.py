"""Runs training steps on fake CUDA tensors and prints, a line of JSON for each case, what is wrong with it."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
import torchvision_stub  # noqa: F401  (before timm and transformers)
from fake_cuda import FakeCuda, Waits, believe_in_cuda
from small_models import HOSTS, fresh
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import headwise
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY
from headwise.health.statistics import STATISTICS
from headwise.health.statistics.sharpness import sharpness_underway
from headwise.health.watching import whole_model
from headwise.health.watching.drift import DRIFTS
from headwise.health.watching.weights import WEIGHT_NAMES
from headwise.numerics import kernels

# A causal model with grouped keys and a padded batch has more masks than any; some methods have no meaning there.
TRANSFORMERS = ("llama-left-padded", "bert-padded")
WALKED = {"sdpa": ("own",), "torch": ("torch",), "transformers": TRANSFORMERS}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# of each kind of stage one, and then the others
FIRST = (
    "DropHead",
    "EntropyPenalty",
    "InputNoise",
    "NeuTRENO",
    "AttentionNormPenalty",
    "SigmaReparam",
    "RelaxedAttention",
    "QKClip",
)
COMPILED = (*FIRST, *sorted(set(shelf.__all__) - set(FIRST)))
# names of operators in reports, where they are others
OTHER_NAMES = {
    "attend_edited": "edited logits",
    "attend_dropped": "dropped elements",
    "mix_heads": "mixed heads",
    **dict.fromkeys(("draw", "draw_heads", "noise"), "draws"),
}
# What counts passes is no kernel, and gradients are those of operators that are named.
UNNAMED = {"token", "row_slopes", "spectral_slopes"}
# read where they are named
OF_MODEL = [
    "matrix_norm",
    "sharpness",
    "sharpness_share",
    "gradient_norm",
    "update_ratio",
    "update_entropy",
    "update_norm",
    "update_rank",
    "gradient_spike",
]


class Training:
    """One model on the device with its methods or its watch, and steps that give what waited in each."""

    def __init__(self, host: str, dtype: torch.dtype, fit: Callable[[nn.Module], Any], compiled: bool = False) -> None:
        self.cuda, self.host = FakeCuda(), HOSTS[host]
        model = fresh(self.host)
        self.handle = fit(model)
        with self.cuda:
            model.to("cuda", dtype)
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            args, kwargs = self.host.batch()
            self.args = [moved(x, dtype) for x in args]
            self.kwargs = {name: moved(x, dtype) for name, x in kwargs.items()}
        self.model = model
        self.run = self._compiled(model) if compiled else self._eager

    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        with self.cuda:
            return self.model(*args, **kwargs)

    def _compiled(self, model: nn.Module) -> Callable[..., Any]:
        # dynamo does not trace under a mode: the graph is traced without, and runs under it
        def keep(graph: Any, example: Any) -> Any:
            def run(*args: Any) -> Any:
                with self.cuda:
                    return graph(*args)

            return make_boxed_func(run)

        torch._dynamo.reset()
        return torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep))

    def step(self, ends: bool = True) -> list[str]:
        """Take one step and give its waits; without `ends` not what follows the optimizer's step."""
        self.cuda.forget()
        out = self.run(*self.args, **self.kwargs)
        out = out if isinstance(out, Tensor) else out[0]
        with self.cuda:
            regularized = isinstance(self.handle, headwise.Regularized)
            loss = out.square().mean() + (self.handle.loss() if regularized else 0.0)
            if loss.device.type != "cuda":
                raise RuntimeError(f"the loss lies on {loss.device}")
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if not ends:
                return self.cuda.forget()
            self.handle.after_step() if regularized else self.handle.step()
        return self.cuda.forget()


def moved(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to("cuda", dtype if tensor.is_floating_point() else None)


Case = tuple[str, Callable[[], list[str]]]


def methods(kind: str, dtype: str, names: Sequence[str] = shelf.__all__) -> Iterator[Case]:
    """Every method on a host, or those that are named."""
    for name in names:
        yield name, lambda name=name: regularized(name, kind, dtype)


def compiled() -> Iterator[Case]:
    """Every method in a compiled model, on hosts and in dtypes in turn; the masks of transformers hold constants that
    torch cannot trace here. What only a machine with Triton asks is traced too, and older dynamos do not look through
    caches."""
    warnings.filterwarnings("error", message="Dynamo detected a call to a `functools.lru_cache`")
    kernels.HAS_TRITON = True
    for number, name in enumerate(COMPILED):
        at = ("sdpa", "torch")[number % 2], tuple(DTYPES)[number // 2 % 2]
        yield f"{name} on {' in '.join(at)}", lambda name=name, at=at: regularized(name, *at, compiled=True)


def named() -> Iterator[Case]:
    """Every method: whether the report names the operators that computed on the device."""
    for name in shelf.__all__:
        yield name, lambda name=name: unnamed(name)


def unnamed(name: str) -> list[str]:
    training = trained(name, "sdpa", "bf16")
    if isinstance(training, list):
        training = trained(name, "torch", "bf16")
    if isinstance(training, list):
        return training
    for _ in range(2):
        training.step()
    report = training.handle.report()
    told = {kernel for row in report.rows for kernel in row.kernels}
    told |= {kernel for note in report.notes for kernel in note.partition("together: ")[2].split(", ")}
    ran = {x for x in training.cuda.operators if not x.endswith("_backward")} - UNNAMED
    return [f"{x} is not named by:\n{report}" for x in sorted(ran) if OTHER_NAMES.get(x, x) not in told]


def regularized(name: str, kind: str, dtype: str, compiled: bool = False) -> list[str]:
    training = trained(name, kind, dtype, compiled)
    if isinstance(training, list):
        return training
    # What a method does after a step meets the next one.
    steps = 2 if compiled or REGISTRY[name](**REGISTRY[name].strong).overrides("after_step") else 1
    return [wait for _ in range(steps) for wait in training.step()]


def trained(name: str, kind: str, dtype: str, compiled: bool = False) -> Training | list[str]:
    """Fit a method to the first host of a kind that takes it, or give what is wrong."""
    method, training, refused = REGISTRY[name], None, []
    for host in WALKED[kind]:
        try:
            training = Training(
                host,
                DTYPES[dtype],
                lambda model, host=host: headwise.regularize(
                    model, method(**method.strong), example=HOSTS[host].example()
                ),
                compiled,
            )
            break
        except ValueError as error:
            refused.append(str(error))
    return [f"no host takes it: {refused}"] if training is None else training


def captured() -> Iterator[Case]:
    """Every method in a step that is captured after two others."""
    for name in shelf.__all__:
        yield name, lambda name=name: recorded(name)


def recorded(name: str) -> list[str]:
    method = REGISTRY[name](**REGISTRY[name].strong)
    training = None
    for host in (*WALKED["sdpa"], *TRANSFORMERS):
        with suppress(ValueError):
            training = Training(
                host,
                torch.float32,
                lambda model, host=host: headwise.regularize(model, method, example=HOSTS[host].example()),
            )
            break
    if training is None:
        return ["no host takes it"]
    for _ in range(2):
        training.step()
    kernels.has_context, training.cuda.recording = lambda: True, True
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        # what follows the optimizer's step is no part of the graph
        wrong = training.step(ends=False)
    finally:
        kernels.has_context = torch.cuda.is_initialized
    if method.draws() and not all(f.passes.captured for f in training.handle.fitted):
        wrong.append("replays would draw the numbers of the captured step")
    return wrong


def readings() -> Iterator[Case]:
    """Every statistic, in steps of which every other one is a reading."""
    for host, dtype, rows in (
        ("own-causal", "fp32", None),
        ("torch", "bf16", None),
        ("llama-left-padded", "bf16", 4),
        ("bert-padded", "fp32", None),
    ):
        yield f"{host} in {dtype}, rows={rows}", lambda at=(host, dtype, rows): watched(*at)
    yield "beside a method that edits logits", edited
    yield f"all of heads and {', '.join(OF_MODEL)}", of_model


def watched(host: str, dtype: str, rows: int | None) -> list[str]:
    # those too that are read only if they are named
    every = [*STATISTICS, *WEIGHT_NAMES, *DRIFTS]
    training = Training(
        host, DTYPES[dtype], lambda model: headwise.watch(model, every=2, rows=rows, on_alert=None, statistics=every)
    )
    found = wrong_readings(training)
    watch = training.handle
    read = {record["statistic"] for record in watch.records()}
    explained = {name for reasons in watch.reasons().values() for name in reasons}
    found += [f"{name} was not read, and nothing says why" for name in watch.names if name not in read | explained]
    return found + [f"{len(read)} statistics read"] * (len(read) < 20)


def edited() -> list[str]:
    def fit(model: nn.Module) -> Any:
        headwise.regularize(
            model, headwise.SoftCap(cap=5.0), headwise.AttentionNormPenalty(), example=HOSTS["own"].example()
        )
        return headwise.watch(model, every=2, on_alert=None)

    training = Training("own", torch.float32, fit)
    handle = headwise.handle(training.model)

    # the loop of a watched and regularized model reads the loss too
    def read(*_: Any) -> None:
        handle.loss()

    training.model.register_forward_hook(read)
    # the second reading knows the logits of the first
    return wrong_readings(training, steps=3)


def wrong_readings(training: Training, steps: int = 2) -> list[str]:
    waits = [training.step() for _ in range(steps)]
    found = [f"step 1 is no reading and waits: {wait}" for wait in waits[1]]
    return found + [
        f"the reading of step {at} waits {len(of)} times: {of}"
        for at, of in enumerate(waits)
        if at != 1 and len(of) != 1
    ]


def of_model() -> list[str]:
    def fit(model: nn.Module) -> Any:
        names = [*headwise.watch(fresh(HOSTS["own"])).names, *OF_MODEL]
        return headwise.watch(model, every=2, on_alert=None, statistics=names, loss=lambda: loss())

    training = Training("own", torch.float32, fit)

    def loss() -> Tensor:
        return training.model(*training.args).square().mean()

    # few products show what all of them do; the second reading finds the optimizer's moments
    whole_model.sharpness_underway = partial(sharpness_underway, iterations=4)
    return wrong_readings(training, steps=3)


def penalties() -> Iterator[Case]:
    """Penalties of both kinds, means and norms, alone and together, over two micro-batches."""
    for chosen in (
        ["EntropyPenalty"],
        ["AttentionNormPenalty"],
        ["EntropyPenalty", "AttentionNormPenalty", "NuclearDecay"],
    ):
        yield " + ".join(chosen), lambda chosen=chosen: penalized(chosen)


def penalized(names: list[str]) -> list[str]:
    made = [REGISTRY[name](**REGISTRY[name].strong) for name in names]
    training = Training(
        "own", torch.float32, lambda model: headwise.regularize(model, *made, example=HOSTS["own"].example())
    )
    with training.cuda:
        training.model(*training.args)
    return [wait for _ in range(2) for wait in training.step()]


def loop() -> Iterator[Case]:
    """The training loop of a study: an epoch waits as often as it ends, however many steps it has, and once a
    reading."""

    def epochs() -> list[str]:
        few, many = epoch_waits(3), epoch_waits(6)
        return [] if len(few) == len(many) else [f"3 steps wait {len(few)} times, 6 steps {len(many)} times: {many}"]

    def watched_epochs() -> list[str]:
        plain, read = epoch_waits(6), epoch_waits(6, every=2)
        return [] if len(read) == len(plain) + 3 else [f"3 readings wait {len(read) - len(plain)} times: {read}"]

    yield "an epoch", epochs
    yield "an epoch that is watched", watched_epochs


def vectors(steps: int) -> Any:
    """Return a task of random vectors with this many steps an epoch."""
    from headwise.study import Metric, Task

    class Vectors(Task):
        batch_size: int = 4
        epochs: int = 1
        learning_rate: float = 1e-3
        clip: float | None = 1.0
        accumulation: int = 2
        metrics: ClassVar[tuple[Metric, ...]] = (Metric("accuracy", "share of right answers"),)

        def model(self) -> nn.Module:
            return fresh(HOSTS["own"])

        def data(self, split: str) -> Any:
            return torch.randn(8 * steps, 9, 32), torch.randint(5, (8 * steps,))

        def loss(self, output: Any, targets: Any) -> Tensor:
            return nn.functional.cross_entropy(output.mean(1), targets)

        def metric(self, output: Any, targets: Any) -> Tensor:
            return (output.mean(1).argmax(-1) == targets).float().mean()

    return Vectors()


@cache
def epoch_waits(steps: int, every: int | None = None) -> list[str]:
    from headwise.lab.training.train import Training as Phase
    from headwise.lab.training.train import train_epoch

    task, cuda = vectors(steps), FakeCuda()
    model = task.model()
    handle = headwise.regularize(
        model, headwise.DropHead(p=0.2), headwise.AttentionNormPenalty(), example=HOSTS["own"].example()
    )
    watch = None if every is None else headwise.watch(model, every=every, on_alert=None)
    accelerator = SimpleNamespace(
        num_processes=1, process_index=0, device=torch.device("cuda"), reduce=lambda tensor, how: tensor
    )
    with cuda:
        model.to("cuda")
        examples = tuple(part.to("cuda") for part in task.data("train"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        # progress is told by the clock: never here
        phase = Phase(task, model, optimizer, accelerator, 0, handle, watch, reported=float("inf"))
        cuda.forget()
        train_epoch(phase, examples, 1, lambda *_: None)
    return cuda.forget()


def evaluations() -> Iterator[Case]:
    """Every method in the evaluation of a study, whose batches are captured."""
    for name in shelf.__all__:
        yield name, lambda name=name: evaluated(name)


def evaluated(name: str) -> list[str]:
    from headwise.lab.experiments.evaluation import Evaluation
    from headwise.lab.training import step_graphs
    from headwise.lab.training.evaluate import evaluate
    from headwise.lab.training.evaluation_graphs import EvaluationGraphs
    from headwise.lab.training.train import Training as Phase

    class Classified(type(vectors(3))):  # type: ignore[misc]  # a class of the call
        # so that the metric of each batch is counted
        metrics: ClassVar[tuple[Any, ...]] = ()

    task, cuda = Classified(evaluation_batch_size=3), FakeCuda()
    model = task.model()
    method = REGISTRY[name](**REGISTRY[name].strong)
    handle = headwise.regularize(model, method, example=HOSTS["own"].example())
    wrong: list[str] = []

    def record(run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        cuda.forget()
        kernels.has_context, cuda.recording = lambda: True, True
        torch.cuda.is_current_stream_capturing = lambda: True
        try:
            result = run()
        finally:
            kernels.has_context, cuda.recording = torch.cuda.is_initialized, False
        wrong.extend(cuda.forget())
        return result, lambda: None

    step_graphs._aside = lambda device, run: run()
    device = torch.device("cuda")
    accelerator = SimpleNamespace(
        num_processes=1, process_index=0, device=device, unwrap_model=lambda prepared: prepared
    )
    with cuda:
        model.to("cuda")
        examples = tuple(part.to("cuda") for part in task.data("test"))
        phase = Phase(task, model, None, accelerator, 0, handle)
        phase.evaluation_graphs = EvaluationGraphs(device, handle.fitted, record)
        evaluate(phase, Evaluation("test"), examples)
    told = phase.evaluation_graphs.told()
    return wrong + [told] * (told != "test: captured as CUDA graphs")


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    **{f"{kind}-{dtype}": lambda at=(kind, dtype): methods(*at) for kind in WALKED for dtype in DTYPES},
    "kinds": lambda: methods("sdpa", "fp32", FIRST),
    "compiled": compiled,
    "named": named,
    "captured": captured,
    "evaluations": evaluations,
    "readings": readings,
    "penalties": penalties,
    "loop": loop,
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    believe_in_cuda()
    for group in sys.argv[1:] or GROUPS:
        for name, case in GROUPS[group]():
            try:
                wrong = case()
            except Waits as error:
                wrong = [str(error)]
            except Exception as error:
                wrong = [f"{type(error).__name__}: {str(error)[:600]}", *traceback.format_tb(error.__traceback__)[-4:]]
            print(json.dumps({"group": group, "case": name, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
