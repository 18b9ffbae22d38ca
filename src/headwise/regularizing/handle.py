"""Regularize: fit methods onto the attention layers of a model that already exists."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise import hosts
from headwise.core.call import Call
from headwise.core.forward import Forward
from headwise.core.method import Method
from headwise.core.recompute import Pass
from headwise.core.schedule import Schedule
from headwise.core.site import Site
from headwise.hosts.host import Found
from headwise.regularizing import changed, learned_parameters, penalties, reach, shared_values
from headwise.regularizing.coverage import Coverage, Row
from headwise.regularizing.fitted_site import Fitted
from headwise.regularizing.forgotten import Forgotten
from headwise.regularizing.plan import HANDLE, Plan, Where, handle, plan
from headwise.regularizing.strengths import Strengths

__all__ = ["Regularized", "handle", "regularize"]


def regularize(
    model: nn.Module, *methods: Method, where: Where = None, example: Any = None, seed: int = 0, allow_none: bool = False
) -> Regularized:
    """Fit methods onto the attention layers of a model, in place, and give the handle.

    Args:
        model: any module whose attention goes through transformers' attention interface, `nn.MultiheadAttention` or
            `F.scaled_dot_product_attention`.
        methods: in order of action; stages act in their fixed order, methods within a stage as written.
        where: which sites change: a function of `Site`, or names of sites; None takes every site on which the methods
            have a meaning.
        example: a batch (tensor, tuple of arguments or dict of keywords). The model runs on it once, without gradients,
            with random state and buffers restored, where heads or shapes cannot be known otherwise.
        seed: of the methods' draws; they never touch torch's generators.
        allow_none: accept no methods at all (a handle that only reads).

    Raises:
        ValueError: with all problems at once, where a site asked for cannot be reached, a method has no meaning anywhere,
            names or settings are wrong; the model is untouched then.
    """
    made = plan(model, list(methods), where, allow_none, example)
    problems = _unknown(made)
    if problems:
        raise ValueError("\n".join(problems))
    handle = Regularized(model, made, seed)
    for found in made.found:
        found.site.example = None
    return handle


def _unknown(made: Plan) -> list[str]:
    problems = []
    for site, methods in made.chosen:
        learned = [m for m in methods if m.learns]
        missing = sorted({n for m in learned for n in m.shapes if getattr(site, n) is None})
        if learned and missing:
            problems.append(
                f"{learned[0]!r} learns parameters whose shapes on {site.name} cannot be known from the module "
                f"({', '.join(missing)}): pass example=batch to regularize()"
            )
    return problems


class Regularized:
    """The handle of a regularized model: its loss, its step, its report, and the way back."""

    def __init__(self, model: nn.Module, made: Plan, seed: int) -> None:
        self.model, self.methods, self.seed = model, made.methods, seed
        self.step = 0
        self.forward = Forward()
        self.fresh = False
        self.seen_training = False
        self.differentiates = False
        self.checked = False
        self.removed = False
        self._found: list[Found] = made.found
        self._reasons = made.reasons
        self._penalties: list[penalties.Entry] = []
        self._strengths = Strengths()
        self._hooks: list[Any] = []
        self.fitted: list[Fitted] = []
        before = {id(parameter) for parameter in model.parameters()}
        self._attach(made)
        # By name: sharding puts other objects into the same places.
        self.brought = [name for name, parameter in model.named_parameters() if id(parameter) not in before]
        self._forgotten = Forgotten(self)

    # Fitting

    def _attach(self, made: Plan) -> None:
        adapters = {f.site: f.adapter for f in made.found}
        undo: list[Callable[[], None]] = []
        try:
            for site, methods in made.chosen:
                fitted = Fitted(site, methods, self)
                self.fitted.append(fitted)
                fitted.shares_values = site in made.read
                for method, state in zip(methods, fitted.states, strict=True):
                    undo.append(state.clear)
                    if method.overrides("build"):
                        method.build(site, state)
                    if method.overrides("unbuild"):
                        undo.append(partial(method.unbuild, site, state))
                adapter = adapters[site]
                assert adapter is not None
                undo.append(adapter.detach)
                adapter.attach(fitted)
        except BaseException:
            # A site no longer counts as fitted when its adapter leaves: the last one gives back what all share.
            for fitted in self.fitted:
                fitted.alive = False
            for step in reversed(undo):
                step()
            raise
        self._adapters = {fitted.site: adapters[fitted.site] for fitted in self.fitted}
        self._hooks = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            # A forward that failed half-way ends too: what it carried is no later call's.
            self.model.register_forward_hook(self._after, always_call=True),
            self.model.register_load_state_dict_pre_hook(self._before_load),
        ]
        self.model.__dict__[HANDLE] = self
        self._initial = learned_parameters.fingerprints(self)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.seen_training = self.fresh = self.differentiates = True
            if not torch.compiler.is_compiling():
                self._forgotten.forward()
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 0]
        self.forward.begin(tensors[0].size(0) if tensors else None)

    def _before_load(self, module: Any, state: dict[str, Any], prefix: str, meta: Any, strict: bool, *lists: Any) -> None:
        learned_parameters.explain_loading(self, state, prefix, lists[-1])

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        # Checkpointed regions keep what their recompute needs themselves.
        self.forward.end()
        self.differentiates = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Regularized:
        twin = object.__new__(Regularized)
        memo[id(self)] = twin
        passing: dict[str, Any] = {"_penalties": []}
        shared = {"methods": list(self.methods), "_strengths": self._strengths.copy(), "_forgotten": None}
        for name, value in self.__dict__.items():
            if name in passing or name in shared:
                twin.__dict__[name] = passing.get(name, shared.get(name))
            else:
                twin.__dict__[name] = copy.deepcopy(value, memo)
        # The copy has a training loop of its own.
        twin._forgotten = Forgotten(twin)
        return twin

    # What sites ask of the handle

    def count(self, method: Method) -> int:
        """Give the number of sites on which a method acts."""
        return sum(any(m is method for m in f.methods) for f in self.fitted)

    def share_values(self, call: Call) -> None:
        """Keep the values of a stack's first self attention for the layers above."""
        shared_values.share(self.forward, call)

    def first_values(self, call: Call) -> Tensor | None:
        """Give V0 of the call's stack in this forward, or None on the first site itself."""
        return shared_values.first_values(self.forward, call)

    def record(self, call: Call) -> None:
        """Take the penalties of a call, unless the call repeats an earlier one."""
        this: Pass = call.open_pass()
        if this.again is True or not torch.is_grad_enabled():
            return
        for total, weight in call.penalties:
            self._penalties.append((total, weight, this.again, None))
        for squares, count, strength in call.norms:
            self._penalties.append((squares, count, this.again, strength))

    def strength_at(self, method: Method, name: str, step: int, site: Site) -> float:
        """Give the strength of a method on a site at an optimizer step, as its schedule or `set()` say."""
        return self._strengths.at(method, name, step, site)

    def drop_penalties(self) -> bool:
        """Forget the penalties that were never read, and tell whether there were any."""
        entries, self._penalties = self._penalties, []
        return bool(entries)

    # What the training loop calls

    def loss(self) -> Tensor:
        """Give the sum of all penalties over the training forwards since it was last read, a 0-d tensor; then clear it.

        Raises:
            RuntimeError: where a site was not reached in the first training step or was replaced since, or adapters, freezing or shards that came after
                regularize() leave a method nothing to act on.
        """
        self._alive()
        if self.seen_training:
            self._check_reached()
        entries, self._penalties = self._penalties, []
        self._forgotten.read, self._forgotten.unread = True, 0
        total = penalties.total(entries, self._device())
        if self.fresh:
            changed.check(self.fitted)
            total = total + self._weight_penalties(total)
        self.fresh = False
        return total

    def _weight_penalties(self, zero: Tensor) -> Tensor:
        terms = [
            method.penalty(f.site, state)
            for f in self.fitted
            for method, state in zip(f.methods, f.states, strict=True)
            if method.overrides("penalty")
        ]
        return torch.stack([t.to(zero.device) for t in terms]).sum() if terms else torch.zeros_like(zero)

    def after_step(self) -> None:
        """Tell the methods that the optimizer stepped: schedules move on, and methods that act after the step act.

        Raises:
            RuntimeError: where a site was not reached in the first training step, or was replaced in the model since.
        """
        self._alive()
        self._check_reached()
        self._forgotten.stepped = True
        changed.check(self.fitted)
        self.step += 1
        for f in self.fitted:
            f.reached = False
            for method, state in zip(f.methods, f.states, strict=True):
                if method.overrides("after_step"):
                    method.after_step(f.site, state)
        self._strengths.write(self.fitted, self.step)

    def set(self, method: type[Method] | Method, **changes: float | Schedule) -> None:
        """Change strengths while training, without recompiling: `set(DropHead, p=0.1)` or `set(DropHead, p=VShape(...))`.

        Raises:
            ValueError: where the method is not fitted, a field cannot change while training, or a value is out of range.
            TypeError: where a value is neither a number nor a schedule.
        """
        self._alive()
        self._strengths.set(self.methods, method, changes)
        self._strengths.write(self.fitted, self.step)
        if not self._forgotten.stepped:
            self._forgotten.listen()

    def _check_reached(self) -> None:
        if self.fitted:
            reach.check(self.model, self.fitted, first=not self.checked)
            self.checked = True

    def _alive(self) -> None:
        if self.removed:
            raise RuntimeError("this model is no longer regularized: remove() or fold() was called before")

    def _device(self) -> torch.device:
        first = next(self.model.parameters(), None)
        return first.device if first is not None else torch.device("cpu")

    # State

    def parameters(self) -> list[nn.Parameter]:
        """Give the parameters that the methods brought along, for an optimizer that was made before them."""
        known = dict(self.model.named_parameters())
        return [known[name] for name in self.brought if name in known]

    def state(self) -> dict[str, Any]:
        """Give what a resumed run needs to go on: steps, draws and the strengths that `set()` chose, as plain numbers and text."""
        counters = {f.site.name: int(f.counter) for f in self.fitted}
        return {"step": self.step, "counters": counters, "strengths": self._strengths.state(self.methods)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take `state()` of an earlier run with the same layers and methods.

        Raises:
            ValueError: where it is that of another model or of other methods; nothing is taken then.
        """
        self._alive()
        self._check_state(state)
        self.step, self.checked = int(state["step"]), bool(state["step"])
        for f in self.fitted:
            f.counter.fill_(int(state["counters"][f.site.name]))
        self._strengths.load_state(self.methods, state.get("strengths", ()))
        self._strengths.write(self.fitted, self.step)

    def _check_state(self, state: dict[str, Any]) -> None:
        own, other = {f.site.name for f in self.fitted}, set(state["counters"])
        if own != other:
            lines = [f"{which}: {', '.join(sorted(names))}" for which, names in (("only here", own - other), ("only there", other - own)) if names]
            raise ValueError(
                f"this state is that of a model with other regularized layers ({'; '.join(lines)}): regularize the model as it was "
                "when state() was called, with the same where="
            )
        self._strengths.check_state(self.methods, state.get("strengths", ()))

    # Reading and leaving

    def report(self) -> Coverage:
        """Say of every attention-like module whether it is regularized, read, skipped, not applicable or unreachable, and why."""
        rows = []
        fitted = {f.site: f for f in self.fitted}
        for found in self._found:
            f = fitted.get(found.site)
            acting = [m for m in f.methods if not (m.carries and f.shares_values)] if f is not None else []
            if f is not None and acting:
                rows.append(Row(found.site.name, "regularized", " + ".join(map(self._strengths.shown, acting)), tuple(sorted(f.kernels))))
            elif f is not None:
                rows.append(Row(found.site.name, "read", "its values are carried to the layers above", ()))
            else:
                status, reason = self._reasons[found.site]
                rows.append(Row(found.site.name, status, reason, ()))
        notes = [f"{f.site.name}: {r}" for f in self.fitted for r in [self._reasons.get(f.site, ("", ""))[1]] if r]
        return Coverage(rows, notes)

    def remove(self, discard: bool = False) -> None:
        """Take the methods off: before any step the same bits and keys as before; trained host weights stay.

        Args:
            discard: drop learned parameters and reparametrizations that were trained.

        Raises:
            RuntimeError: after training, where a method holds learned parameters; and when removed before.
        """
        self._alive()
        learners = sorted({repr(m) for f in self.fitted for m in f.methods if m.learns})
        if learners and not discard and (self.step > 0 or learned_parameters.moved(self, self._initial)):
            raise RuntimeError(
                f"{' and '.join(learners)} learned something{f' in {self.step} steps' if self.step else ''} that remove() would "
                "lose: fold() keeps what can be kept, remove(discard=True) drops it"
            )
        self._detach(self.fitted, fold=False)
        self.fitted = []
        self._leave()

    def fold(self) -> None:
        """Make the model ready for deployment: reparametrizations become plain weights, bit for bit the eval model's, and
        methods that act in training alone go. Methods that act in evaluation stay, and so does the handle then."""
        self._alive()
        kept: list[Fitted] = []
        for f in self.fitted:
            staying = [m for m in f.methods if m.acts_in(training=False) and not m.overrides("fold")]
            for method in [m for m in f.methods if not any(m is s for s in staying)]:
                f.drop(method, fold=True)
            if staying or f.shares_values:
                kept.append(f)
        if not any(f.methods for f in kept):
            kept = []
        self._detach([f for f in self.fitted if not any(f is k for k in kept)], fold=True)
        self.fitted = kept
        if not kept:
            self._leave()
        self.methods = [m for m in self.methods if any(m is k for f in kept for k in f.methods)]

    def _detach(self, which: Iterable[Fitted], fold: bool) -> None:
        for f in list(which):
            for method in list(f.methods):
                f.drop(method, fold=fold)
            f.alive = False
            adapter = self._adapters.pop(f.site)
            assert adapter is not None
            adapter.detach()

    def _leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.forward.end()
        self._penalties.clear()
        self._forgotten.stop()
        self.model.__dict__.pop(HANDLE, None)
        self.removed = True

    # Trainers

    def callback(self) -> Any:
        """Give a `transformers.TrainerCallback` that calls `after_step()` after each optimizer step."""
        from headwise.regularizing.trainer_hook import callback

        return callback(self)

    def compute_loss_func(self, base: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
        """Give a `compute_loss_func` for transformers.Trainer that adds `loss()`, gradient accumulation included."""
        from headwise.regularizing.trainer_hook import compute_loss_func

        return compute_loss_func(self, base)

    def __repr__(self) -> str:
        return f"Regularized({' + '.join(map(repr, self.methods)) or 'no method'}, {len(self.fitted)} sites)"


def sites(model: nn.Module) -> list[Site]:
    """Give the reachable attention sites of a model, regularized or not."""
    return [f.site for f in hosts.find(model) if f.adapter is not None]
