"""Run a site, alone or in its model, and capture what its attention receives, without changing the model."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.core import Site
from headwise.attend.projections import stand_ins
from headwise.attend.projections.leaves import Leaf
from headwise.borders import hook_first

# Few, as only the layout matters; more than one, so that tokens and heads are not confused.
TOKENS = 6


def ways(site: Site, model: nn.Module | None, example: Any) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    """Yield the ways to reach the site, (module, function that runs it), the cheapest first: the layer alone, the model
    on the example, and the model on a synthesised batch."""
    yield site.module, lambda: site.module(alone(site))
    if example is not None and model is not None:
        small = first_sample(example)
        if small is not None:
            yield model, lambda: feed(model, small)
        yield model, lambda: feed(model, example)
    if model is not None:
        for owner in (module for _, module in model.named_modules() if _takes_config(module, site.module)):
            yield owner, functools.partial(_run_synthesised, owner)


def _run_synthesised(owner: nn.Module) -> Any:
    return owner(**synthesised(owner))


def feed(model: nn.Module, example: Any) -> Any:
    """Call the model on a batch: a mapping as keywords, a sequence as arguments, anything else as one argument."""
    if hasattr(example, "keys"):
        return model(**{name: example[name] for name in example})
    return model(*example) if isinstance(example, (tuple, list)) else model(example)


def first_sample(example: Any) -> Any:
    """Return the first sample of a batch, or None if its tensors share no first dimension above 1."""
    if isinstance(example, Tensor):
        return example[:1] if example.dim() > 1 and len(example) > 1 else None
    is_mapping = isinstance(example, Mapping)
    values = (
        list(example.values() if is_mapping else example) if is_mapping or isinstance(example, (tuple, list)) else []
    )
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or any(t.dim() < 1 for t in tensors) or len({len(t) for t in tensors}) != 1 or len(tensors[0]) < 2:
        return None
    small = [value[:1] if isinstance(value, Tensor) else value for value in values]
    return dict(zip(example, small, strict=True)) if is_mapping else small


def _takes_config(module: nn.Module, inner: nn.Module) -> bool:
    return (
        hasattr(module, "main_input_name") and hasattr(module, "config") and any(m is inner for m in module.modules())
    )


def _random(*shape: int, like: Tensor) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return numbers.to(device=like.device, dtype=like.dtype)


def alone(site: Site) -> Tensor:
    """Return a random input (1, T, C) for the attention module alone."""
    candidates = Leaf.below(site.module, site.name)
    if not candidates:
        raise ValueError("no projections")
    window = getattr(site.module, "window_area", None) or getattr(site.module, "seq_len", None)
    return _random(1, window if isinstance(window, int) else TOKENS, candidates[0].columns, like=candidates[0].weight)


def synthesised(model: nn.Module) -> dict[str, Tensor | bool]:
    """Return a small batch for a transformers model, from its config and the arguments of its forward."""
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    like = next(p for p in model.parameters() if p.is_floating_point())
    batch: dict[str, Tensor | bool] = {}
    vocabulary = _first(config, "vocab_size")
    if vocabulary:
        ids = torch.arange(3, 3 + TOKENS, device=like.device)[None] % vocabulary
        batch |= {name: ids for name in ("input_ids", "decoder_input_ids") if name in names}
    image, channels = _first(config, "image_size"), _first(config, "num_channels") or 3
    if image:
        height, width = image if isinstance(image, (list, tuple)) else (image, image)
        batch["pixel_values"] = _random(1, channels, height, width, like=like)
    bins = _first(config, "num_mel_bins")
    if bins and (length := _first(config, "max_source_positions")):
        batch["input_features"] = _random(1, bins, 2 * length, like=like)
    elif "input_values" in names:
        batch["input_values"] = _random(1, 4000, like=like)
    if "input_features" in batch or getattr(model, "main_input_name", "") == "pixel_values":
        batch.pop("input_ids", None)
    if getattr(config, "add_cross_attention", False):
        batch["encoder_hidden_states"] = _random(1, TOKENS + 2, config.hidden_size, like=like)
    batch["use_cache"] = False
    return {name: value for name, value in batch.items() if name in names}


def _first(config: Any, name: str) -> Any:
    """Return a setting of a config or of its text_config or vision_config, or None."""
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        if getattr(part, name, None) is not None:
            return getattr(part, name)
    return None


@dataclass
class Seen:
    """The queries, keys and values of one attention call, each (B, H, ..., D) in the host's layout."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass
