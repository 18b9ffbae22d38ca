"""Formulas as MathML, which browsers draw natively: no script is downloaded, in the build or by the reader."""

from __future__ import annotations

from typing import Any

from docutils.utils.math import latex2mathml


def mathml(formula: str, *, block: bool) -> str:
    """Return the MathML of a LaTeX formula.

    Raises:
        docutils.utils.math.MathError: if the formula uses commands that the converter does not know.
    """
    wrapped = rf"\begin{{align*}}{formula}\end{{align*}}" if block and r"\\" in formula else formula
    return latex2mathml.tex2mathml(wrapped, as_block=block)


def _inline(self: Any, node: Any) -> None:
    from docutils import nodes

    self.body.append(mathml(node.astext(), block=False))
    raise nodes.SkipNode


def _block(self: Any, node: Any) -> None:
    from docutils import nodes

    self.body.append(f'<div class="formula" tabindex="0">{mathml(node.astext(), block=True)}</div>\n')
    raise nodes.SkipNode


def register(app: Any) -> None:
    """Make this build draw formulas as MathML."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
