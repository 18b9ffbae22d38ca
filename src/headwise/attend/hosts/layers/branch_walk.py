"""Branch walk: follow the result of a child through its parent's source code until it is added to the residual.

Neither the order of modules nor a run shows which dropout or norm comes last before the residual: one dropout may be
called in several places, and none acts in evaluation. Therefore the source of the forward is read, and nothing is run.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from headwise.attend import projections
from headwise.attend.core import Site
from headwise.attend.hosts.layers.declared import forward_of, names_used
from headwise.attend.projections import ProjectionError
from headwise.borders import DropoutLayer, own_modules
from headwise.files.errors import LEAVE_OUT

# Methods and functions that change neither the order nor the shape of the tokens.
SAME_TOKENS = frozenset("to type_as type float half bfloat16 contiguous clone checkpoint_name".split())


@dataclass(frozen=True)
class Way:
    """The part of the branch's way that was followed so far.

    Attributes:
        last: the last dropout or norm module.
        before_norm: the last module before the first norm, if there was a norm.
        normed: whether there was a norm; if no sum with the residual follows, it belongs to the next part of the
            model, not to the branch.
        moved: whether the tokens may be in a layout other than that of the projection.
        barred: why no hook can be placed after the last dropout or norm; empty if one can.
        closed: whether the result has entered another module, after which it is no longer the branch.
    """

    last: nn.Module | None = None
    before_norm: nn.Module | None = None
    normed: bool = False
    moved: bool = False
    barred: str = ""
    closed: bool = False

    def through_norm(self, norm: nn.Module | None, where: str) -> Way:
        """Return the way after a norm: a module, or None for a function."""
        before = self.before_norm if self.normed else self.last
        barred = ""
        if norm is None:
            barred = (
                f"normalises the attention branch by a function call in {where}, after which no method can act: "
                f"{LEAVE_OUT}"
            )
        elif self.moved:
            barred = (
                "may bring the tokens of the attention branch into another layout before it normalises them in "
                f"{where}: {LEAVE_OUT}"
            )
        return replace(self, last=norm, before_norm=before, normed=True, barred=barred)

    def added(self) -> BranchEnd:
        """Return the end at a sum with the residual, or at a product with a LayerScale."""
        return BranchEnd(self.last, self.barred)

    def lost(self) -> BranchEnd:
        """Return the end if no sum was seen: a norm on the way then belongs to what follows."""
        return BranchEnd(self.before_norm if self.normed else self.last)


class BranchEnd(Exception):
    """Ends the walk with the last module before the residual, with None, or with the reason why no hook can follow."""

    def __init__(self, module: nn.Module | None = None, barred: str = "") -> None:
        super().__init__()
        self.module, self.barred = module, barred


def least(ways: Iterable[Way | None]) -> Way | None:
    """Return the way with fewer modules: the operands of a sum share the branch up to where they part."""
    seen = [way for way in ways if way is not None]
    return min(seen, key=lambda way: (way.normed, way.last is not None), default=None)


def most(ways: Iterable[Way | None]) -> Way | None:
    """Return the way with more modules: of two ways that the code may take, a dropout or norm on either counts."""
    seen = [way for way in ways if way is not None]
    return max(seen, key=lambda way: (way.normed, way.last is not None), default=None)


def norms(module: Any) -> bool:
    """Return whether a module is a norm, by its name."""
    return isinstance(module, nn.Module) and "Norm" in type(module).__name__


def drops(module: Any) -> bool:
    """Return whether a module is one of torch's dropouts, or has a class name that ends with Dropout."""
    return isinstance(module, DropoutLayer) or (
        isinstance(module, nn.Module) and type(module).__name__.endswith("Dropout")
    )


@functools.lru_cache(maxsize=1024)
def _parsed(function: Any) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)


