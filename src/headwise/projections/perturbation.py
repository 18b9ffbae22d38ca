"""Perturbation: find the projections of a site by changing rows of weights; nothing is assumed about names or order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headwise.core.site import Site
from headwise.projections import capture, named
from headwise.projections.inputs import ways
from headwise.projections.layout import Layout, Sizes, as_rows, layouts
from headwise.projections.leaves import Leaf, leaves
from headwise.projections.probe import Probe, Unclear
from headwise.projections.site_projections import Projections


def probed(site: Site, model: nn.Module | None, example: Any, parent: nn.Module | None) -> Projections:
    """Return the projections of a site, verified by perturbing rows.

    Raises:
        Unclear: with the reason, where the layout cannot be seen.
    """
    found = leaves(site.module, site.name)
    if not found:
        raise Unclear("has no linear layer below it")
    if any(p.device.type == "meta" for p in site.module.parameters()):
        raise Unclear("has weights without numbers (meta device), so that its layout cannot be seen")
    reasons = []
    for root, run in ways(site, model, example):
        with capture.untouched(root):
            try:
                return _from(site, found, root, run, parent)
            except Unclear as reason:
                reasons.append(str(reason))
            except (
                TypeError,
                ValueError,
                RuntimeError,
                AttributeError,
                IndexError,
                KeyError,
                NotImplementedError,
            ) as error:
                # The layer alone takes no single tensor, or the synthesised batch does not fit: the next way is tried.
                reasons.append(
                    f"could not be run ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
                )
    raise Unclear(_worth_telling(reasons))


def _worth_telling(reasons: list[str]) -> str:
    seen = [reason for reason in reasons if not reason.startswith("could not be run")]
    return seen[-1] if seen else f"{reasons[0]}; pass example= with a batch"


def _from(
    site: Site, found: list[Leaf], root: nn.Module, run: Callable[[], Any], parent: nn.Module | None
) -> Projections:
    call = capture.arguments(root, site.module, run)
    if call is None:
        raise Unclear("was not reached by the batch it was run on; pass example= with one that reaches it")
    reasons = []
    for axis in (1, 2):
        probe = Probe(site, call, found, axis)
        if axis == 2 and probe.axes < 5:
            break
        try:
            return _assembled(site, probe, found, parent)
        except Unclear as reason:
            reasons.append(reason)
    raise reasons[0]


def _assembled(site: Site, probe: Probe, found: list[Leaf], parent: nn.Module | None) -> Projections:
    makers = _makers(probe, found)
    made = Projections(site.name, "", verified=True)
    words = []
    for one in found:
        kinds = "".join(kind for kind, maker in makers.items() if maker is one)
        if not kinds:
            continue
        sizes, layout = _layout(probe, one, kinds)
        words.append(f"{layout.words}{', transposed' if one.transposed else ''}")
        for kind in kinds:
            heads, size = sizes.of(kind)
            setattr(made, kind, named.block(kind, one, as_rows(layout.rows[kind]), heads, size, site))
    made.layout = "; ".join(dict.fromkeys(words))
    _outside_biases(made, site)
    _output(made, probe, [one for one in probe.order if one not in makers.values()], site, parent)
    return made


def _makers(probe: Probe, found: list[Leaf]) -> dict[str, Leaf]:
    """Return the one leaf that makes each of q, k and v."""
    moved = [(one, probe.moved(one, torch.arange(one.rows))) for one in found]
    return {kind: _maker(probe, kind, [one for one, by in moved if by[kind].any()]) for kind in "qkv"}


def _maker(probe: Probe, kind: str, movers: list[Leaf]) -> Leaf:
    """Return the leaf among those that move q, k or v whose rows are its heads.

    Raises:
        Unclear: where there is none or more than one, or where it is no matrix.
    """
    matrices = [one for one in movers if not one.obstacle]
    # A convolution before the projection, such as the spatial reduction of Twins, only changes its input.
    if len(matrices) == 1 and [one for one in probe.order if one in movers][-1:] == matrices:
        movers = matrices
    if len(movers) != 1:
        names = " and ".join(one.name for one in movers) or "no linear layer"
        tail = "; merge adapters and low-rank factors into one weight first" if len(movers) > 1 else ""
        raise Unclear(f"makes its {kind} by {names}{tail}")
    if movers[0].obstacle:
        raise Unclear(f"makes its {kind} by {movers[0].name}, {movers[0].obstacle}")
    return movers[0]


def _outside_biases(made: Projections, site: Site) -> None:
    # What the module itself adds to q, k or v is as long as these and in their order, wherever the rows of the weight
    # lie.
    for block in (made.q, made.k, made.v):
        if block is not None and block.bias_module is site.module and block.bias_name:
            block.bias_rows = None


def _layout(probe: Probe, one: Leaf, kinds: str) -> tuple[Sizes, Layout]:
    """Return the one layout that the perturbations agree with."""
    q, k, v = (probe.base[kind] for kind in "qkv")
    for groups in [g for g in range(1, k.shape[1] + 1) if k.shape[1] % g == 0][::-1]:
        sizes = Sizes(q.shape[1], groups, q.shape[-1], v.shape[-1])
        if sizes.rows(kinds) != one.rows:
            continue
        for layout in layouts(kinds, sizes):
            if _agrees(probe, one, layout, sizes):
                return sizes, layout
    shown = f"{q.shape[1]} heads of {q.shape[-1]}"
    raise Unclear(f"has one {one.name} with {one.rows} rows for {', '.join(kinds)} in no known order ({shown})")


def _agrees(probe: Probe, one: Leaf, layout: Layout, sizes: Sizes) -> bool:
    """Perturb the rows of coded sets of heads, then of coded sets of entries: exactly those must move."""
    units = [(kind, head) for kind, rows in layout.rows.items() for head in range(len(rows))]
    for chosen in _codes(len(units)):
        picked = [units[i] for i in chosen]
        moved = probe.moved(one, torch.cat([layout.rows[kind][head] for kind, head in picked]))
        for kind in "qkv":
            expected = [(kind, head) in picked for head in range(sizes.of(kind)[0])]
            if _per_head(moved[kind].any(-1), sizes, kind).tolist() != expected:
                return False
    return all(_entries_agree(probe, one, rows, kind) for kind, rows in layout.rows.items())


def _per_head(moved: Tensor, sizes: Sizes, kind: str) -> Tensor:
    # Hosts repeat grouped keys and values to all heads before they call attention.
    heads = sizes.of(kind)[0]
    return moved.view(heads, -1).any(1)


def _entries_agree(probe: Probe, one: Leaf, rows: Tensor, kind: str) -> bool:
    """Check the order within heads: of v exactly; rotary positions and norms spread q and k over further entries."""
    for chosen in _codes(rows.shape[1]):
        index = torch.tensor(chosen)
        moved = probe.moved(one, rows[:, index].reshape(-1))[kind].any(0)
        if not moved[index].all() or (kind == "v" and int(moved.sum()) != len(chosen)):
            return False
    return True


def _codes(count: int) -> Iterator[list[int]]:
    """Return sets that tell `count` things apart: for each binary digit those that have it and those that do not."""
    for bit in range(max(1, (count - 1).bit_length())):
        for value in (1, 0):
            chosen = [i for i in range(count) if (i >> bit) & 1 == value]
            if chosen:
                yield chosen


def _output(made: Projections, probe: Probe, after: list[Leaf], site: Site, parent: nn.Module | None) -> None:
    heads, size = probe.base["q"].shape[1], probe.base["v"].shape[-1]
    for one in after:
        if one.columns != heads * size or not probe.columns(one, None, None).any():
            continue
        plain = torch.arange(heads * size)
        for index in (plain.view(heads, size), plain.view(size, heads).t()):
            if _columns_agree(probe, one, index):
                made.o = named.block("o", one, as_rows(index), heads, size, site)
                return
        made.missing["o"] = f"has {one.name}, whose inputs follow no known order of heads"
        return
    beside = named.by_name(site, parent).get("o")
    named.add_output(
        made, beside if beside is not None and id(beside) not in map(id, after) else None, heads, size, site
    )


def _columns_agree(probe: Probe, one: Leaf, index: Tensor) -> bool:
    heads, size = index.shape
    for chosen in _codes(heads):
        if sorted(index[chosen].reshape(-1).tolist()) != _moved(probe.columns(one, torch.tensor(chosen), None)):
            return False
    for chosen in _codes(size):
        if sorted(index[:, chosen].reshape(-1).tolist()) != _moved(probe.columns(one, None, torch.tensor(chosen))):
            return False
    return True


def _moved(columns: Tensor) -> list[int]:
    return columns.nonzero().flatten().tolist()
