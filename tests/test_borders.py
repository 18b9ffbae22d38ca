"""The borders: private names of other libraries are only in `borders.py`, and each has a canary.

A canary uses the name in the same way as headwise. `make canaries` runs the canaries on the oldest versions that
pyproject.toml allows, `make test` on the newest.
"""

from __future__ import annotations

import ast
import copy
import importlib
import re
import sys
import tomllib
import warnings
import zlib
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import yaml
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from headwise import borders

ROOT = Path(__file__).parents[1]
BORDERS = ROOT / "src" / "headwise" / "borders.py"
FOLDERS = tuple(ROOT / part for part in ("src/headwise", "verdict/src/headwise_verdict", "papers/src/headwise_papers"))

COVERED: set[str] = set()


def canary(*names):
    """Mark a test as the canary of these names of `borders`."""
    COVERED.update(names)
    return pytest.mark.canary


PRIVATE = re.compile(r"_[A-Za-z]\w*")
NOT_FOREIGN = {"headwise", "headwise_papers", *sys.stdlib_module_names}
# of Python itself: documented, or without a public form
OF_PYTHON = {"os._exit", "sys._getframe", "atexit._run_exitfuncs"}
OF_NAMED_TUPLES = {"_replace", "_fields"}
# Strings that look like private names: columns of exported tables, ends of keys, a joint between words.
WORDS = {"_step", "_runtime", "_timestamp", "_low", "_high", "_and_"}


def private(dotted: str) -> bool:
    return any(PRIVATE.fullmatch(part) for part in dotted.split("."))


def foreign() -> set[str]:
    """Return the private names of objects that headwise handles, assumed not to be defined by its own classes."""
    holders = (nn.Module(), torch.zeros(()), torch.optim.SGD([torch.zeros((), requires_grad=True)]), torch)
    return {name for holder in holders for name in (*dir(holder), *vars(type(holder))) if PRIVATE.fullmatch(name)}


def own_names(trees) -> set[str]:
    """Return the private names that the code defines itself: functions, classes, variables, and attributes of self."""
    names = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                names.add(node.attr)
    return names - foreign()


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def of_classes_without_bases(tree: ast.AST) -> set[int]:
    """Return the ids of the attributes of self in classes that inherit nothing, and therefore no private name."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and not node.bases]
    attributes = (node for one in classes for node in ast.walk(one) if isinstance(node, ast.Attribute))
    return {id(node) for node in attributes if is_self(node.value)}


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def crossings(tree: ast.AST, own: set[str]) -> list[tuple[int, str]]:
    """Return the line and the text of each use of a private name that the code does not define itself."""
    found = []
    pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values[1:]}
    inherits_nothing = of_classes_without_bases(tree)
    for node in ast.walk(tree):
        for name in imported(node):
            if private(name) and name.partition(".")[0] not in NOT_FOREIGN:
                found.append((node.lineno, name))
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and id(node) not in inherits_nothing:
            if node.attr not in own and node.attr not in OF_NAMED_TUPLES and ast.unparse(node) not in OF_PYTHON:
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.keyword) and node.arg and PRIVATE.fullmatch(node.arg) and node.arg not in own:
            found.append((node.value.lineno, f"{node.arg}="))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            # as in getattr(module, "_name"), vars(module)["_name"] or sys.modules["library._file"]
            text = node.value
            known = any(text in names for names in (own, OF_NAMED_TUPLES, WORDS)) or text.startswith("_headwise")
            if re.fullmatch(r"[\w.]+", text) and private(text) and not known:
                found.append((node.lineno, repr(text)))
    return found


def uses(texts: dict[str, str]) -> list[str]:
    trees = {place: ast.parse(text) for place, text in texts.items()}
    own = own_names(trees.values())
    return [f"{place}:{line}: {name}" for place, tree in trees.items() for line, name in crossings(tree, own)]


def test_private_names_of_other_libraries_stand_in_borders_alone():
    files = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py")) if path != BORDERS]
    found = uses({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files})
    assert not found, "private names of other libraries, which belong in src/headwise/borders.py:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("from torch.nn.modules.conv import _ConvNd", "torch.nn.modules.conv._ConvNd"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("x = torch._foreach_norm(y)", "torch._foreach_norm"),
        ("x = module._forward_hooks", "module._forward_hooks"),
        ("class A(nn.Module): x = lambda self: self._modules", "self._modules"),
        ("class A(nn.Module): x = lambda self: setattr(self, '_buffers', {})", "'_buffers'"),
        ("self._modules = {}", "self._modules"),
        ("config._attn_implementation_internal = 'sdpa'", "config._attn_implementation_internal"),
        ("x = getattr(model, '_tp_size', None)", "'_tp_size'"),
        ("x = vars(module)['_parameters']", "'_parameters'"),
        ("x = sys.modules['torch._inductor.config']", "'torch._inductor.config'"),
        ("kinds = {f'_native_{kind}' for kind in kinds}", "'_native_'"),
        ("model = load(name, _fast_init=False)", "_fast_init="),
    ],
)
def test_a_private_name_is_found(line, named):
    assert uses({"one.py": line}) == [f"one.py:1: {named}"]


@pytest.mark.parametrize(
    "lines",
    [
        "class A:\n def f(self): self._kept = 1\n def g(self, other): return other._kept, getattr(other, '_kept')",
        "class A:\n def f(self): self._values = 1\n def g(self): return self._values",
        "def _f(): ...\nx = module_of_mine._f",
        "from headwise.attend.core.call import _crc\nimport _thread",
        "os._exit(1), sys._getframe(1), row._replace(a=1)",
        "x = f'{name}_kind', name.rpartition('_'), '_headwise_handle', '__dict__'",
    ],
)
def test_names_of_our_own_and_of_python_are_not(lines):
    assert not uses({"one.py": lines})


def names_of_borders() -> set[str]:
    """Return the names that `borders.py` defines, without those of typing."""
    names = set()
    for node in ast.parse(BORDERS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {ast.unparse(target) for target in getattr(node, "targets", None) or [node.target]}
    return names - {"Function"}


def test_each_name_has_a_canary():
    assert names_of_borders() == COVERED


def test_each_name_is_used():
    files = [path.read_text(encoding="utf-8") for folder in FOLDERS for path in folder.rglob("*.py") if path != BORDERS]
    assert not [name for name in names_of_borders() if not any(re.search(rf"\b{name}\b", text) for text in files)]


def floors() -> dict[str, str]:
    """Return the oldest version of each library that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return dict(found.groups() for line in lines if (found := re.match(r"([\w-]+)>=([\d.]+)", line)))