class RecordedCall:
    """The arguments of one call of a module, for calling it again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def seen(module: nn.Module, edit: Callable[[Tensor, bool], Tensor] | None = None) -> Iterator[list[Seen]]:
    """Collect the inputs of attention while `module` runs in this thread.

    Args:
        edit: changes the attention's output; its second argument is whether the heads are dimension -2, as in
            transformers' interface.
    """
    calls: list[Seen] = []
    inside = {"module": 0, "attention": 0}
    # Another thread may run the same module meanwhile.
    thread = threading.get_ident()

    def count(by: int) -> None:
        if threading.get_ident() == thread:
            inside["module"] += by

    def watch(
        function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], at: int, interface: bool
    ) -> Any:
        # A function of the interface calls F.scaled_dot_product_attention: only the outer call counts.
        if not inside["module"] or inside["attention"]:
            return function(*args, **kwargs)
        q, k, v = _three(args[at:], kwargs)
        calls.append(Seen(q.detach().clone(), k.detach().clone(), v.detach().clone()))
        inside["attention"] += 1
        try:
            result = function(*args, **kwargs)
        finally:
            inside["attention"] -= 1
        return result if edit is None else _edited(result, edit, interface)

    handles = [
        module.register_forward_pre_hook(lambda *_: count(1)),
        module.register_forward_hook(lambda *_: count(-1), always_call=True),
    ]
    try:
        with stand_ins.shown_to(watch):
            yield calls
    finally:
        for handle in handles:
            handle.remove()


def _three(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    names = ("query", "key", "value")
    return tuple(args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names))


def _edited(result: Any, edit: Callable[[Tensor, bool], Tensor], interface: bool) -> Any:
    if isinstance(result, tuple):
        return (edit(result[0], interface), *result[1:])
    return edit(result, interface)


@contextmanager
def evaluating(root: nn.Module) -> Iterator[None]:
    """Put every module into eval mode, and restore each module's mode afterwards."""
    modes = [(module, module.training) for module in root.modules()]
    root.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def untouched(root: nn.Module) -> Iterator[None]:
    """Enter eval mode without grad; restore modes, buffers and torch's generators afterwards."""
    # Some models write buffers in evaluation too: caches, step counts.
    buffers = [(buffer, buffer.detach().clone()) for buffer in root.buffers() if buffer.device.type != "meta"]
    devices = list({p.device.index for p in root.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        try:
            with evaluating(root):
                yield
        finally:
            for buffer, saved in buffers:
                buffer.copy_(saved)


@contextmanager
def finite(root: nn.Module) -> Iterator[bool]:
    """Replace NaN and infinity in weights by small noise, restore them bit for bit, and give whether there were any.

    Rows of weights show which heads they make only if what is not perturbed stays as it is, and NaN spreads.
    """
    with torch.no_grad():
        weights = [
            p.data for p in root.parameters() if p.is_floating_point() and p.element_size() > 1 and not p.is_meta
        ]
        broken = [(weight, weight.clone()) for weight in weights if not bool(torch.isfinite(weight).all())]
        for weight, saved in broken:
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32) / 50
            weight.copy_(torch.where(torch.isfinite(saved), saved, noise.to(saved)))
    try:
        yield bool(broken)
    finally:
        for weight, saved in broken:
            weight.copy_(saved)


def arguments(root: nn.Module, module: nn.Module, run: Callable[[], Any]) -> RecordedCall | None:
    """Run the model and return the arguments of the first call of `module`, or None if it is not called."""
    calls: list[RecordedCall] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not calls:
            calls.append(RecordedCall(args, {name: _without_cache(value) for name, value in kwargs.items()}))
            raise _ReachedError

    # An exception ends the run at the module: the rest would cost time and may fail on a synthesised batch.
    handle = hook_first(module, keep, with_kwargs=True)
    try:
        run()
    except _ReachedError:
        pass
    finally:
        handle.remove()
    return calls[0] if calls else None


class _ReachedError(Exception):
    """Ends a run at the module whose arguments are needed."""


def _without_cache(value: Any) -> Any:
    # A cache grows with each call, so a repeated call would see more keys.
    return None if "Cache" in type(value).__name__ else value


def again(module: nn.Module, call: RecordedCall) -> None:
    """Call the module once more with the same arguments."""
    args = tuple(_without_cache(value) for value in call.args)
    module(*args, **copy.copy(call.kwargs))
