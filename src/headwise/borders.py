"""Borders: every private name of torch, transformers and accelerate that headwise uses, each with a canary.

No other file uses one, nor one of diffusers, peft or optuna, and `tests/test_borders.py` has a canary for each. A
comment says what a name is, why no public one does, and what happens if it is gone; if it does not state this, the
first use raises an AttributeError or ImportError with the name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch, _pytree
from torch.utils.hooks import RemovableHandle

Function = TypeVar("Function", bound=Callable[..., Any])

# The base classes of all convolutions, of transposed ones, of dropouts, and of batch and instance norms. A list of the
# public classes would miss users' own subclasses of these. Gone: importing this file fails.
Convolution = nn.modules.conv._ConvNd
TransposedConvolution = nn.modules.conv._ConvTransposeNd
DropoutLayer = nn.modules.dropout._DropoutNd
BatchNormLayer = nn.modules.batchnorm._NormBase


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the live dict of a module's own submodules.

    `named_children()` copies and leaves out None and repeated modules, and `get_submodule()` adds guards to compiled
    graphs.
    """
    return module._modules


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the live dict of a module's own parameters, whose order is that of the state dict.

    `named_parameters()` leaves out None and repeated parameters, and registration runs the hooks that users have set
    on it.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the live dict of a module's own buffers; `named_buffers()` leaves out None."""
    return module._buffers


