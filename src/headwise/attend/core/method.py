"""Method: one regularizer, written as stages that act on one attention call."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, dataclass_transform

from headwise.attend.core.settings import check_type, declared_types, no_setting, plain

if TYPE_CHECKING:
    from torch import Tensor

    from headwise.attend.core.call import Call
    from headwise.attend.core.matrix_free_forms import Dropping, LogitEdit, RowReadings
    from headwise.attend.core.method_state import MethodState
    from headwise.attend.core.site import Site

REGISTRY: dict[str, type[Method]] = {}

STAGES = (
    "build", "hidden", "inputs", "around", "logits", "normalize", "weights", "read", "output", "branch", "after_step",
    "penalty",
)  # fmt: skip
TWINS = {
    "logits": ("scores", "keep", "drop", "edit", "attend"),
    "weights": ("attend", "keep", "drop"),
    "read": ("read_free",),
}

CALL_STAGES = ("inputs", "around", "logits", "weights", "read", "read_free", "output")

Attend = Callable[["Tensor"], "Tensor"]


class Methods(list["Method"]):
    """A list of methods in order of action, made by `A(...) + B(...)`; `parse` reads its repr."""

    # list.__add__ takes lists only; here a single method may follow too.
    def __add__(self, other: Any) -> Methods:  # type: ignore[override]
        return Methods([*self, *([other] if isinstance(other, Method) else other)])

    def __repr__(self) -> str:
        return " + ".join(map(repr, self))


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Method:
    """One way to regularize attention: settings as fields, behaviour as overridden stages.

    Subclassing makes the class a frozen dataclass with keyword-only fields and registers it by its name. The stages
    that a method overrides decide what is computed; a stage that it does not override is skipped.

    Shapes: B batch, H query heads, T queries, N keys, D head size, C hidden size.

    Example:
        >>> import torch, headwise
        >>> class Halved(headwise.Method):
        ...     \"\"\"Halves the attention weights.\"\"\"
        ...     share: float = 0.5
        ...     neutral = {"share": 1.0}
        ...     def weights(self, a, call):
        ...         return self.share * a
        >>> headwise.regularize(torch.nn.MultiheadAttention(16, 2, batch_first=True), Halved(share=0.4))
        Regularized(Halved(share=0.4), 1 sites)
    """

    neutral: ClassVar[dict[str, Any] | None] = None
    """Settings at which the method changes nothing, or None if there are none. The host's output keeps every bit while
    the same kernel runs, and changes only by rounding where another one does. For a method that learns or
    reparametrizes, this holds at the start, before any step. If wrong, an ablation against this setting compares two
    different things. At exactly `{"strength": 0.0}`, in a class that penalizes and has `"strength"` in `live`, the
    host's own kernel runs."""
    no_neutral: ClassVar[str] = ""
    """The reason why there is no neutral setting, shown on the method's page. A method needs either this or
    `neutral`."""
    strong: ClassVar[dict[str, Any]] = {}
    """Settings at which the method visibly changes the output, the loss or, after a step, the weights; fields that are
    not named keep their defaults, so `{}` means the defaults. If the class learns and has a neutral setting,
    `check_method` first adds 0.5 to the parameters of `state.parameter` and `state.module`. If the settings are too
    weak, the tests cannot tell whether the method acts."""
    live: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that may change during training. Read them with `call.value(self, name)`, or in
    `penalty` and `after_step`, which have no call, with `state.value(name)`: in a stage, `self.name` keeps its first
    value whatever `set()` changes. `set()` and schedules refuse all other fields. Override `at` for a value that
    depends on the step or on the depth; it alone sees a number from `set()` in `self.name`. `tune` searches the first
    name; without any, the first field if it is a float."""
    acts: ClassVar[Literal["train", "both"]] = "train"
    """`"train"`: only in training; `"both"`: also in evaluation. With `"train"`, `fold()` removes the method, so a
    method whose paper keeps it in evaluation needs `"both"`. What `after_step` writes into the weights stays in
    evaluation with either, and so does what `build` did to them; `fold()` keeps it. Override `acts_in` if it depends on
    the settings."""
    random: ClassVar[bool] = False
    """Whether the method draws random numbers, in any stage. If wrongly False, each block of a large matrix draws its
    own numbers, so that values depend on the size of the call; calls whose rows are not samples are accepted, and draw
    per row; `watch` reads logits after keys are dropped at random; and reentrant checkpointing is reported late, in
    backward. Override `draws` if it depends on the settings."""
    penalizes: ClassVar[bool] = False
    """Whether the method calls `call.penalize`, or has a `penalty`. If wrongly False, a training that never calls
    `loss()`, or that runs a layer twice by reentrant checkpointing, raises no error."""
    carries: ClassVar[bool] = False
    """Whether the method reads `call.first_values()`. Layers that attend in windows, or that pool queries or keys, are
    refused, because these values belong to other tokens there. `reads_own_tokens` returns the same by default. If
    wrongly False, the first layer keeps no values, and the call raises RuntimeError."""
    self_only: ClassVar[bool] = False
    """Whether the method requires queries and keys to be the same tokens. If True, cross attention and layers that pool
    queries or keys are refused; if wrongly False, the method mixes tokens of two sequences by position, or fails on
    their lengths."""
    learns: ClassVar[bool] = False
    """Whether `build` makes parameters. If wrongly False, `regularize` does not ask for the shapes they need,
    `remove()` drops what they learned without an error, and the error about parameters in no optimizer does not name
    the method. Override `has_parameters` if it depends on the settings."""
    shapes: ClassVar[tuple[str, ...]] = ("heads", "head_dim", "hidden")
    """Fields of `Site` that `build` reads, for a method that learns. `regularize` asks for `example=` if one is
    unknown. `"hidden"` also declares that the method reads the layer's input: calls whose packing only attention knows
    are refused. A field that is not named here may be None in `build`, which must then raise its own error: version 2
    of `DifferentialAttention` does so for `hidden`, which version 1 does not need."""
    commutes_with_dropout: ClassVar[bool] = False
    """Whether `attend` is also exact if the host's dropout acts on the weights before the edit: the fused kernel drops
    them there, and the textbook form after the edit. If wrongly True, the two forms differ wherever the host has
    dropout; False computes the matrix there and is always correct. Also True for a map that replaces the softmax and
    applies `call.dropout` itself."""
    rowwise: ClassVar[bool] = False
    """Whether a query's row of the matrix is read and written independently of other rows (the masks and draws of the
    whole call may be read), so that a large matrix may be computed in blocks of queries. It matters only for methods
    with `logits`, `weights`, `read` or `read_free`. A penalty is rowwise if each block can penalize its own rows,
    because `call.penalize` combines the blocks; so is a maximum that each block updates. If wrongly True, results
    change with the size of the call; False takes more memory and is always correct."""
    replaces_logits: ClassVar[bool] = False
    """Whether `logits` computes new logits instead of editing its input. If True, `regularize` refuses methods before
    it that edit logits, except those that only drop keys (`keep`): entries of -inf must stay -inf. Penalties
    together with it read the matrix. If wrongly False, earlier edits are silently lost, and if the class has an
    `attend`, penalties silently read the ordinary softmax."""
    negative: ClassVar[Literal["", "makes", "refuses"]] = ""
    """`"makes"`: edited weights may be negative. `"refuses"`: the method needs weights that are not, and `regularize`
    refuses it beside one that makes them. If wrongly empty, the pair gives nan."""
    only_rounding: ClassVar[bool] = False
    """Whether the method changes nothing but rounding, at any setting. Only tests use it: if True they require that the
    output stays the same up to rounding, else that the strong setting acts."""
    maxima: ClassVar[tuple[str, ...]] = ()
    """Buffers that hold maxima over the training forwards of a step, and -inf after it. What forwards wrote that no
    backward went through, such as a skipped batch, is left out of them before `exchange` and `after_step`. A buffer
    that is not named here counts such forwards too."""
    over_layers: ClassVar[Literal["sum", "mean"]] = "sum"
    """Whether penalties of `call.penalize` are summed or averaged over layers; those of `penalty` are summed. If wrong,
    the paper's strength is off by the number of layers."""
    cost: ClassVar[Literal["edit", "edit by each head"]] = "edit"
    """`"edit"`: `attend` edits one map per head. `"edit by each head"`: it applies every head's map to every head's
    values. It sets the size up to which the matrix is faster on a CPU. A wrong value costs time, and changes no
    result."""
    paper: ClassVar[str] = ""
    """The source: the second paragraph of the docstring, filled in when the class is defined. Do not set it."""
    kinds: ClassVar[dict[str, frozenset[Any]]] = {}
    """The types that each field accepts, from its annotation, filled in when the class is defined. Do not set it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Method not in cls.__bases__:
            raise TypeError(f"{cls.__name__} must derive from Method itself: subclasses of a method are not supported")
        dataclasses.dataclass(frozen=True, kw_only=True, repr=False)(cls)
        cls.kinds = declared_types(cls)
        # A user's class may be redefined, as in a notebook, but must not replace one of headwise.
        if not cls.__module__.startswith("headwise."):
            existing = REGISTRY.get(cls.__name__)
            if existing is not None and existing.__module__.startswith("headwise."):
                raise TypeError(f"a method named {cls.__name__!r} exists already in {existing.__module__}")
        parts = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
        cls.paper = " ".join(parts[1].split()) if len(parts) > 1 else ""
        REGISTRY[cls.__name__] = cls

    # Gives clearer errors than the __init__ of a dataclass. Copies and pickles pass no settings here.
    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Raise TypeError for a positional argument or an unknown setting."""
        known = list(getattr(cls, "__dataclass_fields__", {}))
        if args:
            name = known[0] if known else "name"
            raise TypeError(f"{cls.__name__} takes its settings by name, such as {name}={args[0]!r}")
        for key in settings:
            if key not in known:
                raise TypeError(no_setting(cls.__name__, key, known))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kinds, neutral = type(self).kinds, self.neutral or {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # each subclass is made a dataclass
            name = field.name
            value = plain(getattr(self, name), kinds[name])
            check_type(type(self).__name__, field, value, kinds[name], neutral.get(name))
            # The class is frozen; only this bypass can write.
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise ValueError if a setting is out of range. Without it, every value of a field's type is accepted."""

    def __add__(self, other: Method | list[Method]) -> Methods:
        """Return the composition: this method first, then the other."""
        return Methods([self]) + other

    def require(self, condition: bool, message: str) -> None:
        """Raise ValueError with `message`, prefixed by the class name, unless `condition` holds."""
        if not condition:
            raise ValueError(f"{type(self).__name__}: {message}")

    def choose(self, name: str, *allowed: Any) -> None:
        """Raise ValueError unless the field `name` is one of `allowed`."""
        value = getattr(self, name)
        self.require(value in allowed, f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")

    def refuse(self, site: Site) -> str | None:
        """Return why the method does not apply to `site`, or None if it does.

        A verb phrase, such as "needs heads of equal size": reports put the name of the class before it.
        """
        return None

    def at(self, name: str, step: int, site: Site) -> float:
        """Return the value of the live field `name` at optimizer step `step` on `site`; by default the field itself.

        `call.value` reads it. A number from `set()` replaces the field first; a schedule from `set()` replaces `at`.
        """
        return float(getattr(self, name))

    def acts_in(self, training: bool) -> bool:
        """Return whether the method acts in this mode with its settings; by default as `acts` declares.

        Where it returns False, no stage of a forward runs.
        """
        return self.acts == "both" or (self.acts == "train" and training)

    def counts_batches(self) -> bool:
        """Return whether each training forward updates the method's state, so that a recompute would count twice.

        By default False. If True, `loss()` and `after_step()` refuse reentrant checkpointing, which hides a recompute.
        The method itself must count only where `call.open_pass().again` is False.
        """
        return False

    def draws(self) -> bool:
        """Return whether the method draws random numbers with its settings; by default as `random` declares."""
        return self.random

    def has_parameters(self) -> bool:
        """Return whether `build` makes parameters with its settings; by default as `learns` declares."""
        return self.learns

    def reads_own_tokens(self) -> bool:
        """Return whether the method compares a query with its own key or value; by default as `carries` declares.

        If so, hosts with a cache or extra keys reorder the keys so that those of the queries are the last.
        """
        return self.carries

    # The stages, declared for type checkers and readers only: `overrides` asks whether a class defines them.
    if TYPE_CHECKING:

        def build(self, site: Site, state: MethodState) -> None:
            """Make the parameters and reparametrizations of one site.

            Register them with `state.parameter`, `state.buffer` or `state.module`. Anything stored elsewhere is missing
            from state dicts, does not move between devices, and stays after `remove()`. Stages read parameters and
            buffers with `call.state(self).tensor(name)`.
            """
            ...

        def unbuild(self, site: Site, state: MethodState) -> None:
            """Undo the changes that `build` made to the host's own modules.

            Without it, `remove()` leaves such changes behind. The contents of `state` are removed automatically.
            """
            ...

        def fold(self, site: Site, state: MethodState) -> None:
            """Write the method's effect in evaluation into the host's plain weights, bit for bit.

            Without it, `fold()` leaves a method that acts in evaluation in place.
            """
            ...

        def hidden(self, x: Tensor, call: Call) -> Tensor:
            """Return the edited input of the layer, for x (B, T, C).

            `call` has no queries and keys yet: only `hidden`, batch, device and random draws.
            """
            ...

        def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
            """Return the edited q (B, H, T, D), k (B, H, N, D) and v (B, H, N, Dv), with the same shapes and dtypes."""
            ...

        def around(self, v: Tensor, call: Call) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            """Return the values (B, H, N, Dv) that attention takes instead of v, and the function of its output.

            The function gets o (B, H, T, Dv) and returns what the `output` stages see. All methods see the plain v.
            """
            ...

        def logits(self, s: Tensor, call: Call) -> Tensor:
            """Return the edited logits, for scaled and masked logits s (B, H, T, N).

            Entries of -inf must stay -inf: a finite number lets a query see a key that its mask forbids. Nothing that
            learns may multiply them: 0 · inf is NaN in its gradient.
            """
            ...

        def scores(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor] | None:
            """Return q and k whose products are the edited logits, or None where this is not exact.

            The fast form of `logits`. If the two disagree, results depend on the size of the call. A float mask is
            added afterwards, whereas `logits` gets the sum.
            """
            ...

        def keep(self, call: Call) -> Tensor | None:
            """Return which keys stay, bool, broadcastable to (B, H, T, N), or None where a mask is not exact.

            The fast form of `logits` that drops keys, and of `weights` that drops and renormalises. It must use the
            same random draw as the textbook form.
            """
            ...

        def drop(self, call: Call) -> Dropping | None:
            """Return the elements of the matrix that are dropped, from `call.dropping`, or None where it is not exact.

            The fast form of `logits` (with `renormalize`) and of `weights` that drop single elements. It must use the
            same random draw as the textbook form.
            """
            ...

        def edit(self, call: Call) -> LogitEdit | None:
            """Return the edit as one that kernels know, or None where none of them is exact.

            The fast form of `logits` on CUDA; without kernels it is not asked.
            """
            ...

        def normalize(self, s: Tensor, call: Call) -> Tensor:
            """Return the weights (B, H, T, N) of the final logits s, which replace their softmax.

            Only in a class with `logits`. Entries of -inf, and keys that `call.allowed()` forbids, must get weight 0.
            """
            ...

        def weights(self, a: Tensor, call: Call) -> Tensor:
            """Return the edited attention weights, for weights a (B, H, T, N), in their dtype.

            Padded keys have weight 0 and must keep it: use `call.uniform()` and `call.allowed()`.
            """
            ...

        def attend(self, attend: Attend, call: Call) -> Attend | None:
            """Return the edited map of values (B, H, N, Dv) to outputs (B, H, T, Dv), or None where it is not exact.

            The fast form of `weights`. If the two disagree, results depend on the size of the call. In a class with
            `logits` and without `weights`, the map replaces the softmax.
            """
            ...

        def read(self, a: Tensor, call: Call) -> None:
            """Penalise with `call.penalize`, or record, the weights a (B, H, T, N) before any method edits them.

            The return value is ignored: edits belong in `weights`.
            """
            ...

        def read_free(self, rows: RowReadings, call: Call) -> Any:
            """Penalise, or record, the readings of `rows` instead of the matrix; the fast form of `read`.

            Return NotImplemented to have `read` called instead; without a `read` that raises TypeError.
            """
            ...

        def ahead(self, call: Call) -> Tensor | None:
            """Return a tensor that `output` reads as `call.ahead`.

            It is computed before attention, so that its gradient is computed after that of attention. It must not
            depend on attention's output.
            """
            ...

        def output(self, o: Tensor, call: Call) -> Tensor:
            """Return the edited output of the heads, for o (B, H, T, Dv), before the output projection."""
            ...

        def branch(self, y: Tensor, call: Call) -> Tensor:
            """Return the edited output of the layer, for y (B, T, C), before the residual is added.

            `call` has a mask but no queries and keys. Layers that add the residual themselves are refused.
            """
            ...

        def after_step(self, site: Site, state: MethodState) -> None:
            """Change weights or state after the optimizer step, under `torch.no_grad()`.

            It runs once per step, and only if the training loop calls `after_step()` of the handle.
            """
            ...

        def penalty(self, site: Site, state: MethodState) -> Tensor:
            """Return a 0-d penalty on the site's weights, which `loss()` adds once per step.

            Penalties on tokens belong in `call.penalize`.
            """
            ...

    @classmethod
    def exchange(cls, states: Sequence[MethodState]) -> None:
        """Exchange between processes what `after_step` needs; called before it, once, with the states of all sites.

        Without it, each process takes the step with its own numbers, and the copies of the weights may drift apart.
        """

    def after_steps(self, fits: Sequence[tuple[Site, MethodState]]) -> None:
        """Run `after_step` on all sites; overridden where one kernel serves the weights of the whole model."""
        for site, state in fits:
            self.after_step(site, state)

    def forward_begins(self, fits: Sequence[tuple[Site, MethodState]]) -> Callable[[], None] | None:
        """Prepare a forward of the whole model, and return what ends it; overridden where its layers share work.

        Compiled code and layers that are called alone do without it.
        """
        return None

    def penalties(self, fits: Sequence[tuple[Site, MethodState]]) -> list[Tensor]:
        """Return terms whose sum is that of the sites' penalties; overridden where one kernel serves the whole
        model."""
        return [self.penalty(site, state) for site, state in fits]

    @classmethod
    def overrides(cls, stage: str) -> bool:
        """Return whether the class defines the stage."""
        return stage in cls.__dict__

    @classmethod
    def summary(cls) -> str:
        """Return the first paragraph of the docstring, which states the operation, as one line."""
        return inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")

    @classmethod
    def matrix_free(cls) -> bool:
        """Return whether the method has a matrix-free form; its docstring states where that form is exact."""
        return all(
            any(cls.overrides(twin) for twin in TWINS[stage])
            for stage in ("logits", "weights", "read")
            if cls.overrides(stage)
        )

    @classmethod
    def touches_call(cls) -> bool:
        """Return whether the method acts on attention itself, not just on the layer's input, output or weights."""
        return any(map(cls.overrides, CALL_STAGES))

    @classmethod
    def misplaced(cls) -> list[str]:
        """Return what is wrong with the stages that the class defines: never called, or misspelt."""
        problems = []
        for name in ("scores", "keep", "attend"):
            textbook = [stage for stage, twins in TWINS.items() if name in twins]
            if callable(vars(cls).get(name)) and not any(map(cls.overrides, textbook)):
                problems.append(f"{name} is never called: it is the fast form of {' or '.join(textbook)}")
        stages = {*STAGES, *(twin for twins in TWINS.values() for twin in twins), "unbuild", "fold", "ahead"}
        own = [name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")]
        for name in own:
            near = difflib.get_close_matches(name, stages, n=1, cutoff=0.8)
            if name not in stages and not hasattr(Method, name) and near:
                problems.append(f"{name} is not a stage; did you mean {near[0]}?")
        return problems

    def replace(self, **changes: Any) -> Method:
        """Return the method with some settings changed and checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]  # a subclass is a dataclass

    def settings(self) -> dict[str, Any]:
        """Return the fields and their values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]  # as above

    def __repr__(self) -> str:
        return self.written({})

    def written(self, texts: Mapping[str, str]) -> str:
        """Return the repr of the method with `texts` in place of some fields' values, such as a schedule's repr."""
        arguments = []
        for index, field in enumerate(dataclasses.fields(self)):  # type: ignore[arg-type]  # as above
            value = getattr(self, field.name)
            # The first field is the strength and is always shown, the others only if they differ from their default.
            if index == 0 or field.name in texts or value != field.default:
                arguments.append(f"{field.name}={texts.get(field.name) or _literal(value)}")
        return f"{type(self).__name__}({', '.join(arguments)})"


def _literal(value: Any) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)
