"""No test asserts how many seconds something takes, or waits for less than five minutes: it would fail on a busy
machine. Ratios within one run and counts are fine."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# functions that read a clock, and names of outcomes that contain its value
CLOCKS = ("perf_counter", "monotonic", "process_time", "time", "perf_counter_ns", "monotonic_ns")
SECONDS = ("seconds", "elapsed", "duration")
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
ARITHMETIC = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
# calls that fail a test when their time is over; with a time of 0 they do not wait
WAITS = ("run", "call", "check_call", "check_output", "communicate", "wait", "wait_for", "wait_procs", "join", "result")
LEAST = 300


def timed(tree):
    """Return the lines of a test that compare a time with a literal number, or wait for less than LEAST seconds."""
    limits = [node for scope in _scopes(tree) for node in _limits(scope)]
    return sorted({node.lineno for node in [*limits, *_short_waits(tree)]})


def _scopes(tree):
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module)
    ]


def _limits(scope):
    names = _names_of_times(scope)
    for node in (one for check in _checks(scope) for one in ast.walk(check)):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        ordered = any(isinstance(op, ORDER) for op in node.ops) and any(_is_number(side) for side in sides)
        if (ordered or any(_is_about(side) for side in sides)) and any(_is_time(side, names) for side in sides):
            yield node


def _checks(scope):
    """Return the assertions of a test, including `if ...: pytest.fail()` and `if ...: raise`."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and any(_fails(inner) for inner in node.body)):
            yield node.test


def _fails(node):
    return isinstance(node, ast.Raise) or (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "fail"
    )


def _short_waits(tree):
    for node in ast.walk(tree):
        words = []
        if isinstance(node, ast.Call) and _called(node) in WAITS:
            words = [(word.arg, word.value) for word in node.keywords]
        elif isinstance(node, ast.FunctionDef) and node.name in WAITS:
            words = [(arg.arg, value) for arg, value in zip(node.args.args[::-1], node.args.defaults[::-1])]
        values = [value for name, value in words if name in ("timeout", "seconds")]
        if any(_is_number(value) and _number(value) < LEAST for value in values):
            yield node


def _called(node):
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def _is_about(node):
    """Return whether a node is pytest.approx of a literal number."""
    return isinstance(node, ast.Call) and _called(node) == "approx" and any(map(_is_number, node.args[:1]))


def _is_number(node):
    """A written number of seconds, or a product of such; 0 is none, for a time may well be held to exist."""
    return bool(_number(node))


def _number(node):
    if not all(isinstance(one, ARITHMETIC) for one in ast.walk(node)):
        return None
    value = eval(compile(ast.Expression(node), "a number", "eval"))
    return value if isinstance(value, int | float) else None


def _is_time(node, names):
    # a share of two times has no unit
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return False
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return any(word in node.slice.value for word in SECONDS)
    if isinstance(node, ast.Attribute):
        return node.attr in SECONDS
    if isinstance(node, ast.Call):
        return _reads_clock(node)
    return isinstance(node, ast.BinOp) and (_is_time(node.left, names) or _is_time(node.right, names))


def _reads_clock(node):
    called = node.func
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        return called.value.id == "time" and called.attr in CLOCKS
    if not isinstance(called, ast.Name):
        return False
    # the minimum or maximum of several times is a time
    if called.id in ("min", "max", "sum", "median"):
        return any(isinstance(inner, ast.Call) and _reads_clock(inner) for arg in node.args for inner in ast.walk(arg))
    return called.id in {*CLOCKS, *SECONDS} - {"time"}


def _names_of_times(scope):
    """Return the names of variables that hold a time: of a clock, of a difference of times, or by their name."""
    found = set(SECONDS)
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and _is_time(node.value, found):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize(
    "path",
    sorted(
        [
            *TESTS.rglob("test_*.py"),
            *(path for part in ("papers", "verdict") for path in (TESTS.parent / part / "tests").rglob("test_*.py")),
        ]
    ),
    ids=lambda path: path.stem,
)
def test_no_time_is_held_against_a_number(path):
    found = timed(ast.parse(path.read_text()))
    assert not found, (
        f"{path.relative_to(TESTS.parent)}, lines {found}: compare two times of one run, or count operations"
    )


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('assert watched["metrics"]["cost/seconds_per_step"] < 0.04', [1]),
        ("begin = time.perf_counter()\nwork()\nassert time.perf_counter() - begin < 2", [3]),
        ("begin = time.monotonic()\ntook = time.monotonic() - begin\nassert 5 > took", [3]),
        ("assert result.seconds <= 60", [1]),
        ("assert one.seconds / other.seconds < 1.5", []),
        ("assert slow > 2 * fast and result.seconds > 0", []),
        ("assert count < 3", []),
        ("assert elapsed < 2", [1]),
        ("assert not elapsed > 2", [1]),
        ("assert elapsed < 2 * 60", [1]),
        ("assert time.perf_counter() - begin == pytest.approx(2, rel=0.5)", [1]),
        ("assert approx(0.5) == result.seconds", [1]),
        ("if elapsed > 2:\n    pytest.fail('slow')", [1]),
        ("if time.monotonic() - begin > 2:\n    raise AssertionError", [1]),
        ("subprocess.run(command, timeout=30)", [1]),
        ("process.communicate(timeout=5.5)", [1]),
        ("wait_for(ended, seconds=20)", [1]),
        ("subprocess.run(command, timeout=60)", [1]),
        ("def wait_for(condition, seconds=60):\n    pass", [1]),
        ("subprocess.run(command, timeout=600)", []),
        ("psutil.wait_procs(family, timeout=0)", []),
        ("assert loss == pytest.approx(2)", []),
        ("assert told.seconds == pytest.approx(sum(parts))", []),
        ("if elapsed > 2:\n    work()", []),
    ],
)
def test_a_time_limit_is_found_and_a_ratio_is_not(code, found):
    assert timed(ast.parse(code)) == found