def made_of(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return what tells whether modules or parameters were put into a model or taken out since: all of them, and the
    parameters' names and which of them are trained.

    `modules()` and `named_parameters()` give the same in ten times the time.
    """
    modules, seen, named = [model], {model}, list[tuple[str, nn.Parameter | None]]()
    for module in modules:
        named += module._parameters.items()
        new = [m for m in module._modules.values() if m is not None and m not in seen]
        seen.update(new)
        modules += new
    parameters = [parameter for _, parameter in named if parameter is not None]
    trained = [parameter if parameter is None else parameter.requires_grad for _, parameter in named]
    return [*modules, *parameters], [[name for name, _ in named], trained]


class MovedModule(nn.Module):
    """A module that is told before and after its tensors move, as by `to()`, `half()` and `to_empty()`.

    torch has no hook for this. Gone: `before_move()` and `after_move()` are never called.
    """

    def before_move(self) -> Any:
        """Return what `after_move()` gets; the tensors are still the old ones."""

    def after_move(self, before: Any) -> None:
        """Act on the moved tensors."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.before_move()
        super()._apply(fn, recurse)
        self.after_move(before)
        return self


def forward_hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return a module's forward hooks, which torch only adds and removes publicly."""
    return module._forward_hooks


def forward_pre_hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return a module's forward pre-hooks, which torch only adds and removes publicly."""
    return module._forward_pre_hooks


def hook_first(module: nn.Module, hook: Callable[..., Any], *, with_kwargs: bool = False) -> RemovableHandle:
    """Register a forward pre-hook that runs before all present ones; return its handle.

    `prepend=True` changes the order of iteration alone. The compiler of torch 2.11 also reads the order of insertion,
    and then guards the wrong hook: an InternalTorchDynamoError. Here both orders are the same, until another hook is
    prepended with `prepend=True`.
    """
    handle = module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
    hooks = module._forward_pre_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle


def packs_projections(module: nn.MultiheadAttention) -> bool:
    """Return whether q, k and v are projected by one matrix.

    torch's own forward decides by this flag; `kdim` and `vdim` tell the same unless somebody assigned to them later.
    """
    return module._qkv_same_embed_dim


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor, which torch counts but does not show."""
    return tensor._version


def sequence_number(node: Any) -> int:
    """Return the number of a node of an autograd graph, which counts the nodes that a thread has made.

    Nothing public tells which of two nodes is older.
    """
    number: int = node._sequence_nr()
    return number


def norms_of(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the 2-norm of each tensor, computed in `dtype` by few kernels.

    `torch.nn.utils.get_total_norm` calls it too, but without a dtype, so that norms of bf16 tensors are rounded.
    """
    return torch._foreach_norm(tensors, 2, dtype)


def on_all(operation: str) -> Callable[..., Any]:
    """Return torch's operator on lists of tensors, such as `on_all("add_")`: few kernels for all of them."""
    operator: Callable[..., Any] = getattr(torch, f"_foreach_{operation}")
    return operator


def copy_all_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into as many others, on CUDA by one kernel. Gone: an AttributeError with the name."""
    torch._foreach_copy_(targets, sources)


def overwritable_library(namespace: str, name: str) -> torch.library.Library:
    """Return the library in which an operator is defined; what an earlier import of its file defined is gone.

    `torch.library.custom_op` does the same. Gone: a file that defines an operator without that decorator cannot be
    imported a second time, as notebooks that reload do.
    """
    from torch._library import custom_ops

    return custom_ops.get_library_allowing_overwrite(namespace, name)


# A context in which the transforms of torch.func do not see operators. Gone: importing this file fails.
outside_transforms = torch._C._DisableFuncTorch

# What a mode sees of `.to()` another device. Gone: an AttributeError names it.
moves: Any = torch.ops.aten._to_copy.default


def writes(operator: Any) -> bool:
    """Return whether an operator writes into one of its arguments, which its schema says. Gone: an AttributeError."""
    return bool(operator._schema.is_mutable)


# Runs operators unseen by modes that look at each one. Gone: importing this file fails.
without_modes: Any = _python_dispatch._disable_current_modes


def in_transform() -> bool:
    """Return whether a transform of torch.func runs, which differentiates no operator of our own."""
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None


def joins_unevenly() -> bool:
    """Return whether the forward of `DistributedDataParallel` that runs now is inside its `join()`.

    There, our own collectives must not wait for a process that has no batch left, and nothing public tells so. Gone:
    False; then they wait.
    """
    running = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return bool(getattr(getattr(running, "_join_config", None), "enable", False))


def modes_see_operators() -> bool:
    """Return whether a mode sees every operator now, such as one that counts, traces or makes fake tensors."""
    return torch._C._len_torch_dispatch_stack() > 0


# Maps over nested containers, as torch itself walks the arguments of a model. The package `optree` would be another
# dependency. Gone: importing this file fails.
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map

# The base class of modes that see every operator; torch documents it, but under this name. Gone: as above.
DispatchMode = _python_dispatch.TorchDispatchMode

# torch's attention kernel for CPUs and its backward. `F.scaled_dot_product_attention` calls them, but does not return
# the log-sum-exp of each row. Gone: None; the largest logits are then computed from blocks of the matrix, and the
# operations of attention on CPUs are not counted.
flash_on_cpu: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
flash_on_cpu_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
# The same on CUDA. Gone: None; the log-sum-exp of each row is then computed by headwise's own kernel.
flash_on_cuda: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention", None)
flash_on_cuda_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", None)

# The code that runs in every call of a module, which names its frames on the stack. Gone: importing this file fails.
MODULE_CALL = nn.Module._call_impl.__code__

# The attributes in which `torch.compile(model)` and FSDP1 keep the model that they wrap; neither has a public one.
# Gone: the handle of a wrapped model is not found, and the names of a compiled model's sites get longer.
COMPILED_INSIDE = "_orig_mod"
FSDP1_INSIDE = "_fsdp_wrapped_module"

# The attribute in which the hook of `torch.nn.utils.prune` keeps the name of its weight. Gone: the refusal of a pruned
# weight names no remedy.
PRUNED_NAME = "_tensor_name"

# The beginning of the names of functions in which Dynamo resumes after a graph break. Gone: attention calls after a
# graph break inside a site are not served, and the site raises an error.
RESUMED = "torch_dynamo_resume_in"

# The decorator that keeps a function out of compiled graphs. `torch.compiler.disable` imports the compiler, which takes
# a second of each process. Gone: importing this file fails.
not_compiled = torch._disable_dynamo


def constant_in_graphs(function: Function) -> Function:
    """Mark a function of constants as one whose result is a constant of compiled graphs.

    `torch.compiler.assume_constant_result` does the same and imports the compiler. Gone: graphs break at the function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the errors by which torch.compile says that it cannot compile a function.

    They have no public names, and importing them imports the compiler. Gone: an ImportError or AttributeError when one
    is handled.
    """
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def uncompiled(function: Any) -> Any:
    """Return the function inside the wrapper that `torch.compile` or `torch.compiler.disable` puts around it.

    Neither wrapper names it publicly. Gone: the wrapper itself, so that compiled flex attention is not recognised.
    """
    return getattr(function, "_torchdynamo_orig_callable", function)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module's call was compiled in place, by `module.compile()`."""
    return module._compiled_call_impl is not None


def indexing_by_tensors() -> AbstractContextManager[Any]:
    """Return a context in which a scalar tensor indexes without becoming a Python number, which would cut a vmap off.

    Flex attention enters it around the functions that users write, and offers it nowhere else.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def in_backward() -> bool:
    """Return whether the code runs inside autograd's backward, which nothing public tells.

    Gone: none seems to run, so that the recompute of a reentrant checkpoint is not refused.
    """
    number = getattr(torch._C, "_current_graph_task_id", None)
    return number is not None and number() != -1


def pack_functions() -> list[Any]:
    """Return the pack functions of the active saved-tensor hooks, innermost first, and leave the hooks unchanged.

    torch sets such hooks publicly, but does not show them. Gone: an empty list; then no checkpointed region is
    detected, and a recompute is refused like a reentrant one.
    """
    autograd, popped = torch._C._autograd, []
    if not hasattr(autograd, "_top_saved_tensors_default_hooks"):
        return []
    try:
        while (hooks := autograd._top_saved_tensors_default_hooks(False)) is not None:
            autograd._pop_saved_tensors_default_hooks()
            popped.append(hooks)
    except (RuntimeError, TypeError):
        return []
    finally:
        # The stack can only be read by popping it; it is restored in every case.
        for hooks in reversed(popped):
            autograd._push_saved_tensors_default_hooks(*hooks)
    return [hooks[0] for hooks in popped]


def checkpoint_of(pack: Any) -> tuple[Any, bool, Any] | None:
    """Return the frame object of the checkpointed region whose hooks have this pack function, or None for other hooks.

    With it come whether the region is being recomputed, and the recompute's id. torch keeps all of it in closures.
    Gone: None, as without hooks.
    """
    # Dynamo wraps the function, whose closure is needed here.
    pack = uncompiled(pack)
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, (c.cell_contents for c in pack.__closure__ or ()), strict=False)) if names else {}
    # The hooks of the first run are closures over `frame`, those of the recompute over a reference to that frame.
    if "frame" in cells:
        return cells["frame"], False, None
    if "target_frame_ref" in cells:
        return cells["target_frame_ref"](), True, cells.get("gid", 0)
    return None


@contextmanager
def profiled_memory() -> Iterator[list[Any]]:
    """Record the allocations on the CPU inside the context; the list holds the roots of the events when it has ended.

    `torch.profiler` also records every operator, and torch never frees some memory of those events.
    """
    from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, _ExperimentalConfig

    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    activities, roots = {ProfilerActivity.CPU}, list[Any]()
    torch._C._autograd._prepare_profiler(config, activities)
    torch._C._autograd._enable_profiler(config, activities)
    torch._C._autograd._enable_record_function(False)
    try:
        yield roots
    finally:
        torch._C._autograd._enable_record_function(True)
        profile = torch._C._autograd._disable_profiler()
    roots += profile.experimental_event_tree()


def is_flattened(parameter: Any) -> bool:
    """Return whether FSDP1 has made a parameter part of a flat one, which it tells no other way.

    Gone: False; then FSDP1 with `use_orig_params=True` is not refused.
    """
    return getattr(parameter, "_fsdp_flattened", False)


def has_flat_parameter(module: nn.Module) -> bool:
    """Return whether a module keeps a flat parameter of FSDP1, which it tells no other way. Gone: False."""
    return "_flat_param" in own_parameters(module)


def tensor_parallel_size(model: Any) -> int:
    """Return over how many processes transformers has split the heads of a model.

    Its public `tp_size` is a name that other libraries' models have too. Gone: 1; then the placements of the weights
    alone tell.
    """
    return getattr(model, "_tp_size", None) or 1


def tokens_split(q: Tensor) -> bool:
    """Return whether context parallelism splits the tokens: it replaces fused attention, or passes distributed tensors.

    Nothing public tells whether it is on. Gone: only distributed tensors in the calls tell.
    """
    # Looked up in sys.modules: torch replaces nothing unless its own module for this was imported. That of torch 2.9 is
    # one folder up. Every call of attention asks, so nothing is built here.
    library = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention") or sys.modules.get(
        "torch.distributed.tensor.experimental._attention"
    )
    replaced = getattr(library, "_replaced_functions", ())
    return nn.functional.scaled_dot_product_attention in replaced or hasattr(q, "full_tensor")


def has_attention_kind(config: Any) -> bool:
    """Return whether a config of transformers names an attention implementation. Gone: every layer is refused."""
    return hasattr(config, "_attn_implementation")


def attention_kind(config: Any) -> str | None:
    """Return the name of the attention implementation in a config of transformers.

    `attn_implementation=` and `set_attn_implementation()` are public, but nothing reads it.
    """
    return config._attn_implementation


def set_attention_kind(config: Any, kind: str) -> None:
    """Set the name of the attention implementation in one config of transformers.

    `set_attn_implementation()` belongs to models, and the config's own setter also changes the config's parts. Gone:
    the module keeps its own attention, and the first training step raises, for the site was never reached.
    """
    config._attn_implementation_internal = kind


def collected_outputs() -> Collection[str]:
    """Return the names of the outputs that the running model of transformers collects, as for `output_attentions`.

    The call of a layer does not tell. Gone: none; then only the keyword tells whether weights are wanted.
    """
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return ()
    return _active_collector.get() or ()


# The attributes in which the reporting callbacks of transformers keep their loggers. Gone: pictures and alerts do not
# arrive there; figures do.
LOGGERS = ("tb_writer", "_wandb", "_trackio", "_ml_flow")

# The local variable of `Trainer.compute_loss` with the labels that it has taken out of the batch. Gone: the model does
# not get them back, and its loss is computed from its logits.
LABELS = "labels"


def precision_of_process(default: str) -> str:
    """Return the mixed precision that accelerate keeps for this process, or the default if it keeps none.

    `AcceleratorState().mixed_precision` would initialize the state.
    """
    from accelerate.state import AcceleratorState

    return AcceleratorState._shared_state.get("_mixed_precision", default)


def forget_precision() -> None:
    """Make accelerate forget the mixed precision of this process, for which it has no public call."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()


# The names of the backends of diffusers that call `F.scaled_dot_product_attention`. Its documentation lists them, all
# but one with an underscore. Gone: a call of such a backend is treated as one of a separate kernel.
TORCH_BACKENDS = frozenset(f"_native_{kind}" for kind in ("cudnn", "efficient", "flash", "math")) | {"native"}


def active_backend(library: Any) -> Any:
    """Return the attention backend of diffusers that runs unless a layer names one; `library` is its dispatcher's file.

    Its public `attention_backend()` sets one and does not tell it.
    """
    return library._AttentionBackendRegistry.get_active_backend()[0]


def lora_convolution(library: Any) -> type:
    """Return peft's LoRA layer of convolutions, from its file of LoRA layers; only its subclasses have public names."""
    return library._ConvNd


def trial_id(trial: Any) -> int:
    """Return optuna's id of a trial, by which a trial that was interrupted is opened again; `number` is another."""
    return trial._trial_id