def three_parts(version: str) -> str:
    return ".".join((version.split(".") + ["0", "0"])[:3])


def test_the_oldest_versions_are_those_of_pyproject():
    lines = (ROOT / "requirements" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {"transformers", "accelerate"} <= pinned.keys()
    assert pinned == {name: three_parts(floors()[name]) for name in pinned}


def test_each_library_with_an_oldest_version_is_installed_for_the_canaries():
    named = (ROOT / "requirements" / "canaries.txt").read_text(encoding="utf-8").split()
    oldest = re.findall(r"^[\w-]+", (ROOT / "requirements" / "oldest.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*oldest} <= {*named}


def test_the_workflow_runs_the_canaries_on_the_oldest_and_the_newest_torch():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    cells = workflow["jobs"]["canaries"]["strategy"]["matrix"]["include"]
    assert {(cell["versions"], cell["torch"]) for cell in cells} == {
        ("oldest", f"torch=={three_parts(floors()['torch'])}"),
        ("newest", "torch"),
    }


@canary("Convolution", "TransposedConvolution", "DropoutLayer", "BatchNormLayer")
def test_base_classes_cover_the_public_layers():
    transposed = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
    convolutions = nn.Conv1d, nn.Conv2d, nn.Conv3d, *transposed
    assert all(issubclass(kind, borders.Convolution) for kind in convolutions)
    assert {kind for kind in convolutions if issubclass(kind, borders.TransposedConvolution)} == {*transposed}
    dropouts = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
    assert all(issubclass(kind, borders.DropoutLayer) for kind in dropouts)
    norms = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d
    assert all(issubclass(kind, borders.BatchNormLayer) for kind in norms)
    ours = borders.Convolution, borders.DropoutLayer, borders.BatchNormLayer
    assert not any(issubclass(kind, ours) for kind in (nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.Identity))


@canary("made_of")
def test_what_a_model_is_made_of_tells_what_was_put_in_taken_out_or_frozen():
    inner = nn.Linear(2, 2)
    model = nn.Sequential(inner, inner, nn.Sequential(nn.Linear(2, 2)))
    # a module that knows the one around it
    model[2].around = model
    model[2].register_parameter("missing", None)

    def now():
        parts, trained = borders.made_of(model)
        # tensors compare by their numbers
        return list(map(id, parts)), trained

    made = now()
    assert now() == made
    others = []
    inner.bias.requires_grad_(False)
    others.append(now())
    inner.bias.requires_grad_(True)
    kept, inner.bias = inner.bias, nn.Parameter(torch.zeros(2))
    others.append(now())
    inner.bias = kept
    model[2].append(nn.Identity())
    others.append(now())
    del model[2][-1]
    assert now() == made and made not in others


@canary("own_modules")
def test_submodules_can_be_read_and_removed():
    module = nn.Module()
    module.inner, module.nothing = nn.Linear(2, 3), nn.Identity()
    module.nothing = None
    assert borders.own_modules(module) == {"inner": module.inner, "nothing": None}
    del borders.own_modules(module)["inner"]
    assert not hasattr(module, "inner") and not list(module.parameters())


@canary("own_parameters")
def test_parameters_can_be_exchanged_and_put_in_order():
    layer = nn.Linear(2, 3)
    weight = nn.Parameter(torch.ones(3, 2))
    parameters = borders.own_parameters(layer)
    parameters["weight"] = weight
    assert layer.weight is weight
    parameters["weight"] = parameters.pop("weight")
    assert list(layer.state_dict()) == ["bias", "weight"]


@canary("own_buffers")
def test_buffers_that_are_none_are_there():
    module = nn.Module()
    module.register_buffer("rope", None)
    module.register_buffer("table", torch.ones(2))
    assert list(borders.own_buffers(module)) == ["rope", "table"] and borders.own_buffers(module)["rope"] is None


@canary("MovedModule")
def test_a_module_is_told_before_and_after_its_tensors_move():
    class Told(borders.MovedModule):
        def before_move(self):
            return self.table.dtype

        def after_move(self, before):
            self.moves = [*getattr(self, "moves", []), (before, self.table.dtype)]

    told = Told()
    told.register_buffer("table", torch.ones(2))
    nn.Sequential(told).half().to_empty(device="cpu")
    assert told.moves == [(torch.float32, torch.float16), (torch.float16, torch.float16)]


@canary("outside_transforms")
def test_a_tensor_from_outside_can_be_changed_outside_of_transforms():
    counter = torch.zeros(())

    def counted(x):
        with borders.outside_transforms():
            counter.add_(1)
        return x.square().sum()

    assert torch.equal(torch.func.grad(counted)(torch.ones(2)), torch.full((2,), 2.0))
    assert counter == 1


class Listed(borders.DispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@canary("moves", "writes")
def test_a_mode_tells_what_an_operator_does():
    with Listed() as listed:
        float(torch.zeros(()).add_(1))
        torch.zeros(2).to("meta")
    assert borders.moves in listed.seen
    # what a graph cannot repeat
    assert any(torch.Tag.data_dependent_output in func.tags for func in listed.seen)
    assert [str(func) for func in listed.seen if borders.writes(func)] == ["aten.add_.Tensor"]


@canary("without_modes")
def test_a_mode_does_not_see_what_runs_without_modes():
    with Listed() as listed:
        torch.zeros(2)
        with borders.without_modes():
            torch.ones(2)
    assert listed.seen == [torch.ops.aten.zeros.default]


@canary("in_transform")
def test_transforms_of_functions_are_seen():
    seen = []

    def looked(x):
        seen.append(borders.in_transform())
        return x.square().sum()

    torch.func.grad(looked)(torch.ones(2))
    torch.func.vmap(looked)(torch.ones(2, 2))
    assert seen == [True, True] and not borders.in_transform()


@canary("flash_on_cuda", "flash_on_cuda_backward")
def test_the_flash_kernels_of_cuda_take_what_headwise_gives_them():
    x, lse, none = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8), torch.zeros(2, dtype=torch.uint64)
    # On a CPU they come as far as their dispatch.
    with pytest.raises(NotImplementedError, match="CPU"):
        borders.flash_on_cuda(x, x, x, 0.0, True, False, scale=0.5)
    with pytest.raises(NotImplementedError, match="CPU"):
        borders.flash_on_cuda_backward(x, x, x, x, x, lse, None, None, 8, 8, 0.0, True, none, none, scale=0.5)


@canary("modes_see_operators")
def test_modes_that_see_operators_are_seen():
    assert not borders.modes_see_operators()
    with FlopCounterMode(display=False):
        assert borders.modes_see_operators()
    with FakeTensorMode():
        assert borders.modes_see_operators()
    assert not borders.modes_see_operators()


@canary("hook_first")
def test_a_hook_that_is_put_first_is_first_in_both_orders_and_can_be_removed():
    layer, ran = nn.Linear(2, 3), []
    layer.register_forward_pre_hook(lambda *_: ran.append("one"))
    layer.register_forward_pre_hook(lambda *_: ran.append("two"))
    handle = borders.hook_first(layer, lambda *call: ran.append(f"first, {list(call[2])}"), with_kwargs=True)
    hooks = borders.forward_pre_hooks_of(layer)
    assert list(hooks) == list(dict.keys(hooks))
    layer(input=torch.ones(2))
    assert ran == ["first, ['input']", "one", "two"]
    handle.remove()
    layer(torch.ones(2))
    assert ran[3:] == ["one", "two"]


@canary("hook_first")
def test_a_compiled_model_reads_attributes_of_the_object_whose_hook_is_first():
    class Reader:
        def __init__(self, name):
            self.name = name

        def hook(self, module, args):
            return (args[0] * getattr(self, self.name),)

    layer, later, first = nn.Linear(2, 2), Reader("slope"), Reader("limit")
    later.slope, first.limit = 2.0, 3.0
    layer.register_forward_pre_hook(later.hook)
    borders.hook_first(layer, first.hook)
    x = torch.ones(1, 2)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))


@canary("forward_hooks_of", "forward_pre_hooks_of")
@pytest.mark.parametrize(
    ("hooks", "register"),
    [
        (borders.forward_hooks_of, nn.Module.register_forward_hook),
        (borders.forward_pre_hooks_of, nn.Module.register_forward_pre_hook),
    ],
)
def test_hooks_are_seen_until_they_are_removed(hooks, register):
    layer = nn.Linear(2, 3)
    assert not hooks(layer)

    def hook(*_):
        return None

    handle = register(layer, hook)
    assert list(hooks(layer).values()) == [hook]
    handle.remove()
    assert not hooks(layer)


@canary("packs_projections")
def test_multihead_attention_tells_whether_it_has_one_matrix():
    packed, apart = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2, kdim=4)
    assert borders.packs_projections(packed) and packed.in_proj_weight is not None
    assert not borders.packs_projections(apart) and apart.q_proj_weight is not None