class Walk:
    """A walk through the code of one module, tracking the variables that hold the result of its child `name`.

    `way` is the way up to that result.
    """

    def __init__(self, module: nn.Module, name: str, way: Way) -> None:
        self.module, self.name, self.way = module, name, way
        self.where = type(module).__name__
        self.self_name = "self"
        self.ways: dict[str, Way] = {}
        self.entered: set[Any] = set()

    def through(self, function: Any) -> Way | None:
        """Return the way up to the value that the function returns, or None if that is not the branch.

        Raises:
            BranchEnd: if the branch ends in the function.
        """
        node = _parsed(function)
        if node is None:
            self._refuse_unread(function)
            return replace(self.way, moved=True)
        outer = self.self_name, self.ways
        arguments = node.args.posonlyargs + node.args.args
        self.self_name, self.ways = (arguments[0].arg if arguments else ""), {}
        self.returned: list[Way | None] = []
        try:
            self._block(node.body)
            return most(self.returned)
        finally:
            self.self_name, self.ways = outer

    def _refuse_unread(self, function: Any) -> None:
        """Raise BranchEnd if a forward without source uses dropout at all, since it may act on the branch."""
        dropping = any(drops(m) and getattr(m, "p", None) != 0 for m in self.module.children())
        if not self.way.closed and (dropping or any("dropout" in name for name in names_used(function))):
            raise self._dropped(None, f"{self.where}, whose source cannot be read")

    def _dropped(self, p: float | None, where: str) -> BranchEnd:
        chance = "with unknown p" if p is None else f"with p={p:g}"
        barred = f"drops the attention branch by a function call {chance} in {where}, after which no method can act"
        return BranchEnd(None, f"{barred}: set that dropout to 0, or {LEAVE_OUT}")

    def _block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, s: ast.stmt) -> None:
        if isinstance(s, ast.Assign | ast.AnnAssign):
            way = None if s.value is None else self._way_to(s.value)
            for target in s.targets if isinstance(s, ast.Assign) else [s.target]:
                self._assign(target, way)
        elif isinstance(s, ast.AugAssign):
            self._sum(s.op, self._way_to(s.target), self._way_to(s.value), s.value)
        elif isinstance(s, ast.Return):
            self.returned.append(None if s.value is None else self._way_to(s.value))
        elif isinstance(s, ast.Expr):
            self._way_to(s.value)
        elif isinstance(s, ast.If | ast.While):
            # Nothing is run, so both blocks are walked: a dropout in either one counts.
            self._way_to(s.test)
            taken = self._decided(s.test)
            self._block(s.body if taken is not False else [])
            self._block(s.orelse if taken is not True else [])
        else:
            for block in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(s, block, []):
                    self._block(inner.body) if isinstance(inner, ast.ExceptHandler) else self._statement(inner)

    def _decided(self, test: ast.expr) -> bool | None:
        """Return the value of a condition that the module's own attributes decide, or None for any other."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._decided(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Is | ast.IsNot):
            path, other = self._path(test.left), test.comparators[0]
            if path is None or not isinstance(other, ast.Constant) or other.value is not None:
                return None
            return (self._value(path) is None) == isinstance(test.ops[0], ast.Is)
        path = self._path(test)
        value = None if path is None or path == ["training"] else self._value(path)
        return value if isinstance(value, bool) else None

    def _assign(self, target: ast.expr, way: Way | None) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            # Of several results, the first one is the branch.
            for index, part in enumerate(target.elts):
                self._assign(part, way if index == 0 else None)
        elif isinstance(target, ast.Name):
            if way is None:
                self.ways.pop(target.id, None)
            else:
                self.ways[target.id] = way

    def _way_to(self, e: ast.expr | None) -> Way | None:
        """Return the way up to an expression's value, or None if that is not the branch."""
        if e is None or isinstance(e, ast.Constant):
            return None
        if isinstance(e, ast.Name):
            return self.ways.get(e.id)
        if isinstance(e, ast.Call):
            return self._call(e)
        if isinstance(e, ast.BinOp):
            return self._sum(e.op, self._way_to(e.left), self._way_to(e.right), e.right)
        if isinstance(e, ast.Compare | ast.Lambda):
            return None
        if isinstance(e, ast.IfExp):
            taken = self._decided(e.test)
            if taken is not None:
                return self._way_to(e.body if taken else e.orelse)
        # All parts are walked: any of them may contain a call.
        return most([self._way_to(part) for part in ast.iter_child_nodes(e) if isinstance(part, ast.expr)])

    def _sum(self, op: ast.operator, left: Way | None, right: Way | None, added: ast.expr) -> Way | None:
        if left is not None and isinstance(added, ast.Tuple):
            # `(x,) + rest` builds the tuple that a forward returns: it is not a sum of tensors.
            return left
        way = least([left, right])
        if way is not None:
            # A sum is the residual and a product a LayerScale: methods act on the branch before both.
            raise way.added()
        return None

    def _call(self, e: ast.Call) -> Way | None:
        path = self._path(e.func)
        way = most([self._way_to(x) for x in (*e.args, *(k.value for k in e.keywords))])
        if path is not None:
            if path[0] == self.name:
                # This calls the child or a method of it: the result is the branch.
                return self.way
            return self._own_part(e, self._value(path), way)
        as_argument = way is not None
        if way is None and isinstance(e.func, ast.Attribute):
            way = self._way_to(e.func.value)
        if way is None or way.closed:
            return way
        word = e.func.attr if isinstance(e.func, ast.Attribute) else getattr(e.func, "id", "")
        if "dropout" in word:
            p = self._probability(e)
            if p != 0:
                raise self._dropped(p, self.where)
            return way
        if as_argument and "norm" in word:
            return way.through_norm(None, self.where)
        return way if word in SAME_TOKENS else replace(way, moved=True)

    def _own_part(self, e: ast.Call, target: Any, way: Way | None) -> Way | None:
        """Follow the branch through a part of the module that gets it as an argument, or into a method that calls the
        child."""
        if way is None:
            if inspect.ismethod(target) and target.__self__ is self.module:
                return self._through_method(target.__func__)
            return None
        if way.closed or isinstance(target, nn.Identity):
            return way
        if drops(target):
            return replace(way, last=target, barred="")
        if norms(target):
            return way.through_norm(target, self.where)
        # Any other module, or a function kept on the module, may compute anything from the branch. The sum that follows
        # shows whether a norm before it belonged to the branch.
        if not way.normed:
            raise way.lost()
        return replace(way, closed=True)

    def _through_method(self, function: Any) -> Way | None:
        """Follow the branch into a method of the module itself that may call the child."""
        if function in self.entered or self.name not in names_used(function):
            return None
        self.entered.add(function)
        outer = self.returned
        try:
            return self.through(function)
        finally:
            self.returned = outer

    def _path(self, e: ast.expr) -> list[str] | None:
        """Return the attributes of `self.a.b` or `self.a[0]`, or None for anything else."""
        names: list[str] = []
        while isinstance(e, ast.Attribute | ast.Subscript):
            if isinstance(e, ast.Attribute):
                names.insert(0, e.attr)
            e = e.value
        return names if isinstance(e, ast.Name) and e.id == self.self_name and names else None

    def _value(self, path: list[str]) -> Any:
        value: Any = self.module
        for name in path:
            value = getattr(value, name, None)
        return value

    def _probability(self, e: ast.Call) -> float | None:
        """Return the p of a functional dropout, or None if it cannot be determined."""
        named = [k.value for k in e.keywords if k.arg in ("p", "prob", "dropout")]
        for candidate in named or e.args[1:]:
            path = self._path(candidate)
            value = (
                candidate.value if isinstance(candidate, ast.Constant) else None if path is None else self._value(path)
            )
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        # torch's default if no p is passed.
        return 0.5 if not named and len(e.args) == 1 else None


