"""Other tokens: which text meets an image in a call of a layer of diffusers, and where it stands among queries and
keys."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from typing import Any

from torch import Tensor, nn

from headwise.core.forward import Entered
from headwise.hosts.layers.code import forward_of

GIVEN = "encoder_hidden_states"
TEXT = re.compile(r"encoder|txt|text|context|_t$")


@functools.lru_cache(maxsize=256)
def text_first(function: Any) -> bool | None:
    """Return whether code puts a text's tokens before an image's where it joins both to one sequence, or None where it
    joins none.

    Read from its source: of two things that are joined, one is named as a text's and the other is not.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    found = {order for node in ast.walk(tree) if (order := _joined(node)) is not None}
    # Code that joins them in both orders says nothing.
    return found.pop() if len(found) == 1 else None


def _joined(node: ast.AST) -> bool | None:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("cat") and node.args):
        return None
    parts = node.args[0].elts if isinstance(node.args[0], ast.List | ast.Tuple) else []
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    if len(parts) != 2 or len(names) != 2 or not all(re.search("key|^k_|_k$|hidden_states", name) for name in names):
        return None
    text = [TEXT.search(name) is not None for name in names]
    return text[0] if text[0] != text[1] else None


class OtherTokens:
    """Notes the text that a layer, or the block around it, is called with until the layer's attention is computed.

    Args:
        layer: the attention layer.
        block: the module around it, which joins image and text itself where the layer is given one sequence.
        first: whether the layer's processor puts the text first; None where it joins nothing.
    """

    def __init__(self, layer: nn.Module, block: nn.Module | None, first: bool | None) -> None:
        self.layer, self.block, self.first = layer, block, first
        self.block_first = None if block is None else text_first(forward_of(block))
        self.own, self.around = Entered(), Entered()

    def hooks(self) -> list[Any]:
        """Hook the layer, and the block where its own code joins image and text; give the handles."""
        handles = [self.layer.register_forward_pre_hook(self._before, with_kwargs=True)]
        if self.block is not None and self.block_first is not None:
            handles.append(self.block.register_forward_pre_hook(self._before_block, with_kwargs=True))
        return handles

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.own.put(_length(module, args, kwargs))

    def _before_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.around.put(_length(module, args, kwargs))

    def at(self, queries: int, keys: int) -> tuple[slice | None, bool, bool]:
        """Return where the text stands among the tokens of this call, whether it came apart from the image, and whether
        the keys are others."""
        own, around = self.own.take(), self.around.take()
        if own is not None:
            joined = queries == keys and queries > own
            text = _place(own, keys, self.first) if joined and self.first is not None else None
            # Without a word of the code's, a sequence as long as both is not taken for both.
            return text, text is not None, text is None
        joined = around is not None and queries == keys and queries > around
        return (_place(around, keys, self.block_first) if joined else None), False, False


def _place(length: int, keys: int, first: bool | None) -> slice:
    return slice(0, length) if first else slice(keys - length, keys)


def _length(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return how many tokens a module is called with besides its own, or None where it is given none."""
    given = kwargs.get(GIVEN)
    if given is None:
        names = list(inspect.signature(forward_of(module)).parameters)[1:]
        at = names.index(GIVEN) if GIVEN in names else len(args)
        given = args[at] if at < len(args) else None
    return given.shape[1] if isinstance(given, Tensor) and given.dim() > 2 else None