@canary("version_of")
def test_changes_in_place_are_counted():
    weight = nn.Parameter(torch.zeros(3))
    before = borders.version_of(weight)
    weight.detach().sum()
    assert borders.version_of(weight) == before
    with torch.no_grad():
        weight.add_(1)
    assert borders.version_of(weight) > before


@canary("sequence_number")
def test_nodes_are_numbered_in_the_order_in_which_they_were_made():
    x = torch.zeros(3, requires_grad=True)
    older, newer = x * 2, x + 1
    assert borders.sequence_number(older.grad_fn) < borders.sequence_number(newer.grad_fn)


@canary("copy_all_")
def test_many_tensors_are_copied_at_once():
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)]
    borders.copy_all_(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [t.tolist() for t in targets] == [[1, 1], [2, 2, 2]]


@canary("overwritable_library")
def test_an_operator_may_be_defined_again():
    for factor in (2, 3):
        library = borders.overwritable_library("headwise_canary", "times")
        torch.library.define("headwise_canary::times", "(Tensor x) -> Tensor", lib=library)
        torch.library.impl("headwise_canary::times", "cpu", lambda x, factor=factor: x * factor, lib=library)
        assert torch.ops.headwise_canary.times(torch.ones(())) == factor


@canary("on_all")
@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_tensors_of_a_list_are_changed_together(operation):
    tensors, others = [torch.ones(2), torch.ones(3)], [torch.full((2,), 2.0), torch.full((3,), 3.0)]
    made = borders.on_all(operation)(tensors, others)
    want = [getattr(torch, operation)(one, other) for one, other in zip(tensors, others, strict=True)]
    assert all(map(torch.equal, made, want))
    borders.on_all(f"{operation}_")(tensors, others)
    assert all(map(torch.equal, tensors, want))


@canary("on_all")
def test_the_operators_that_the_optimizers_take_exist():
    tensors, others = [torch.tensor([-2.0, 0.0, 3.0])], [torch.tensor([1.0, 1.0, 1.0])]
    assert borders.on_all("lerp")(tensors, others, 0.5)[0].tolist() == [-0.5, 0.5, 2.0]
    assert borders.on_all("sign")(tensors)[0].tolist() == [-1.0, 0.0, 1.0]
    borders.on_all("sign_")(tensors)
    borders.on_all("add_")(tensors, 1)
    borders.on_all("clamp_max_")(tensors, 1)
    assert tensors[0].tolist() == [0.0, 1.0, 1.0]
    borders.on_all("lerp_")(tensors, others, 0.5)
    borders.on_all("mul_")(tensors, [2.0])
    borders.on_all("add_")(tensors, others, alpha=-1.0)
    assert tensors[0].tolist() == [0.0, 1.0, 1.0]
    borders.on_all("copy_")(tensors, others)
    assert torch.equal(tensors[0], others[0])


@canary("norms_of")
def test_norms_are_computed_in_the_wider_dtype():
    tensors = [torch.randn(3, 400).bfloat16(), torch.randn(50).bfloat16()]
    norms = borders.norms_of(tensors, torch.float32)
    assert [norm.dtype for norm in norms] == [torch.float32] * 2
    torch.testing.assert_close(torch.stack(norms), torch.stack([x.float().norm() for x in tensors]))


@canary("tree_leaves", "tree_map")
def test_nested_containers_are_walked():
    batch = {"x": torch.ones(2), "rest": [torch.zeros(1), (3, None)]}
    assert [type(leaf) for leaf in borders.tree_leaves(batch)][:3] == [torch.Tensor, torch.Tensor, int]
    doubled = borders.tree_map(lambda x: x * 2 if isinstance(x, torch.Tensor) else x, batch)
    assert doubled["x"].tolist() == [2, 2] and doubled["rest"][1] == (3, None)


class Seen(borders.DispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


@canary("DispatchMode", "flash_on_cpu", "flash_on_cpu_backward")
def test_fused_attention_on_the_cpu_calls_the_kernel_and_its_backward():
    q, k, v = (torch.randn(2, 3, 40, 8, requires_grad=True) for _ in range(3))
    with Seen() as seen:
        functional.scaled_dot_product_attention(q, k, v).sum().backward()
    assert borders.flash_on_cpu in seen.operators and borders.flash_on_cpu_backward in seen.operators


@canary("flash_on_cpu")
def test_the_kernel_returns_the_log_sum_exp_and_scales_before_it_takes_the_maximum():
    q, k, v = (torch.randn(2, 3, 40, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.zeros(1, 1, 40, 40, dtype=torch.float64).masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    out, lse = borders.flash_on_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=0.3)
    logits = q @ k.mT * 0.3 + mask
    torch.testing.assert_close(out, logits.softmax(-1) @ v)
    torch.testing.assert_close(lse, logits.logsumexp(-1), check_dtype=False)
    causal, _ = borders.flash_on_cpu(q, k, v, 0.0, True, attn_mask=None, scale=0.3)
    torch.testing.assert_close(causal, out)
    _, sharp = borders.flash_on_cpu(q.float(), k.float(), v.float(), 0.0, False, attn_mask=None, scale=1e8)
    torch.testing.assert_close(sharp / 1e8, (q @ k.mT).amax(-1).float())


def stack():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class Looking(nn.Module):
    """Looks for its own call on the stack, like a compiled forward after a graph break."""

    def forward(self, x):
        self.look()
        return x + 1

    @torch.compiler.disable
    def look(self):
        call = borders.MODULE_CALL
        self.found = any(
            (frame.f_code.co_name, frame.f_code.co_filename) == (call.co_name, call.co_filename)
            and frame.f_locals.get("self") is self
            for frame in stack()
        )
        self.resumed = [frame.f_code.co_name for frame in stack() if frame.f_code.co_name.startswith(borders.RESUMED)]


@canary("MODULE_CALL")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_running_module_is_found_on_the_stack(compiled):
    module = Looking()
    model = nn.Sequential(nn.Identity(), module)
    (torch.compile(model, backend="eager") if compiled else model)(torch.ones(2))
    assert module.found


@canary("RESUMED")
def test_a_function_that_is_resumed_after_a_graph_break_has_its_name():
    module = Looking()

    def run(x):
        torch._dynamo.graph_break()
        return module.look(), x + 1

    torch.compile(run, backend="eager")(torch.ones(2))
    assert module.resumed


@canary("PRUNED_NAME")
def test_the_hook_of_pruning_knows_its_weight():
    layer = nn.Linear(2, 2)
    prune.identity(layer, "weight")
    (hook,) = borders.forward_pre_hooks_of(layer).values()
    assert getattr(hook, borders.PRUNED_NAME) == "weight"


@canary("COMPILED_INSIDE")
def test_a_compiled_model_keeps_the_model():
    model = nn.Linear(2, 3)
    compiled = torch.compile(model, backend="eager")
    assert borders.own_modules(compiled)[borders.COMPILED_INSIDE] is model
    assert type(compiled).__name__ == "OptimizedModule" and type(compiled).__module__.startswith("torch.")


@canary("is_compiled")
def test_a_module_that_is_compiled_in_place_is_known():
    model = nn.Sequential(nn.Linear(2, 3))
    assert not borders.is_compiled(model)
    model.compile(backend="eager")
    assert borders.is_compiled(model) and not borders.is_compiled(model[0])


@canary("not_compiled")
def test_a_function_is_kept_out_of_graphs():
    inside = []

    @borders.not_compiled
    def outside(x):
        inside.append(torch.compiler.is_compiling())
        return x.tolist()

    assert torch.compile(lambda x: outside(x + 1), backend="eager")(torch.ones(2)) == [2, 2]
    assert inside == [False]


@canary("constant_in_graphs")
def test_a_marked_function_is_a_constant_of_a_graph():
    def crc(name):
        return zlib.crc32(name.encode())

    def run(x):
        return x + crc("DropHead")

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    zero = torch.zeros(1, dtype=torch.int64)
    with warnings.catch_warnings():
        # torch.compile warns about code that it cannot trace
        warnings.simplefilter("ignore")
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(zero)
    borders.constant_in_graphs(crc)
    torch.compiler.reset()
    assert compiled(zero).item() == zlib.crc32(b"DropHead")


@canary("compile_errors")
def test_what_cannot_be_compiled_raises_a_known_error():
    def run(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(borders.compile_errors()) as told:
        torch.compile(run, backend="eager", fullgraph=True)(torch.ones(1))
    assert isinstance(told.value, borders.compile_errors()[0])
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        twice = torch.compile(lambda x, n: x + n, backend="eager", fullgraph=True, dynamic=False)
        twice(torch.ones(1), 1)
        with pytest.raises(borders.compile_errors()[1]):
            twice(torch.ones(1), 2)
    torch.compiler.reset()


@canary("uncompiled")
def test_the_function_inside_a_wrapper_is_found():
    def plain(x):
        return x + 1

    assert borders.uncompiled(torch.compile(plain, backend="eager")) is plain
    assert borders.uncompiled(torch.compiler.disable(plain)) is plain
    assert borders.uncompiled(plain) is plain


@canary("indexing_by_tensors")
def test_scalar_tensors_index_as_tensors():
    table, place = torch.arange(5.0, requires_grad=True), torch.tensor(2)

    def is_view(entry):
        return entry.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()

    # a Python number makes a view
    assert is_view(table[place])
    with borders.indexing_by_tensors():
        assert not is_view(table[place])
        entries = torch.vmap(lambda place: table[place] + torch.where(place > 1, table[place], 0.0))(torch.arange(3))
    assert entries.tolist() == [0, 1, 4]
    entries.sum().backward()
    assert table.grad.tolist() == [1, 1, 2, 0, 0]


@canary("in_backward")
def test_a_running_backward_is_seen():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(borders.in_backward()))
    assert not borders.in_backward()
    y.sum().backward()
    assert not borders.in_backward() and seen == [True]


@canary("pack_functions")
def test_hooks_for_saved_tensors_are_read_and_stay():
    packed = []

    def outer(x):
        packed.append("outer")
        return x

    def inner(x):
        packed.append("inner")
        return x

    assert borders.pack_functions() == []
    x = torch.ones(2, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(outer, lambda x: x):
        with hooks(inner, lambda x: x):
            assert borders.pack_functions() == [inner, outer]
            x.square()
        x.square()
        assert borders.pack_functions() == [outer]
    assert packed == ["inner", "outer"] and borders.pack_functions() == []


@canary("checkpoint_of")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpointed_region_is_known_in_both_of_its_runs(compiled):
    runs = []

    @torch.compiler.disable
    def note():
        runs.append([found for pack in borders.pack_functions() if (found := borders.checkpoint_of(pack)) is not None])

    def region(x):
        note()
        return x.sin()

    run = torch.compile(region, backend="eager") if compiled else region
    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()
    ((frame, again, _),), ((same, recomputed, number),) = runs
    assert not again and recomputed and same is frame
    assert isinstance(number, int)


@canary("profiled_memory")
def test_allocations_are_recorded():
    with borders.profiled_memory() as roots:
        assert roots == []
        torch.ones(1 << 18)
    sizes = [event.extra_fields.alloc_size for event in roots if event.name == "[memory]"]
    assert max(sizes) == 1 << 20 and min(sizes) == -(1 << 20)


@pytest.fixture
def process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@canary("FSDP1_INSIDE", "is_flattened", "has_flat_parameter")
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.usefixtures("process_group")
def test_what_fsdp1_has_made_of_a_model_is_known(original):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(nn.Linear(2, 3))
    assert not borders.is_flattened(model[0].weight) and not borders.has_flat_parameter(model)
    with warnings.catch_warnings():
        # one process shards nothing, and newer versions of torch advise FSDP2
        warnings.simplefilter("ignore")
        wrapped = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
    assert borders.own_modules(wrapped)[borders.FSDP1_INSIDE] is model
    if original:
        assert borders.is_flattened(model[0].weight)
    else:
        assert any(map(borders.has_flat_parameter, wrapped.modules()))
        assert isinstance(vars(model[0])["weight"], torch.Tensor)


@canary("tokens_split")
@pytest.mark.usefixtures("process_group")
def test_context_parallelism_is_noticed():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    plain = functional.scaled_dot_product_attention
    q = torch.zeros(1, 1, 8, 4)
    assert not borders.tokens_split(q)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (1,))
        with context_parallel(mesh, buffers=[torch.zeros(2, 8)], buffer_seq_dims=[1]):
            replaced = functional.scaled_dot_product_attention
            assert replaced is not plain and borders.tokens_split(q)
    assert functional.scaled_dot_product_attention is plain


def llama(**settings):
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaModel(LlamaConfig(**sizes, vocab_size=10, **settings)).eval()


@canary("tensor_parallel_size")
def test_a_model_tells_over_how_many_processes_its_heads_are_split():
    model = llama()
    assert borders.tensor_parallel_size(model) == borders.tensor_parallel_size(nn.Linear(2, 2)) == 1
    model._tp_size = 2
    assert borders.tensor_parallel_size(model) == model.tp_size == 2


@canary("has_attention_kind", "attention_kind", "set_attention_kind")
def test_a_copied_config_routes_its_layer_alone():
    from transformers import AttentionInterface

    called = []

    def ours(module, query, key, value, attention_mask, **_):
        called.append(module)
        return query.transpose(1, 2), None

    AttentionInterface.register("canary", ours)
    model = llama()
    layer, shared = model.layers[0].self_attn, model.config
    assert borders.has_attention_kind(shared) and not borders.has_attention_kind(None)
    assert borders.attention_kind(shared) == "sdpa"
    layer.config = copy.copy(shared)
    borders.set_attention_kind(layer.config, "canary")
    model(torch.ones(1, 4, dtype=torch.int64))
    assert called == [layer]
    assert borders.attention_kind(layer.config) == "canary" and borders.attention_kind(shared) == "sdpa"


@canary("set_attention_kind")
def test_a_copied_config_leaves_the_parts_that_it_shares():
    from transformers import CLIPConfig

    config = CLIPConfig()
    parts = [borders.attention_kind(part) for part in (config.text_config, config.vision_config)]
    borders.set_attention_kind(copy.copy(config), "canary")
    assert [borders.attention_kind(part) for part in (config.text_config, config.vision_config)] == parts


@canary("collected_outputs")
@pytest.mark.parametrize("by", ["keyword", "config"])
def test_a_layer_sees_which_outputs_its_model_collects(by):
    model = llama(attn_implementation="eager")
    seen = []
    model.layers[0].self_attn.register_forward_pre_hook(lambda *_: seen.append({*borders.collected_outputs()}))
    ids = torch.ones(1, 4, dtype=torch.int64)
    model(ids)
    model.config.output_attentions = by == "config"
    model(ids, **({"output_attentions": True} if by == "keyword" else {}))
    assert seen[0] == set() and any("attentions" in key for key in seen[1])
    assert not borders.collected_outputs()


@canary("LOGGERS")
def test_reporting_callbacks_keep_their_loggers():
    integrations = importlib.import_module("transformers.integrations.integration_utils")
    keepers = "TensorBoardCallback", "WandbCallback", "TrackioCallback", "MLflowCallback"
    for keeper, name in zip(keepers, borders.LOGGERS, strict=True):
        functions = [f for f in vars(getattr(integrations, keeper)).values() if hasattr(f, "__code__")]
        assert any(name in function.__code__.co_names for function in functions), name


@canary("LABELS")
def test_the_trainer_holds_the_labels_that_it_has_taken_out():
    from transformers import Trainer

    class Enough(Exception):
        pass

    calls = []

    def model(**inputs):
        calls.append((inputs, sys._getframe(1).f_locals[borders.LABELS]))
        raise Enough

    labels = torch.ones(2)
    # a Trainer would need a newer accelerate than headwise does
    trainer = MagicMock(label_smoother=object(), compute_loss_func=None, model_accepts_loss_kwargs=False)
    with pytest.raises(Enough):
        Trainer.compute_loss(trainer, model, {"labels": labels})
    assert calls == [({}, labels)]


@canary("precision_of_process", "forget_precision")
def test_a_process_can_change_its_precision():
    from accelerate import Accelerator

    borders.forget_precision()
    assert borders.precision_of_process("no") == "no"
    Accelerator(cpu=True, mixed_precision="bf16")
    assert borders.precision_of_process("no") == "bf16"
    with pytest.raises(ValueError, match="mixed_precision"):
        Accelerator(cpu=True, mixed_precision="no")
    borders.forget_precision()
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"
    borders.forget_precision()


@canary("TORCH_BACKENDS")
@pytest.mark.parametrize("backend", sorted(borders.TORCH_BACKENDS))
def test_backends_of_torch_call_its_fused_attention(backend, monkeypatch):
    library = importlib.import_module("diffusers.models.attention_dispatch")
    called, plain = [], functional.scaled_dot_product_attention

    def ours(query, *others, **named):
        called.append(query)
        return torch.zeros_like(query)

    monkeypatch.setattr(functional, plain.__name__, ours)
    q = torch.randn(1, 4, 2, 8)
    library.dispatch_attention_fn(q, q, q, backend=library.AttentionBackendName(backend))
    assert len(called) == 1


@canary("active_backend")
def test_the_active_backend_of_diffusers_is_told():
    library = importlib.import_module("diffusers.models.attention_dispatch")
    assert borders.active_backend(library).value == "native"
    with library.attention_backend("_native_math"):
        assert borders.active_backend(library).value == "_native_math"
    assert borders.active_backend(library).value == "native"


@canary("lora_convolution")
def test_lora_layers_of_convolutions_have_one_base():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(4, 2))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "1"]))
    library = importlib.import_module("peft.tuners.lora.layer")
    convolution, linear = adapted.base_model.model
    assert isinstance(convolution, borders.lora_convolution(library))
    assert not isinstance(linear, borders.lora_convolution(library)) and isinstance(linear, library.Linear)


@canary("trial_id")
def test_an_interrupted_trial_is_opened_again():
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    study.tell(study.ask(), 1.0)
    begun = study.ask()
    begun.suggest_float("rate", 0, 1)
    (running,) = (trial for trial in study.trials if trial.state == optuna.trial.TrialState.RUNNING)
    again = optuna.trial.Trial(study, borders.trial_id(running))
    assert again.number == begun.number and again.params == begun.params


@canary("joins_unevenly")
def test_a_forward_inside_join_is_known(tmp_path):
    seen = []

    class Looks(nn.Linear):
        def forward(self, x):
            seen.append(borders.joins_unevenly())
            return super().forward(x)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Looks(2, 2))
        wrapped(torch.ones(1, 2))
        # torch leaves the wrapper in this mode afterwards
        with wrapped.join():
            wrapped(torch.ones(1, 2))
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [False, True] and not borders.joins_unevenly()