def last_before_sum(site: Site) -> nn.Module | None:
    """Return the last dropout or norm between a site's attention and the residual, or None if there is none.

    Raises:
        ProjectionError: if it is a function call or cannot be determined, so that no hook can be placed after it.
    """
    start = site.module
    if site.host != "torch":
        start = projections.output(site, "what acts on the branch").module
    return None if site.model is None else last_after(site.model, start)


def last_after(model: nn.Module, start: nn.Module) -> nn.Module | None:
    """Return the last dropout or norm between the result of a module and the residual, or None if there is none.

    Raises:
        ProjectionError: if it is a function call or cannot be determined, so that no hook can be placed after it.
    """
    name = next((n for n, m in model.named_modules() if m is start), "")
    way = Way()
    try:
        # From the inside out: a result that a module returns unchanged may meet a dropout or norm in its parent.
        while name:
            name, way = _climb(model, name, way)
        raise way.lost()
    except BranchEnd as end:
        if end.barred:
            raise ProjectionError(end.barred) from None
        return end.module


def obstacle(site: Site) -> str | None:
    """Return why no method can act on a site's branch where it enters the residual, or None if one can."""
    try:
        last_before_sum(site)
    except ProjectionError as error:
        return str(error)
    return None


def _climb(model: nn.Module, name: str, way: Way) -> tuple[str, Way]:
    """Follow the result of a module through its parent; return the parent's name and the way up to its result."""
    above, _, own = name.rpartition(".")
    parent = model.get_submodule(above)
    if not isinstance(parent, nn.Sequential | nn.ModuleList):
        back = Walk(parent, own, way).through(forward_of(parent))
        # A result that is not seen to be returned may be returned in a way that cannot be read.
        return above, replace(way, moved=True) if back is None else back
    # Neither has code to read. A Sequential runs its children in order. A ModuleList of a projection and its dropout
    # (diffusers' to_out) is run in order too, but what follows the list is in the code of the module that keeps it.
    later = list(own_modules(parent).values())[list(own_modules(parent)).index(own) + 1 :]
    for module in later:
        if drops(module):
            way = replace(way, last=module, barred="")
        elif norms(module) and isinstance(parent, nn.Sequential):
            way = way.through_norm(module, type(parent).__name__)
        elif not isinstance(module, nn.Identity):
            if isinstance(parent, nn.Sequential):
                raise way.lost()
            break
    return above, way
