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
    no_neutral: ClassVar[str] = ""
    strong: ClassVar[dict[str, Any]] = {}
    live: ClassVar[tuple[str, ...]] = ()
    acts: ClassVar[Literal["train", "both"]] = "train"
    random: ClassVar[bool] = False
    penalizes: ClassVar[bool] = False
    carries: ClassVar[bool] = False
    self_only: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    shapes: ClassVar[tuple[str, ...]] = ("heads", "head_dim", "hidden")
    commutes_with_dropout: ClassVar[bool] = False
    # Whether a query's row of the matrix is read and written without the rows of other queries, so that blocks of queries do. A
    # method of which this is not known gets the whole matrix, at any size.
    rowwise: ClassVar[bool] = False
    replaces_logits: ClassVar[bool] = False
    over_layers: ClassVar[str] = "sum"
    cost: ClassVar[str] = "edit"
    paper: ClassVar[str] = ""
    kinds: ClassVar[dict[str, frozenset[Any]]] = {}

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
        """Give the value of the live field `name` at optimizer step `step` on `site`; by default the field itself."""
        return float(getattr(self, name))

    def acts_in(self, training: bool) -> bool:
        """Tell whether the method acts in this mode with its settings; by default what `acts` says of the class."""
        return self.acts == "both" or (self.acts == "train" and training)

    def counts_batches(self) -> bool:
        """Tell whether a training forward is counted into what the method keeps, so that a repeated one would count twice; by default not."""
        return False

    def draws(self) -> bool:
        """Tell whether the method draws random numbers with its settings; by default what `random` says of the class."""
        return self.random

    def reads_own_tokens(self) -> bool:
        """Tell whether the method compares a query with its own key or value, which then is among the last `call.queries` of the keys.

        By default what `carries` says of the class. Hosts bring keys into that order where a cache or extra keys stand otherwise.
        """
        return self.carries

    # The stages. They are declared for the type checker and for readers; `overrides` asks whether a class defines them.
    if TYPE_CHECKING:

        def build(self, site: Site, state: MethodState) -> None: ...
        def unbuild(self, site: Site, state: MethodState) -> None: ...
        def fold(self, site: Site, state: MethodState) -> None: ...
        def hidden(self, x: Tensor, call: Call) -> Tensor: ...
        def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]: ...
        def logits(self, s: Tensor, call: Call) -> Tensor: ...
        def scores(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor] | None: ...
        def keep(self, call: Call) -> Tensor | None: ...
        def weights(self, a: Tensor, call: Call) -> Tensor: ...
        def attend(self, attend: Attend, call: Call) -> Attend | None: ...
        def read(self, a: Tensor, call: Call) -> None: ...
        def read_free(self, rows: RowReadings, call: Call) -> Any: ...
        def ahead(self, call: Call) -> Tensor | None: ...
        def output(self, o: Tensor, call: Call) -> Tensor: ...
        def branch(self, y: Tensor, call: Call) -> Tensor: ...
        def after_step(self, site: Site, state: MethodState) -> None: ...
        def penalty(self, site: Site, state: MethodState) -> Tensor: ...

    @classmethod
    def exchange(cls, states: Sequence[MethodState]) -> None:
        """Exchange between processes, in one call, what `after_step` needs of all: called before it with the states of all sites."""

    @classmethod
    def overrides(cls, stage: str) -> bool:
        """Tell whether the class defines the stage."""
        return stage in cls.__dict__

    @classmethod
    def summary(cls) -> str:
        """Give the first sentence of the docstring: the operation in one line."""
        return inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")

    @classmethod
    def matrix_free(cls) -> bool:
        """Tell whether the method runs without the attention matrix (under the conditions its docstring names)."""
        return all(
            any(cls.overrides(twin) for twin in TWINS[stage])
            for stage in ("logits", "weights", "read")
            if cls.overrides(stage)
        )

    def replace(self, **changes: Any) -> Method:
        """Give the same method with some settings changed; they are checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]  # a subclass is a dataclass

    def settings(self) -> dict[str, Any]:
        """Give the fields and their values."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]  # as above

    def __repr__(self) -> str:
        return self.written({})

    def written(self, texts: Mapping[str, str]) -> str:
        """Give the text of the method, in which the fields named in `texts` are written so, a schedule for example."""
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
    """Tell whether a method acts on the attention call itself (not only on what enters, leaves, or on weights)."""
    return any(method.overrides(stage) for stage in CALL_STAGES)
