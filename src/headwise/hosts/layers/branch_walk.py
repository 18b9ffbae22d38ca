"""Branch walk: follow the result of one child through the code of the module around it, until a dropout, a sum or the end.

Neither the order of modules nor a run tells behind which dropout a branch enters the residual: one dropout may serve
several places, and in evaluation none of them acts. So the source of the forward is read, and nothing is run.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from headwise.hosts.layers.code import names_used


class BranchEnd(Exception):
    """Ends the walk: the branch was seen to pass the dropout `module`, a function of this p, or neither."""

    def __init__(self, module: nn.Module | None = None, p: float | None = 0.0, where: str = "") -> None:
        super().__init__()
        self.module, self.p, self.where = module, p, where


def drops(module: Any) -> bool:
    """Tell whether a module is a dropout: torch's, or one that is named so."""
    return isinstance(module, _DropoutNd) or (
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
    """Walks the code of one module with the names that hold the branch, which its child `name` makes."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.me = "self"
        self.holding: set[str] = set()
        self.entered: set[Any] = set()

    def through(self, function: Any) -> bool:
        """Tell whether the function gives the branch back; raises BranchEnd where the branch ends in it."""
        node = _parsed(function)
        if node is None:
            self._unread(function)
            return True
        outer = self.me, self.holding
        arguments = node.args.posonlyargs + node.args.args
        self.me, self.holding = (arguments[0].arg if arguments else ""), set()
        self.given = False
        try:
            self._block(node.body)
            return self.given
        finally:
            self.me, self.holding = outer

    def _unread(self, function: Any) -> None:
        """Without its source, a forward that drops anything may drop the branch."""
        dropping = any(drops(m) and getattr(m, "p", None) != 0 for m in self.module.children())
        if dropping or any("dropout" in name for name in names_used(function)):
            raise BranchEnd(p=None, where=f"{type(self.module).__name__}, whose source cannot be read")

    def _block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, s: ast.stmt) -> None:
        if isinstance(s, ast.Assign | ast.AnnAssign):
            held = s.value is not None and self._holds(s.value)
            for target in s.targets if isinstance(s, ast.Assign) else [s.target]:
                self._assign(target, held)
        elif isinstance(s, ast.AugAssign):
            self._sum(s.op, self._holds(s.target), self._holds(s.value), s.value)
        elif isinstance(s, ast.Return):
            self.given |= s.value is not None and self._holds(s.value)
        elif isinstance(s, ast.Expr):
            self._holds(s.value)
        elif isinstance(s, ast.If | ast.While):
            # Both ways are walked, as nothing is run: a dropout in either one counts.
            self._holds(s.test)
            self._block(s.body)
            self._block(s.orelse)
        else:
            for block in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(s, block, []):
                    self._block(inner.body) if isinstance(inner, ast.ExceptHandler) else self._statement(inner)

    def _assign(self, target: ast.expr, held: bool) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            # Modules that give several things give the branch first.
            for index, part in enumerate(target.elts):
                self._assign(part, held and index == 0)
        elif isinstance(target, ast.Name):
            (self.holding.add if held else self.holding.discard)(target.id)

    def _holds(self, e: ast.expr | None) -> bool:
        """Tell whether an expression's value is the branch."""
        if e is None or isinstance(e, ast.Constant):
            return False
        if isinstance(e, ast.Name):
            return e.id in self.holding
        if isinstance(e, ast.Call):
            return self._call(e)
        if isinstance(e, ast.BinOp):
            return self._sum(e.op, self._holds(e.left), self._holds(e.right), e.right)
        if isinstance(e, ast.Compare | ast.Lambda):
            return False
        # All parts are walked: a call may stand in any of them.
        held = [self._holds(part) for part in ast.iter_child_nodes(e) if isinstance(part, ast.expr)]
        return True in held

    def _sum(self, op: ast.operator, left: bool, right: bool, added: ast.expr) -> bool:
        if left and isinstance(added, ast.Tuple):
            # `(x,) + rest` makes the tuple that a forward gives back: no sum of tensors.
            return True
        if left or right:
            # A sum is the residual, a product a LayerScale: what acts on the branch stands before both.
            raise BranchEnd
        return False

    def _call(self, e: ast.Call) -> bool:
        path = self._path(e.func)
        given = [self._holds(x) for x in (*e.args, *(k.value for k in e.keywords))]
        held = True in given or (isinstance(e.func, ast.Attribute) and path is None and self._holds(e.func.value))
        if path is not None:
            if path[0] == self.name:
                # The child itself, or a method of it, is called: its result is the branch.
                return True
            target = self._value(path)
            if held and isinstance(target, nn.Module):
                if drops(target):
                    raise BranchEnd(target)
                if not isinstance(target, nn.Identity):
                    raise BranchEnd
            elif not held and inspect.ismethod(target) and target.__self__ is self.module:
                return self._own(target.__func__)
            elif held and not isinstance(target, nn.Module):
                # A function kept on the module may compute anything from the branch.
                raise BranchEnd
        word = e.func.attr if isinstance(e.func, ast.Attribute) else getattr(e.func, "id", "")
        if held and "dropout" in word and path is None:
            p = self._probability(e)
            if p != 0:
                raise BranchEnd(p=p, where=type(self.module).__name__)
        return held

    def _own(self, function: Any) -> bool:
        """Follow a method of the module itself, in which the child may be called."""
        if function in self.entered or self.name not in names_used(function):
            return False
        self.entered.add(function)
        return self.through(function)

    def _path(self, e: ast.expr) -> list[str] | None:
        """Give the attributes of `self.a.b` or `self.a[0]`, or None for anything else."""
        names: list[str] = []
        while isinstance(e, ast.Attribute | ast.Subscript):
            if isinstance(e, ast.Attribute):
                names.insert(0, e.attr)
            e = e.value
        return names if isinstance(e, ast.Name) and e.id == self.me and names else None

    def _value(self, path: list[str]) -> Any:
        value: Any = self.module
        for name in path:
            value = getattr(value, name, None)
        return value

    def _probability(self, e: ast.Call) -> float | None:
        """Give the p of a functional dropout where it can be told."""
        named = [k.value for k in e.keywords if k.arg in ("p", "prob", "dropout")]
        for candidate in named or e.args[1:]:
            path = self._path(candidate)
            value = (
                candidate.value if isinstance(candidate, ast.Constant) else None if path is None else self._value(path)
            )
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        # torch's own default, where nothing is passed.
        return 0.5 if not named and len(e.args) == 1 else None
