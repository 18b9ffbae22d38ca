"""Find the projections of a site, also fused ones, by perturbing rows of weights: no name or order is assumed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.core import Site
from headwise.attend.projections import capture, named
from headwise.attend.projections.adapted import is_adapted
from headwise.attend.projections.block import as_rows
from headwise.attend.projections.capture import ways
from headwise.attend.projections.leaves import Leaf
from headwise.attend.projections.site_projections import Projections
from headwise.borders import Convolution, own_modules


@dataclass(frozen=True)
class CallSizes:
    """Heads and head sizes of a call: H query heads of size d, and G key and value heads of sizes d and e."""

    heads: int
    groups: int
    size: int
    value_size: int

    def of(self, kind: str) -> tuple[int, int]:
        """Return (heads, head size) of q, k or v."""
        return {"q": (self.heads, self.size), "k": (self.groups, self.size), "v": (self.groups, self.value_size)}[kind]

    def rows(self, kinds: str) -> int:
        """Return the total number of rows of the kinds."""
        return sum(heads * size for heads, size in map(self.of, kinds))


@dataclass(frozen=True)
class LayoutGuess:
    """A hypothesis: the layout in words, and the rows (heads, head size) of each kind."""

    words: str
    rows: dict[str, Tensor]


def layouts(kinds: str, sizes: CallSizes) -> Iterator[LayoutGuess]:
    """Yield the layouts that one matrix for `kinds` can have, the usual ones first."""
    orders = sorted(itertools.permutations(kinds), key=lambda order: "".join(order) != kinds)
    for order in orders:
        yield _stacked(order, sizes)
    if len(kinds) > 1:
        for order in orders:
            yield _grouped(order, sizes)
    if len({sizes.of(kind) for kind in kinds}) == 1:
        for order in orders:
            yield from _transposed(order, sizes)


def _stacked(order: tuple[str, ...], sizes: CallSizes) -> LayoutGuess:
    rows, start = {}, 0
    for kind in order:
        heads, size = sizes.of(kind)
        rows[kind] = torch.arange(start, start + heads * size).view(heads, size)
        start += heads * size
    equal = len({sizes.of(kind) for kind in order}) == 1
    words = f"stacked ({len(order)}, H, d)" if equal else "stacked, unequal blocks"
    return LayoutGuess(f"{words} as {', '.join(order)}" if len(order) > 1 else "separate", rows)


def _grouped(order: tuple[str, ...], sizes: CallSizes) -> LayoutGuess:
    """Return the layout interleaved by key/value head: queries of its group, keys, values (GPT-NeoX, Falcon)."""
    per_group = {kind: sizes.of(kind)[0] // sizes.groups * sizes.of(kind)[1] for kind in order}
    width, offset, rows = sum(per_group.values()), 0, {}
    for kind in order:
        heads, size = sizes.of(kind)
        start = torch.arange(sizes.groups)[:, None] * width + offset
        rows[kind] = (start + torch.arange(per_group[kind])).reshape(heads, size)
        offset += per_group[kind]
    return LayoutGuess(f"interleaved by head (H, {len(order)}, d) as {', '.join(order)}", rows)


def _transposed(order: tuple[str, ...], sizes: CallSizes) -> Iterator[LayoutGuess]:
    heads, size = sizes.of(order[0])
    extent = {"part": len(order), "head": heads, "dim": size}
    for axes in (("part", "dim", "head"), ("head", "dim", "part"), ("dim", "part", "head"), ("dim", "head", "part")):
        grid = torch.arange(len(order) * heads * size).view(*(extent[axis] for axis in axes))
        grid = grid.permute(axes.index("part"), axes.index("head"), axes.index("dim"))
        letters = ", ".join({"part": str(len(order)), "head": "H", "dim": "d"}[axis] for axis in axes)
        yield LayoutGuess(f"({letters}) as {', '.join(order)}", dict(zip(order, grid, strict=True)))


# Relative to a tensor's largest entry: above the rounding of entries that did not change, far below the effect of noise
# as large as the rows themselves.
MOVED = 1e-5


class Unclear(Exception):
    """Raised with the reason why a site's layout cannot be determined, to follow the site's name in a sentence."""


class Probe:
    """A recorded call of an attention module, replayed with perturbed rows of its projections or heads of its output.

    Attributes:
        base: q, k and v of the unperturbed call, each (B, H, T, D).
        order: the leaves that ran as modules, in the order in which they ran.
        axes: number of dimensions of the host's queries: 4, or 5 with windows.
    """

    def __init__(self, site: Site, call: capture.RecordedCall, candidates: list[Leaf], head_axis: int = 1) -> None:
        self.site, self.call, self.head_axis = site, call, head_axis
        self.order: list[Leaf] = []
        self.outputs: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}
        self.axes = 0
        handles = [projection.module.register_forward_hook(self._note(projection)) for projection in candidates]
        try:
            self.base = self.replay()
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, projection: Leaf) -> Any:
        def note(_: nn.Module, __: Any, output: Tensor) -> None:
            self.order.append(projection)
            self.outputs[id(projection)] = output

        return note

    def replay(self, edit: Any = None) -> dict[str, Tensor]:
        """Run the call again and return the q, k and v that attention received."""
        with capture.seen(self.site.module, edit) as calls:
            capture.again(self.site.module, self.call)
        if not calls:
            raise Unclear(
                "computes attention itself: neither F.scaled_dot_product_attention nor transformers' interface ran; "
                "name its projections q_proj, k_proj, v_proj and out_proj, or call F.scaled_dot_product_attention"
            )
        if len(calls) > 1:
            raise Unclear(f"calls attention {len(calls)} times in one pass")
        self.axes = calls[0].q.dim()
        return {kind: self._heads_second(getattr(calls[0], kind)) for kind in "qkv"}

    def _heads_second(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) if x.dim() == 3 else x.movedim(self.head_axis, 1).flatten(2, -2)

    def moved(self, projection: Leaf, rows: Tensor) -> dict[str, Tensor]:
        """Perturb rows of a leaf and return for q, k and v which entries changed, bool (H, D)."""
        with self._perturbed(projection, rows):
            now = self.replay()
            return {kind: _far(self.base[kind], now[kind]).any(2).any(0) for kind in now}

    @contextmanager
    def repeated(self, projections: Collection[Leaf]) -> Iterator[None]:
        """Let leaves give the outputs of the unperturbed call again, instead of computing them in every replay.

        Their hooks still run, so that outputs can be perturbed. A leaf that ran twice, or not as a module, computes.
        """
        modules = [p.module for p in projections if self.order.count(p) == 1 and "forward" not in p.module.__dict__]
        outputs = [self.outputs[id(p)] for p in projections if p.module in modules]
        for module, output in zip(modules, outputs, strict=True):
            module.__dict__["forward"] = lambda *_, output=output, **__: output.clone()
        try:
            yield
        finally:
            for module in modules:
                del module.__dict__["forward"]

    @contextmanager
    def _perturbed(self, projection: Leaf, rows: Tensor) -> Iterator[None]:
        # Where the module runs, its output is shifted: then no weight, adapted or quantized, has to change.
        if id(projection) in self.outputs:
            with _shifted_output(projection, rows, self.outputs[id(projection)]):
                yield
        elif is_adapted(projection.module):
            raise Unclear(
                f"reads {projection.name}.weight without calling its module, so that its adapters have no effect"
            )
        elif "parametrizations" in own_modules(projection.module):
            raise Unclear(
                f"reads {projection.name}.weight without calling its module, and that weight is parametrized already"
            )
        else:
            with _shifted_rows(projection, rows):
                yield

    def columns(self, projection: Leaf, heads: Tensor | None, dims: Tensor | None) -> Tensor:
        """Perturb heads, or entries within heads, of attention's output and return which inputs of a leaf changed, bool
        (C,)."""
        if id(projection) not in self._inputs:
            self._inputs[id(projection)] = self._input(projection, None)
        shifted = self._input(
            projection, lambda o, interface: _shift_heads(o, -2 if interface else self.head_axis, heads, dims)
        )
        return _far(self._inputs[id(projection)], shifted).flatten(0, -2).any(0)

    def _input(self, projection: Leaf, edit: Any) -> Tensor:
        """Run the call again and return the input of a leaf, channels last."""
        inputs: list[Tensor] = []
        handle = projection.module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().clone()))
        try:
            # what the leaf makes of its input is not looked at
            with self.repeated([projection]):
                self.replay(edit)
        finally:
            handle.remove()
        return inputs[0].movedim(1, -1) if isinstance(projection.module, Convolution) else inputs[0]


def _noise(like: Tensor) -> Tensor:
    # By a separate generator, which leaves the user's random numbers as they were.
    numbers = torch.randn(like.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(like)
    # As large as the numbers themselves, so that no precision hides it; for rows of zeros the scale is 1.
    size = like.detach().float().std()
    return numbers * (size if size > 0 else torch.ones_like(size)).to(like)


@contextmanager
def _shifted_output(projection: Leaf, rows: Tensor, output: Tensor) -> Iterator[None]:
    """Add noise to the outputs of the rows, which has the effect of changed rows without changing a weight."""
    convolution = isinstance(projection.module, Convolution)
    mask = torch.zeros(projection.rows, dtype=output.dtype, device=output.device)
    mask[rows.to(output.device)] = 1
    mask = mask.view(-1, *[1] * (output.dim() - 2)) if convolution else mask
    handle = projection.module.register_forward_hook(lambda _, __, out: out + _noise(out) * mask)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _shifted_rows(projection: Leaf, rows: Tensor) -> Iterator[None]:
    """Add noise to the rows themselves, and restore the saved weight bit for bit."""
    weight = projection.weight.data
    saved = weight.clone()
    try:
        view = weight.t() if projection.transposed else weight
        rows = rows.to(weight.device)
        view[rows] = view[rows] + _noise(view[rows])
        yield
    finally:
        weight.copy_(saved)


def _shift_heads(out: Tensor, axis: int, heads: Tensor | None, dims: Tensor | None) -> Tensor:
    noise = _noise(out)
    for dim, chosen in ((axis, heads), (out.dim() - 1, dims)):
        if chosen is not None:
            mask = torch.zeros(out.shape[dim], dtype=out.dtype, device=out.device)
            mask[chosen.to(out.device)] = 1
            noise = noise * mask.view([-1 if i == dim % out.dim() else 1 for i in range(out.dim())])
    return out + noise


def _far(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() - b.float()).abs() > MOVED * a.float().abs().amax().clamp(min=1e-12)


def probed(site: Site, model: nn.Module | None, example: Any, parent: nn.Module | None) -> Projections:
    """Return the projections of a site, verified by perturbing rows.

    Raises:
        Unclear: with the reason, if the layout cannot be determined.
    """
    candidates = Leaf.below(site.module, site.name)
    if not candidates:
        raise Unclear("has no linear layer below it")
    if any(p.device.type == "meta" for p in site.module.parameters()):
        raise Unclear("has weights without numbers (meta device), so that its layout cannot be determined")
    reasons: list[str] = []
    for root, run in ways(site, model, example):
        with capture.untouched(root):
            try:
                return _probed_by(site, candidates, root, run, parent)
            except Unclear as reason:
                reasons.append(str(reason))
                with capture.finite(root) as broken:
                    if broken:
                        return _probed_by(site, candidates, root, run, parent)
            except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
                # The layer may need more than one tensor, or the synthesised batch may not fit: try the next way.
                reasons.append(
                    f"could not be run ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
                )
    raise Unclear(_most_specific(reasons))


def _most_specific(reasons: list[str]) -> str:
    specific = [reason for reason in reasons if not reason.startswith("could not be run")]
    return specific[-1] if specific else f"{reasons[0]}; pass example= with a batch"


def _probed_by(
    site: Site, candidates: list[Leaf], root: nn.Module, run: Callable[[], Any], parent: nn.Module | None
) -> Projections:
    call = capture.arguments(root, site.module, run)
    if call is None:
        raise Unclear("was not called on the batch that the model was run on; pass example= with a batch that uses it")
    reasons = []
    # Heads are dimension 1 of (B, H, T, D); with windows, in five dimensions, they may be the one after.
    for axis in (1, 2):
        probe = Probe(site, call, candidates, axis)
        if axis == 2 and probe.axes < 5:
            break
        try:
            return _assembled(site, probe, candidates, parent)
        except Unclear as reason:
            reasons.append(reason)
    raise reasons[0]


def _assembled(site: Site, probe: Probe, candidates: list[Leaf], parent: nn.Module | None) -> Projections:
    makers = _makers(probe, candidates)
    projections = Projections(site.name, "", verified=True)
    words = []
    for candidate in candidates:
        kinds = "".join(kind for kind, maker in makers.items() if maker is candidate)
        if not kinds:
            continue
        # Each of q, k and v is made by one leaf, so that no other needs to be computed again.
        with probe.repeated(probe.order):
            sizes, layout = _layout(probe, candidate, kinds)
        words.append(f"{layout.words}{', transposed' if candidate.transposed else ''}")
        for kind in kinds:
            heads, size = sizes.of(kind)
            setattr(projections, kind, named.block(kind, candidate, as_rows(layout.rows[kind]), heads, size, site))
    projections.layout = "; ".join(dict.fromkeys(words))
    _outside_biases(projections, site)
    with probe.repeated([*dict.fromkeys(makers.values())]):
        _output(projections, probe, [leaf for leaf in probe.order if leaf not in makers.values()], site, parent)
    return projections


def _makers(probe: Probe, candidates: list[Leaf]) -> dict[str, Leaf]:
    """Return the single leaf that computes each of q, k and v."""
    moved = [(candidate, probe.moved(candidate, torch.arange(candidate.rows))) for candidate in candidates]
    return {
        kind: _maker(probe, kind, [candidate for candidate, changed in moved if changed[kind].any()]) for kind in "qkv"
    }


def _maker(probe: Probe, kind: str, movers: list[Leaf]) -> Leaf:
    """Return the one of `movers`, the leaves that change q, k or v, whose rows are its heads."""
    matrices = [mover for mover in movers if not mover.obstacle]
    # A convolution before the projection, such as the spatial reduction of Twins, only changes its input.
    if len(matrices) == 1 and [mover for mover in probe.order if mover in movers][-1:] == matrices:
        movers = matrices
    if len(movers) != 1:
        names = " and ".join(mover.name for mover in movers) or "no linear layer"
        tail = "; merge adapters and low-rank factors into one weight first" if len(movers) > 1 else ""
        raise Unclear(f"makes its {kind} by {names}{tail}")
    if movers[0].obstacle:
        raise Unclear(f"makes its {kind} by {movers[0].name}, {movers[0].obstacle}")
    return movers[0]


def _outside_biases(projections: Projections, site: Site) -> None:
    # A bias that the attention module itself adds is in the order of q, k or v, whatever the rows of the weight are.
    for block in (projections.q, projections.k, projections.v):
        if block is not None and block.bias_module is site.module and block.bias_name:
            block.bias_rows = None


def _layout(probe: Probe, projection: Leaf, kinds: str) -> tuple[CallSizes, LayoutGuess]:
    """Return the layout that the perturbations confirm."""
    q, k, v = (probe.base[kind] for kind in "qkv")
    # Hosts may repeat grouped keys, so the call shows only a multiple of their number; most models group none.
    for groups in [g for g in range(1, k.shape[1] + 1) if k.shape[1] % g == 0][::-1]:
        sizes = CallSizes(q.shape[1], groups, q.shape[-1], v.shape[-1])
        if sizes.rows(kinds) != projection.rows:
            continue
        for layout in layouts(kinds, sizes):
            if _agrees(probe, projection, layout, sizes):
                return sizes, layout
    expected = f"{q.shape[1]} heads of {q.shape[-1]}"
    raise Unclear(
        f"has one {projection.name} with {projection.rows} rows for {', '.join(kinds)} in no known order ({expected})"
    )


def _agrees(probe: Probe, projection: Leaf, layout: LayoutGuess, sizes: CallSizes) -> bool:
    """Return whether perturbed rows of coded sets of heads, then of entries, change exactly these."""
    units = [(kind, head) for kind, rows in layout.rows.items() for head in range(len(rows))]
    # A replay for each digit of the heads' numbers distinguishes them; one for each head would take far longer.
    for chosen in _codes(len(units)):
        picked = [units[i] for i in chosen]
        moved = probe.moved(projection, torch.cat([layout.rows[kind][head] for kind, head in picked]))
        for kind in "qkv":
            expected = [(kind, head) in picked for head in range(sizes.of(kind)[0])]
            if _per_head(moved[kind].any(-1), sizes, kind).tolist() != expected:
                return False
    return _entries_agree(probe, projection, layout)


def _per_head(moved: Tensor, sizes: CallSizes, kind: str) -> Tensor:
    # Hosts may repeat grouped keys and values to all heads before they call attention.
    heads = sizes.of(kind)[0]
    return moved.view(heads, -1).any(1)


def _entries_agree(probe: Probe, projection: Leaf, layout: LayoutGuess) -> bool:
    """Check the order within heads: exactly for v; rotary positions and norms also change other entries of q and k.

    The rows of all kinds are perturbed together, because each is known to change heads of its own kind alone.
    """
    for chosen in _codes(max(rows.shape[1] for rows in layout.rows.values())):
        index = {kind: [i for i in chosen if i < rows.shape[1]] for kind, rows in layout.rows.items()}
        moved = probe.moved(
            projection, torch.cat([rows[:, index[kind]].flatten() for kind, rows in layout.rows.items()])
        )
        for kind, own in index.items():
            changed = moved[kind].any(0)
            if not changed[own].all() or (kind == "v" and int(changed.sum()) != len(own)):
                return False
    return True


def _codes(count: int) -> Iterator[list[int]]:
    """Yield sets that distinguish `count` items: for each binary digit, those with a 1 and those with a 0."""
    for bit in range(max(1, (count - 1).bit_length())):
        for value in (1, 0):
            chosen = [i for i in range(count) if (i >> bit) & 1 == value]
            if chosen:
                yield chosen


def _output(projections: Projections, probe: Probe, after: list[Leaf], site: Site, parent: nn.Module | None) -> None:
    heads, size = probe.base["q"].shape[1], probe.base["v"].shape[-1]
    for candidate in after:
        if candidate.columns != heads * size or not probe.columns(candidate, None, None).any():
            continue
        columns = torch.arange(heads * size)
        # The channels of a head adjacent, or the heads of a channel.
        for index in (columns.view(heads, size), columns.view(size, heads).t()):
            if _columns_agree(probe, candidate, index):
                projections.o = named.block("o", candidate, as_rows(index), heads, size, site)
                return
        projections.missing["o"] = f"has {candidate.name}, whose inputs follow no known order of heads"
        return
    beside = named.by_name(site, parent).get("o")
    named.add_output(
        projections, beside if beside is not None and id(beside) not in map(id, after) else None, heads, size, site
    )


def _columns_agree(probe: Probe, projection: Leaf, index: Tensor) -> bool:
    heads, size = index.shape
    for chosen in _codes(heads):
        if sorted(index[chosen].reshape(-1).tolist()) != _indices(
            probe.columns(projection, torch.tensor(chosen), None)
        ):
            return False
    for chosen in _codes(size):
        if sorted(index[:, chosen].reshape(-1).tolist()) != _indices(
            probe.columns(projection, None, torch.tensor(chosen))
        ):
            return False
    return True


def _indices(columns: Tensor) -> list[int]:
    return columns.nonzero().flatten().tolist()
