"""Method: one regularizer, written as stages that act on one attention call."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, dataclass_transform

from headwise.core.settings import check_type, declared_types, no_setting, plain

if TYPE_CHECKING:
    from torch import Tensor

    from headwise.core.call import Call
    from headwise.core.method_state import MethodState
    from headwise.core.row_readings import RowReadings
    from headwise.core.site import Site

REGISTRY: dict[str, type[Method]] = {}

STAGES = ("build", "hidden", "inputs", "logits", "weights", "read", "output", "branch", "after_step", "penalty")
TWINS = {"logits": ("scores", "keep", "attend"), "weights": ("attend", "keep"), "read": ("read_free",)}

CALL_STAGES = ("inputs", "logits", "weights", "read", "read_free", "output")

Attend = Callable[["Tensor"], "Tensor"]


class Methods(list["Method"]):
    """Methods in order of action; `A(...) + B(...)` makes one, and its text is what `parse` reads."""

    # A list's own + takes lists alone; here one method may follow too.
    def __add__(self, other: Any) -> Methods:  # type: ignore[override]
        return Methods([*self, *([other] if isinstance(other, Method) else other)])

    def __repr__(self) -> str:
        return " + ".join(map(repr, self))


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Method:
    """One way to regularize attention: settings as fields, behaviour as overridden stages.

    Subclassing makes the class a frozen dataclass with keyword fields and registers it by its name. A stage that is not
    overridden does not exist for the core: what a method overrides decides what is computed.

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
    """Settings at which the method changes no bit of the host's output, or None where there are none. If it is wrong,
    an ablation against this setting compares two different things; `{"strength": 0.0}` on a penalty also lets the
    host's own kernel run."""
    no_neutral: ClassVar[str] = ""
    """Why there is no neutral setting: the words stand on the method's page. A method needs either this or
    `neutral`."""
    strong: ClassVar[dict[str, Any]] = {}
    """Settings at which the method visibly acts, beside the defaults of the other fields; `{}` where the defaults act.
    Tests use them: if they are too weak, the tests cannot tell the method from none."""
    live: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that may change while training. Read them with `call.value(self, name)`: one that is read as
    `self.name` keeps its first value whatever `set()` says. A field that is not named here is refused by `set()` and
    takes no schedule."""
    acts: ClassVar[Literal["train", "both"]] = "train"
    """`"train"`: in training alone; `"both"`: in evaluation too. With `"train"`, a method that its paper keeps in
    evaluation is missing there, and `fold()` takes it off. `acts_in` decides by the settings instead."""
    random: ClassVar[bool] = False
    """Whether the method draws random numbers. If it is left False, each block of a large matrix draws numbers of its
    own, and others again in backward: values and gradients are wrong in silence. `draws` decides by the settings
    instead."""
    penalizes: ClassVar[bool] = False
    """Whether the method calls `call.penalize`. If it is left False, nothing warns where `loss()` is forgotten, or
    where reentrant checkpointing runs the layer twice."""
    carries: ClassVar[bool] = False
    """Whether the method reads `call.first_values()`. If it is left False, the first layer keeps no values and the call
    raises RuntimeError. The method is refused where these values are not those of the same tokens."""
    self_only: ClassVar[bool] = False
    """Whether the method has a meaning only where queries and keys are the same tokens: cross attention is refused
    then. If it is left False, such a method mixes tokens of two sequences by their place, or fails on their lengths."""
    learns: ClassVar[bool] = False
    """Whether `build` makes parameters. If it is left False, `regularize` neither asks for the shapes they need nor do
    `remove()` and the warnings about optimizers know of them: they may stay untrained or be lost."""
    shapes: ClassVar[tuple[str, ...]] = ("heads", "head_dim", "hidden")
    """Fields of `Site` that `build` of a method that learns reads. Where one is unknown, `regularize` asks for
    `example=`; a shape that is not named here may reach `build` as None."""
    commutes_with_dropout: ClassVar[bool] = False
    """Whether `attend` gives the same if the host drops weights before the edit instead of after it. If it is wrongly
    True, the fast form differs from the textbook one wherever the host has dropout; False costs the matrix there and is
    always right. A map in the place of the softmax says so where it drops weights by `call.dropout` itself."""
    rowwise: ClassVar[bool] = False
    """Whether a query's row of the matrix is read and written without the rows of other queries, so that a large matrix
    may be made in blocks of queries. `call.penalize` puts the figures of blocks together, and a method that keeps a
    largest value compares it with the block before: both are rowwise. It is not asked of a method that touches no
    matrix. If it is wrongly True, results change with the size of the call; False takes memory and is always right."""
    replaces_logits: ClassVar[bool] = False
    """Whether `logits` makes logits of its own instead of editing those it gets. If it is wrongly False, edits of
    methods before it are lost in silence; where it is True, `regularize` refuses such an order."""
    only_rounding: ClassVar[bool] = False
    """Whether the method changes nothing but rounding, at any setting. If it is wrongly True, no check asks whether the
    method acts; if it is left False, the check of its strong setting fails."""
    over_layers: ClassVar[Literal["sum", "mean"]] = "sum"
    """Whether penalties of several layers are summed or averaged: with the wrong one the paper's strength is off by
    their number."""
    cost: ClassVar[Literal["edit", "edit by each head"]] = "edit"
    """What `attend` costs: an edit of one map, or one map by each head. It chooses up to which size the matrix is the
    faster way on a CPU; a wrong one costs time and changes no result."""
    paper: ClassVar[str] = ""
    """The source: the second paragraph of the docstring, read when the class is made. Do not set it."""
    kinds: ClassVar[dict[str, frozenset[Any]]] = {}
    """The types that each field may hold, read from its annotation when the class is made. Do not set it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Method not in cls.__bases__:
            raise TypeError(
                f"{cls.__name__} must derive from Method itself: a method is abstract or final, never in between"
            )
        dataclasses.dataclass(frozen=True, kw_only=True, repr=False)(cls)
        cls.kinds = declared_types(cls)
        # A user's class may be defined again, in a notebook; headwise's own names stay.
        if not cls.__module__.startswith("headwise."):
            existing = REGISTRY.get(cls.__name__)
            if existing is not None and existing.__module__.startswith("headwise."):
                raise TypeError(f"a method named {cls.__name__!r} exists already in {existing.__module__}")
        parts = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
        cls.paper = " ".join(parts[1].split()) if len(parts) > 1 else ""
        REGISTRY[cls.__name__] = cls

    # Only to say it better than the __init__ that dataclass writes; copies and pickles give no settings here.
    def __new__(cls, *given: Any, **settings: Any) -> Self:
        """Raise TypeError for a setting without a name, and for one that the method has not."""
        known = list(getattr(cls, "__dataclass_fields__", {}))
        if given:
            name = known[0] if known else "name"
            raise TypeError(f"{cls.__name__} takes its settings by name, such as {name}={given[0]!r}")
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
            # The class is frozen: this is the one place that may still write.
            object.__setattr__(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise ValueError where a setting is out of its range."""

    def __add__(self, other: Method | list[Method]) -> Methods:
        """Compose: this method first, then the other."""
        return Methods([self]) + other

    def require(self, condition: bool, message: str) -> None:
        """Raise ValueError with the class's name before `message` unless `condition` holds."""
        if not condition:
            raise ValueError(f"{type(self).__name__}: {message}")

    def choose(self, name: str, *allowed: Any) -> None:
        """Raise ValueError unless the field `name` is one of `allowed`."""
        value = getattr(self, name)
        self.require(value in allowed, f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")

    def refuse(self, site: Site) -> str | None:
        """Say why the method has no meaning on `site`, or None where it has."""
        return None

    def at(self, name: str, step: int, site: Site) -> float:
        """Return the value of the live field `name` at optimizer step `step` on `site`; by default the field itself."""
        return float(getattr(self, name))

    def acts_in(self, training: bool) -> bool:
        """Return whether the method acts in this mode with its settings; by default what `acts` says of the class."""
        return self.acts == "both" or (self.acts == "train" and training)

    def counts_batches(self) -> bool:
        """Return whether a training forward is counted into what the method keeps, so that a repeated one would count
        twice; by default not."""
        return False

    def draws(self) -> bool:
        """Return whether the method draws random numbers with its settings; by default what `random` says of the
        class."""
        return self.random

    def reads_own_tokens(self) -> bool:
        """Return whether the method compares a query with its own key or value, which then is among the last
        `call.queries` of the keys.

        By default what `carries` says of the class. Hosts bring keys into that order where a cache or extra keys stand
        otherwise.
        """
        return self.carries

    # The stages. They are declared for the type checker and for readers; `overrides` asks whether a class defines them.
    if TYPE_CHECKING:

        def build(self, site: Site, state: MethodState) -> None:
            """Make the parameters and reparametrizations of one site, with `state.parameter`, `state.buffer` or
            `state.module`.

            What is put elsewhere is in no state dict, on no device and stays after `remove()`.
            """
            ...

        def unbuild(self, site: Site, state: MethodState) -> None:
            """Take back what `build` changed of the host's own modules; what `state` holds goes by itself.

            Without it, `remove()` leaves such changes behind.
            """
            ...

        def fold(self, site: Site, state: MethodState) -> None:
            """Write what the method does in evaluation into the host's plain weights, with the same bits.

            Without it, `fold()` keeps a method that acts in evaluation.
            """
            ...

        def hidden(self, x: Tensor, call: Call) -> Tensor:
            """Return what enters the layer, x (B, T, C), edited.

            `call` holds no queries and keys yet: only `hidden`, batch, device and draws.
            """
            ...

        def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
            """Return q (B, H, T, D), k (B, H, N, D) and v (B, H, N, Dv), edited, with their shapes and dtypes kept."""
            ...

        def logits(self, s: Tensor, call: Call) -> Tensor:
            """Return the masked, scaled logits s (B, H, T, N), edited.

            What is -inf must stay so: a finite number there lets a query see a key that its mask forbids.
            """
            ...

        def scores(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor] | None:
            """Return the q and k whose products are the edited logits, or None where that is not exact; the fast form
            of `logits`.

            Where it does not give what `logits` gives, results depend on the size of the call.
            """
            ...

        def keep(self, call: Call) -> Tensor | None:
            """Return which keys stay, bool, broadcastable to (B, H, T, N), or None where a mask is not exact: the fast
            form of `logits` that drop and of `weights` that drop and renormalise.

            The draw must be the one that the textbook form makes.
            """
            ...

        def weights(self, a: Tensor, call: Call) -> Tensor:
            """Return the attention weights a (B, H, T, N), edited, in their dtype.

            A padded key has weight 0 and must keep it: use `call.uniform()` and `call.allowed()`.
            """
            ...

        def attend(self, attend: Attend, call: Call) -> Attend | None:
            """Return the edited map of values (B, H, N, Dv) to outputs (B, H, T, Dv), or None where that is not exact:
            the fast form of `weights`.

            Beside `logits` alone it is a map in the place of the softmax. Where it does not give what `weights` gives,
            results depend on the size of the call.
            """
            ...

        def read(self, a: Tensor, call: Call) -> None:
            """Read the weights a (B, H, T, N) that act, before any method edits them; penalise with `call.penalize`.

            What it returns is not used: an edit belongs into `weights`.
            """
            ...

        def read_free(self, rows: RowReadings, call: Call) -> Any:
            """Read what `rows` offers instead of the matrix; return NotImplemented where that is not enough, and `read`
            is asked.

            A method that declines without a `read` raises TypeError.
            """
            ...

        def ahead(self, call: Call) -> Tensor | None:
            """Return what `output` finds in `call.ahead`, made before attention so that its gradient is made after
            attention's.

            It may read nothing of the attention's own output.
            """
            ...

        def output(self, o: Tensor, call: Call) -> Tensor:
            """Return what each head gives, o (B, H, T, Dv), edited, before the output projection."""
            ...

        def branch(self, y: Tensor, call: Call) -> Tensor:
            """Return what leaves the layer, y (B, T, C), edited, before the residual.

            `call` holds the mask and no queries and keys of its own. Where the residual is inside of the layer, the
            site is refused.
            """
            ...

        def after_step(self, site: Site, state: MethodState) -> None:
            """Change weights or values after the optimizer step, under `torch.no_grad()`.

            It runs once a step, and only where the training loop calls `after_step()` of the handle.
            """
            ...

        def penalty(self, site: Site, state: MethodState) -> Tensor:
            """Return a penalty of the site's weights, 0-d, added by `loss()` once a step; one that reads tokens belongs
            into `call.penalize`.
            """
            ...

    @classmethod
    def exchange(cls, states: Sequence[MethodState]) -> None:
        """Exchange between processes, in one call, what `after_step` needs of all: called before it with the states of
        all sites."""

    @classmethod
    def overrides(cls, stage: str) -> bool:
        """Return whether the class defines the stage."""
        return stage in cls.__dict__

    @classmethod
    def summary(cls) -> str:
        """Return the first sentence of the docstring: the operation in one line."""
        return inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")

    @classmethod
    def matrix_free(cls) -> bool:
        """Return whether the method runs without the attention matrix (under the conditions its docstring names)."""
        return all(
            any(cls.overrides(twin) for twin in TWINS[stage])
            for stage in ("logits", "weights", "read")
            if cls.overrides(stage)
        )

    def replace(self, **changes: Any) -> Method:
        """Return the same method with some settings changed; they are checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]  # a subclass is a dataclass

    def settings(self) -> dict[str, Any]:
        """Return the fields and their values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]  # as above

    def __repr__(self) -> str:
        return self.written({})

    def written(self, texts: Mapping[str, str]) -> str:
        """Return the text of the method, in which the fields named in `texts` are written so, a schedule for
        example."""
        shown = []
        for index, field in enumerate(dataclasses.fields(self)):  # type: ignore[arg-type]  # as above
            value = getattr(self, field.name)
            # The first field names the strength and is always shown; the rest only where it was chosen.
            if index == 0 or field.name in texts or value != field.default:
                shown.append(f"{field.name}={texts.get(field.name) or _literal(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _literal(value: Any) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)


def touches_call(method: Method) -> bool:
    """Return whether a method acts on the attention call itself (not only on what enters, leaves, or on weights)."""
    return any(method.overrides(stage) for stage in CALL_STAGES)
