"""Write the tables of `Method`'s class variables, stages and hooks into own_method.md.

`python docs/method_contract.py [--check]`. Their texts come from `Method` itself: the strings below its class
variables, and the docstrings of its stages and hooks.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

from headwise.attend.core.method import Method

GUIDE = Path(__file__).resolve().parent / "own_method.md"
HOOKS = ("check", "refuse", "at", "acts_in", "draws", "counts_batches", "reads_own_tokens", "exchange")
BEGIN, END = "<!-- contract: begin (python docs/method_contract.py) -->", "<!-- contract: end -->"


def class_variables() -> dict[str, tuple[str, str]]:
    """Return each class variable of `Method` with its default, as code, and its description."""
    body = _class().body
    variables = {}
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            variables[node.target.id] = (ast.unparse(node.value), " ".join(str(text).split()))
    return variables


def stages() -> dict[str, tuple[str, str]]:
    """Return each stage with its signature, as code, and its docstring."""
    (block,) = [n for n in _class().body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return _functions(block.body)


def hooks() -> dict[str, tuple[str, str]]:
    """Return each hook with its signature, as code, and its docstring."""
    functions = _functions(_class().body)
    return {name: functions[name] for name in HOOKS}


def _functions(body: list[ast.stmt]) -> dict[str, tuple[str, str]]:
    return {
        node.name: (f"{node.name}({ast.unparse(node.args)})", ast.get_docstring(node) or "")
        for node in body
        if isinstance(node, ast.FunctionDef)
    }


def _class() -> ast.ClassDef:
    (definition,) = ast.parse(inspect.getsource(Method)).body
    assert isinstance(definition, ast.ClassDef)
    return definition


def table() -> str:
    """Return the tables of class variables, stages and hooks in Markdown."""
    variables = [(f"`{name} = {default}`", text) for name, (default, text) in class_variables().items()]
    return "\n\n".join(
        [_rows("class variable", variables), _rows("stage", _named(stages())), _rows("hook", _named(hooks()))]
    )


def _named(functions: dict[str, tuple[str, str]]) -> list[tuple[str, str]]:
    return [(f"`{_names(code)}`", " ".join(text.split())) for code, text in functions.values()]


def _names(signature: str) -> str:
    """Return a signature without types and self: `weights(a, call)`."""
    name, _, arguments = signature.partition("(")
    function = ast.parse(f"def {name}({arguments}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    return f"{name}({', '.join(argument.arg for argument in function.args.args[1:])})"


def _rows(title: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {title} | what it promises, and what happens if it is wrong |", "|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])


def main(arguments: list[str]) -> int:
    """Write the tables between their marks, or with --check report whether they are current."""
    text = GUIDE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    wanted = f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
    if "--check" not in arguments:
        GUIDE.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        print(f"the table in {GUIDE.name} is out of date: run python docs/method_contract.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
