"""The handle of a regularized model: its loss, step, report, saving and removal."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.core import Method, Schedule, SharedState, Site
from headwise.attend.core.unread_penalties import Penalties
from headwise.attend.regularizing import (
    ablation,
    changed,
    layers_together,
    learned_parameters,
    loop_checks,
    penalties,
    saving,
    transformers_trainer,
)
from headwise.attend.regularizing.coverage import Coverage, coverage
from headwise.attend.regularizing.handle_place import HANDLE, kept_handle
from headwise.attend.regularizing.plan import Plan, attach, detach, fold_methods
from headwise.attend.regularizing.step_maxima import StepMaxima
from headwise.attend.regularizing.training_state import Strengths, check_progress, load_progress, progress
from headwise.files.arguments import is_a, is_function, is_path
from headwise.files.html import html_table
from headwise.numerics.kernels import note_into

__all__ = ["Regularized", "handle"]

# what the library's own parts read from a handle; dir() leaves it out
PLUMBING = {
    *"aside brought checked drop_penalties found hooks idle order removed seen_training shared strength_at".split()
}


class Regularized:
    """The handle of a regularized model: its loss, step, report, saving and removal.

    Attributes:
        model: the model.
        methods: in order of action.
        step: optimizer steps so far.
        fitted: the layers with their methods.
        shared: the state that these layers share: seed, running forward, penalties.
        found: every attention-like module of the model.
        brought: the names of the parameters that the methods added.
        seen_training: whether a training forward of the whole model ever ran.
        hooks: the hooks on the model itself; they are removed with the handle.
        order: in a run of a study, the digest of its batches, which `state()` holds too; else None.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> handle = headwise.regularize(model, headwise.NeuTRENO(strength=0.4), headwise.DropHead(p=0.2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> for step in range(3):
        ...     loss = model(torch.randn(4, 8, 16)).square().mean() + handle.loss()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     handle.after_step()
        >>> handle.step
        3
        >>> report = handle.report()  # print it: a line for each attention layer
        >>> handle.fold()  # DropHead acts in training alone and goes; NeuTRENO stays
        >>> handle
        Regularized(NeuTRENO(strength=0.4), 2 sites)
    """

    def __init__(self, model: nn.Module, plan: Plan, seed: int, draws: str = "counter") -> None:
        self.model, self.methods, self.step = model, plan.methods, 0
        self.shared = SharedState(seed, draws=draws)
        self.seen_training = self.checked = self.removed = False
        self.found, self._reasons = plan.found, plan.reasons
        self._strengths, self._maxima = Strengths(), StepMaxima()
        self.order: Any = None
        self._ablations: list[ablation.Ablation] = []
        # The names of kernels that computed for all layers together.
        self._together: set[str] = set()
        self._handled: BaseException | None = None
        before = {id(parameter) for parameter in model.parameters()}
        self.fitted = attach(plan, self.shared)
        self.hooks: list[Any] = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            # A forward that failed half-way ends too, so that no later call sees the values it carried.
            model.register_forward_hook(self._after, always_call=True),
            model.register_load_state_dict_pre_hook(self._before_load),
        ]
        model.__dict__[HANDLE] = self
        self._initial = learned_parameters.fingerprints(model, [m for f in self.fitted for m in f.methods])
        # By name, because sharding replaces the parameter objects.
        self.brought = [name for name, parameter in model.named_parameters() if id(parameter) not in before]
        self._forgotten = loop_checks.Forgotten(self)
        self._replayed = loop_checks.Replayed(self.methods, followed=draws == "torch")

    def __deepcopy__(self, memo: dict[int, Any]) -> Regularized:
        twin = object.__new__(Regularized)
        memo[id(self)] = twin
        # Methods are frozen and compared by identity, so the copy shares them. It has its own training loop.
        twin.methods = list(self.methods)
        for name, value in self.__dict__.items():
            if name not in ("methods", "_forgotten"):
                setattr(twin, name, copy.deepcopy(value, memo))
        twin._forgotten = loop_checks.Forgotten(twin)
        return twin

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # Set either way: Ctrl-C may have ended the last forward without a call of `_after`.
        self.shared.differentiates = module.training and torch.is_grad_enabled()
        if self.shared.differentiates:
            self.seen_training = self.shared.fresh = True
            # A compiled graph is traced once and cannot count forwards.
            if not torch.compiler.is_compiling():
                self._forgotten.forward()
        if not torch.compiler.is_compiling():
            note_into(self._together)
            run = self.shared.penalties.begin(module, trains=self.shared.differentiates)
            if run is not None and module.training and any(m.maxima for m in self.methods):
                self._maxima.begin(self.fitted, run, trains=self.shared.differentiates)
            self._handled = sys.exc_info()[1]
            if module.training and not self._replayed.done:
                self._replayed.before((*args, *kwargs.values()), differentiates=self.shared.differentiates)
        self.shared.begin(module, args, kwargs)
        if self.shared.uneven and module.training:
            loop_checks.refuse_uneven(self.methods)
        if not torch.compiler.is_compiling():
            self.shared.forward.now().endings = list(layers_together.begin(self.methods, self.fitted, self.shared))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        # Checkpointed regions keep the state that their recomputation needs.
        self.shared.forward.end()
        if not torch.compiler.is_compiling():
            note_into(None)
            # The caller may be handling an exception itself, as a loop that tries a smaller batch.
            failed = sys.exc_info()[1] is not self._handled
            self.shared.penalties.end(output, failed=failed)
            if any(m.maxima for m in self.methods):
                self._maxima.end(self.fitted, counts=torch.is_grad_enabled() and not failed)
            if module.training and not torch.is_grad_enabled():
                self._replayed.after()
        self.shared.differentiates = False

    def _before_load(
        self, module: Any, state: dict[str, Any], prefix: str, meta: Any, strict: bool, *lists: Any
    ) -> None:
        if any(getattr(hook, "loading", False) for hook in self.hooks):
            # peft loads its adapters alone; what the methods learned follows
            return
        learned_parameters.explain_loading(self.model, self.methods, state, prefix, lists[-1])

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - PLUMBING)

    def strength_at(self, method: Method, name: str, step: int, site: Site) -> float:
        """Return the strength of a method on a site at an optimizer step, from its schedule or `set()`."""
        return self._strengths.at(method, name, step, site)

    def drop_penalties(self) -> bool:
        """Drop the penalties that were never read, and return whether there were any."""
        return self.shared.penalties.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run training forwards that leave the training's random draws and penalties as they are."""
        counters = [(f, f.passes.count(), f.reached) for f in self.fitted]
        shared = self.shared
        before, shared.penalties = shared.penalties, Penalties()
        self._maxima.put_aside(self.fitted)
        replayed, self._replayed = self._replayed, loop_checks.Replayed((), followed=True)
        seen, forgotten = (shared.fresh, self.seen_training), (self._forgotten.read, self._forgotten.unread)
        try:
            yield
        finally:
            shared.penalties, self._replayed = before, replayed
            self._maxima.forget(self.fitted)
            (shared.fresh, self.seen_training), (self._forgotten.read, self._forgotten.unread) = seen, forgotten
            for fitted, counter, reached in counters:
                fitted.passes.recount(counter)
                fitted.reached = reached

    def loss(self) -> Tensor:
        """Return and clear the sum of all penalties of the training forwards since the last call, a 0-d tensor.

        Raises:
            RuntimeError: if a site was not reached in the first training step or was replaced since, or if a method
                cannot act any more because adapters, freezing or sharding came after regularize().
        """
        self._alive()
        if self.seen_training:
            self._check_reached()
        entries = self.shared.penalties.take()
        self._forgotten.read, self._forgotten.unread = True, 0
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        total = penalties.joint_mean(entries, device, alone=self.shared.uneven)
        if self.shared.fresh:
            changed.check_followed(self.fitted)
            note_into(self._together)
            of_weights = penalties.of_weights(self.fitted, total.device)
            note_into(None)
            total = total if of_weights is None else total + of_weights
        self.shared.fresh = False
        return total

    def after_step(self) -> None:
        """Advance the schedules by one optimizer step and run the methods that act after a step.

        Raises:
            RuntimeError: if a site was not reached in the first training step, or was replaced in the model since.
        """
        self._alive()
        self._check_reached()
        self._forgotten.stepped = True
        self._replayed.stepped()
        # loss() has checked where it was read after the last forward.
        if self.shared.fresh:
            changed.check_followed(self.fitted)
        self.step += 1
        self._maxima.settle(self.fitted)
        pairs = [(m, state) for f in self.fitted for m, state in zip(f.methods, f.states, strict=True)]
        for kind in dict.fromkeys(type(method) for method, _ in pairs):
            kind.exchange([state for method, state in pairs if type(method) is kind])
        for f in self.fitted:
            f.reached = False
        note_into(self._together)
        for method, fits in penalties.by_method(self.fitted):
            if method.overrides("after_step"):
                method.after_steps(fits)
        note_into(None)
        self._strengths.write(self.fitted, self.step)

    def set(self, method: type[Method] | Method, **changes: float | Schedule) -> None:
        """Change strengths while training, without recompiling: `set(DropHead, p=0.1)` or `set(DropHead,
        p=VShape(...))`.

        Raises:
            ValueError: if the method is not fitted, a field cannot change while training, or a value is out of
                range.
            TypeError: if a value is neither a number nor a schedule.
        """
        self._alive()
        self._strengths.set(self.methods, method, changes)
        self._strengths.write(self.fitted, self.step)
        self._forgotten.listen_again()

    def ablate(self, layer: int | str, head: int | Sequence[int]) -> ablation.Ablation:
        """Make the output of heads zero before the output projection, in training and evaluation, until it is removed.

        Values that other layers read stay as they are, and a saved model has all its heads. A model without methods
        takes `regularize(model, allow_none=True)`.

        Args:
            layer: the index of an attention layer in `headwise.sites(model)`, or its name, with methods or not.
            head: the index of a query head, or several.

        Returns:
            The ablation, whose `remove()` lets the heads write again; as a context manager it ends with the block.

        Raises:
            ValueError: if there is no such layer or head, if the layer cannot be reached, or if its number of heads is
                not known yet.

        Example:
            >>> import torch, headwise
            >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
            >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
            >>> handle = headwise.regularize(model, allow_none=True)
            >>> with handle.ablate(1, 0):
            ...     out = model(torch.randn(4, 8, 16))
            >>> handle.ablate("layers.0.self_attn", [0, 1])
            Ablation('layers.0.self_attn', heads=[0, 1])
        """
        self._alive()
        candidate = ablation.candidate_at(self.found, layer)
        fitted = ablation.layer_at(self.model, self.fitted, candidate)
        try:
            made = ablation.Ablation(fitted, ablation.heads_of(fitted, head))
        finally:
            ablation.set_gate(fitted, fitted.gate)
        self._ablations = [*(one for one in self._ablations if one.holds), made]
        return made

    def idle(self) -> str:
        """Return a message about the methods that did nothing in this training so far; empty if all acted."""
        # a checked first step has reached every layer
        return self._forgotten.idle(reached=self.checked and self.step > 0)

    def _check_reached(self) -> None:
        if self.fitted:
            changed.check_reached(self.model, self.fitted, first=not self.checked)
            self.checked = True

    def _alive(self) -> None:
        if self.removed:
            raise RuntimeError(
                "this model is no longer regularized, since remove() or fold() was called: call regularize() again, or "
                "save it like any other model"
            )

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the methods added, for an optimizer that was made before them."""
        parameters = dict(self.model.named_parameters())
        return [parameters[name] for name in self.brought if name in parameters]

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: steps, draws and strengths from `set()`, as numbers and text."""
        state = progress(self.step, self.fitted, self._strengths, self.methods) | {"draws": self.shared.draws}
        return state if self.order is None else state | {"order": self.order.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the `state()` of an earlier run with the same layers and methods.

        Raises:
            ValueError: if it belongs to another model or other methods; nothing is loaded then.
        """
        self._alive()
        check_progress(state, self.fitted, self._strengths, self.methods, self.shared.draws)
        self.step = load_progress(state, self.fitted, self._strengths, self.methods)
        self.checked = bool(self.step)
        if self.order is not None:
            self.order.load(state.get("order"))
        self._forgotten.listen_again()

    def report(self) -> Coverage:
        """Return for every attention-like module whether it is regularized, read, skipped, not applicable or
        unreachable, and why."""
        drawn, together = self.shared.draws, sorted(self._together)
        return coverage(self.found, self.fitted, self._reasons, self._strengths.shown, drawn, together)

    def remove(self, discard: bool = False) -> None:
        """Remove the methods. Before any step this restores the model's bits and keys; trained host weights stay.

        Args:
            discard: drop learned parameters and reparametrizations that were trained.

        Raises:
            RuntimeError: if a method holds learned parameters after training, or the methods were removed before.
        """
        self._alive()
        is_a("discard", discard, bool, "True or False")
        if not discard:
            learned_parameters.check_removable(self.fitted, self.model, self._initial, self.step)
        detach(self.fitted, fold=False)
        self.fitted = []
        self._leave()

    def fold(self) -> None:
        """Prepare the model for deployment.

        Reparametrizations become plain weights, bit for bit those of the model in evaluation. Methods that act in
        training only are removed. Methods that act in evaluation stay, and then the handle stays too.

        Raises:
            RuntimeError: if heads are ablated, or the methods were removed before.
        """
        self._alive()
        ablation.refuse_held(self._ablations)
        remaining = fold_methods(self.fitted)
        detach([f for f in self.fitted if not any(f is k for k in remaining)], fold=True)
        self.fitted = remaining
        self.methods = [m for m in self.methods if any(m is k for f in remaining for k in f.methods)]
        if not remaining:
            self._leave()

    def _leave(self) -> None:
        for one in self._ablations:
            one.remove()
        for hook in self.hooks:
            hook.remove()
        self.shared.forward.end()
        self.shared.penalties.clear()
        self._forgotten.stop()
        self.model.__dict__.pop(HANDLE, None)
        self.removed = True

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write the model, its methods and what they learned into a folder; `headwise.load_pretrained` reads it.

        Plain loaders find the weights that the model uses in evaluation. If a method also acts in evaluation, a weight
        named `trained_with_...` makes such loaders warn about it.

        Args:
            folder: created if it does not exist; weights of an earlier save in it are removed.
            options: of the model's own `save_pretrained`, for models of transformers (`max_shard_size`).

        Raises:
            ValueError: if the model holds adapters, shards or quantized weights.
            ImportError: if safetensors is not installed; the message names the extra.

        Example:
            >>> import tempfile, torch, headwise
            >>> from transformers import BertConfig, BertModel
            >>> sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
            >>> config = BertConfig(vocab_size=64, **sizes)
            >>> handle = headwise.regularize(
            ...     BertModel(config), headwise.NeuTRENO(strength=0.6), headwise.DropHead(p=0.2)
            ... )
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     handle.save_pretrained(folder)
            ...     headwise.load_pretrained(BertModel(config), folder)
            Regularized(NeuTRENO(strength=0.6) + DropHead(p=0.2), 2 sites)
        """
        self._alive()
        is_path("folder", folder)
        saving.save(self, folder, **options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Save a model with its attention methods",
        endpoint: str | None = None,
    ) -> str:
        """Save the model as `save_pretrained` does into a repository of a hub, and return the address of the commit.

        Args:
            repo_id: such as `"name/model"`; created if it does not exist.
            private: whether a new repository is private; by default the hub's setting decides.
            token: of the hub; by default the one of `hf auth login`.
            commit_message: of the commit.
            endpoint: the address of another hub.

        Raises:
            ValueError: as `save_pretrained` does.
            ImportError: if huggingface_hub is not installed; the message names the extra.
        """
        self._alive()
        return saving.push(self, repo_id, private=private, token=token, message=commit_message, endpoint=endpoint)

    def export(self, folder: str | Path, example: Any = None, **options: Any) -> saving.Exported:
        """Write the model as a stock model of transformers that runs without headwise, if that is exact.

        Reparametrized weights become plain ones, and methods that act in training only are left out. The handle and
        the model do not change.

        Args:
            folder: created if it does not exist; weights of an earlier save in it are removed.
            example: a batch (tensor, tuple of arguments or dict of keywords): the folder is loaded again, and its
                outputs on the batch are compared with the model's.
            options: of the model's own `save_pretrained` (`max_shard_size`).

        Raises:
            ValueError: if a method cannot be folded, the model is not one of transformers, or it holds adapters,
                shards or quantized weights.
            RuntimeError: if outputs differ by more than 1e-5 of the largest, in half precision by more than eight
                roundings.
        """
        self._alive()
        is_path("folder", folder)
        return saving.export(self, folder, example, **options)

    def callback(self) -> Any:
        """Return a `transformers.TrainerCallback` that calls `after_step()` after each optimizer step."""
        return transformers_trainer.callback(self)

    def compute_loss_func(self, base: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
        """Return a `compute_loss_func` for transformers.Trainer that adds `loss()`, gradient accumulation included."""
        is_function("base", base)
        return transformers_trainer.compute_loss_func(self, base)

    def _repr_html_(self) -> str:
        rows = [(repr(method), method.summary()) for method in self.methods]
        status = "removed" if self.removed else f"at step {self.step}"
        table = html_table(f"{self!r}, {status}", ("method", "what it does"), rows)
        return table if self.removed else table + self.report()._repr_html_()

    def __repr__(self) -> str:
        return f"Regularized({' + '.join(map(repr, self.methods)) or 'no method'}, {len(self.fitted)} sites)"


def handle(model: nn.Module) -> Regularized:
    """Return the handle of a regularized model, which may be a deep copy, compiled or wrapped for distribution.

    Raises:
        ValueError: if the model is not regularized.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> made = headwise.regularize(model, headwise.DropHead(p=0.2))
        >>> headwise.handle(model) is made
        True
    """
    regularized = kept_handle(model)
    assert isinstance(regularized, Regularized)
    return regularized
