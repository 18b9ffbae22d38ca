"""Find separate projections by the names that their hosts give them, without running anything."""

from __future__ import annotations

from torch import nn

from headwise.attend.core import Site
from headwise.attend.projections.adapted import is_adapted
from headwise.attend.projections.block import Block, ProjectionError, Rows
from headwise.attend.projections.leaves import Leaf, leaf
from headwise.attend.projections.names import BESIDE_OUTPUT, BIASES_APART, HEAD_DIM, HEADS, PROJECTIONS, first_number
from headwise.attend.projections.site_projections import Projections
from headwise.borders import packs_projections


def _declared(site: Site, names: tuple[str, ...]) -> int | None:
    """Return a whole number that the attention module or its config declares, or None."""
    return first_number(site.module, names) or first_number(getattr(site.module, "config", None), names)


def by_name(site: Site, parent: nn.Module | None) -> dict[str, Leaf]:
    """Return the leaves whose names identify them as q, k, v or o; a kind with several leaves is omitted."""
    by_kind: dict[str, list[Leaf]] = {}
    for candidate in Leaf.below(site.module, site.name):
        words = [w for w in candidate.name[len(site.name) :].strip(".").split(".") if not w.isdigit()]
        for kind, names in PROJECTIONS.items():
            if len(words) == 1 and words[0].lower() in names:
                by_kind.setdefault(kind, []).append(candidate)
    single = {kind: several[0] for kind, several in by_kind.items() if len(several) == 1}
    if "o" not in by_kind:
        beside = sibling_output(site, parent)
        if beside is not None:
            single["o"] = beside
    return single


def sibling_output(site: Site, parent: nn.Module | None) -> Leaf | None:
    """Return the sibling `output.dense` of an attention module: the output projection in BERT and related models."""
    dense = getattr(getattr(parent, "output", None), "dense", None)
    if dense is None or site.name.rpartition(".")[2] not in BESIDE_OUTPUT:
        return None
    return leaf(f"{site.name.rpartition('.')[0]}.output.dense".lstrip("."), dense)


def block(kind: str, projection: Leaf, rows: Rows, heads: int, head_dim: int, site: Site) -> Block:
    """Return the block of a leaf, with its bias or the bias that the attention module itself adds."""
    result = Block(
        kind, projection.module, f"{projection.name}.weight", "weight", rows, heads, head_dim, projection.transposed
    )
    result.convolved, result.grouped = projection.obstacle, projection.grouped
    result.beyond = further(projection.module)
    outside = getattr(site.module, BIASES_APART.get(kind, ""), None) if kind != "o" else None
    if projection.bias is not None:
        result.bias_module, result.bias_name = projection.module, "bias"
        result.bias_rows = None if kind == "o" else rows
    elif isinstance(outside, nn.Parameter) and outside.shape == (heads * head_dim,):
        result.bias_module, result.bias_name = site.module, BIASES_APART[kind]
    return result


def further(module: nn.Module) -> str:
    """Return a message if a layer has parameters besides its weight and bias, or an empty string."""
    if is_adapted(module):
        return ""
    known = ("weight", "bias", "parametrizations.", "headwise.")
    more = [name for name, _ in module.named_parameters() if name not in known[:2] and not name.startswith(known[2:])]
    if not more:
        return ""
    return (
        f"({type(module).__name__}) holds {', '.join(more)} in addition to its weight and computes with both: "
        "merge them into "
        "the weight first"
    )


def separate(site: Site, by_kind: dict[str, Leaf]) -> Projections | str:
    """Return the projections of separate leaves, or why their shapes do not fit together."""
    heads = site.heads or _declared(site, HEADS)
    if heads is None:
        return "does not declare how many heads it has; pass example="
    q, k, v = by_kind["q"], by_kind["k"], by_kind["v"]
    for projection in (q, k, v):
        if getattr(projection.module, "transposed", False):
            return f"has {projection.name}, {projection.obstacle}"
    size = site.head_dim or _declared(site, HEAD_DIM) or q.rows // heads
    if q.rows != heads * size:
        return f"has {q.name} with {q.rows} outputs, which are not {heads} heads of {size}"
    if k.rows % size:
        return f"has {k.name} with {k.rows} outputs, which are not a multiple of the head size {size}"
    groups = k.rows // size
    if v.rows % groups or heads % groups:
        return f"has {v.name} with {v.rows} outputs, which do not divide into {groups} heads"
    projections = Projections(site.name, "separate")
    projections.q = block("q", q, slice(0, q.rows), heads, size, site)
    projections.k = block("k", k, slice(0, k.rows), groups, size, site)
    projections.v = block("v", v, slice(0, v.rows), groups, v.rows // groups, site)
    add_output(projections, by_kind.get("o"), heads, v.rows // groups, site)
    return projections


def add_output(projections: Projections, projection: Leaf | None, heads: int, value_dim: int, site: Site) -> None:
    """Set the output projection, or why it is missing."""
    if projection is None:
        projections.missing["o"] = "has no output projection; no submodule or sibling has a name of one"
    elif getattr(projection.module, "transposed", False):
        projections.missing["o"] = f"has {projection.name}, {projection.obstacle}"
    elif projection.columns != heads * value_dim:
        projections.missing["o"] = (
            f"has {projection.name} with {projection.columns} inputs, which are not {heads} heads of {value_dim}"
        )
    else:
        projections.o = block("o", projection, slice(0, projection.columns), heads, value_dim, site)


def multihead(site: Site) -> Projections:
    """Return the projections of torch.nn.MultiheadAttention, whose layout is fixed by its definition."""
    module = site.module
    assert isinstance(module, nn.MultiheadAttention)
    size, heads = module.embed_dim, module.num_heads
    packed = packs_projections(module)
    projections = Projections(site.name, "in_proj_weight" if packed else "separate", verified=True)
    for index, kind in enumerate("qkv"):
        rows = slice(index * size, (index + 1) * size)
        name = "in_proj_weight" if packed else f"{kind}_proj_weight"
        part = Block(
            kind, module, f"{site.name}.{name}", name, rows if packed else slice(0, size), heads, size // heads
        )
        if module.in_proj_bias is not None:
            part.bias_module, part.bias_name, part.bias_rows = module, "in_proj_bias", rows
        if kind != "q" and getattr(module, f"bias_{kind}", None) is not None:
            part.along = ((module, f"bias_{kind}"),)
        setattr(projections, kind, part)
    add_output(projections, leaf(f"{site.name}.out_proj", module.out_proj), heads, size // heads, site)
    return projections


# diffusers' names for the projections of text tokens, their output projection, and the flag for fused projections.
ADDED = {"q": "add_q_proj", "k": "add_k_proj", "v": "add_v_proj"}
OUTPUT, FUSED = "to_add_out", "fused_projections"


def refuse_fused(site: Site) -> None:
    """Raise ProjectionError if a layer of diffusers computes with a copy of its weights."""
    module = site.module
    if getattr(module, FUSED, False) is not True:
        return
    # When a model is unfused, older layers keep the mark and only get their processor back.
    if hasattr(module, "unfuse_projections") or "Fused" in type(getattr(module, "processor", None)).__name__:
        raise ProjectionError(
            f"{site.name} computes queries, keys and values with a fused copy of their weights: call "
            "unfuse_qkv_projections() on the model"
        )


def with_context(site: Site, projections: Projections) -> Projections:
    """Return the projections of a site with those of its text tokens, if it has any.

    Raises:
        ProjectionError: if the layer adds keys of other tokens in a second attention.
    """
    module = site.module
    modules = {kind: getattr(module, name, None) for kind, name in ADDED.items()}
    if not any(isinstance(part, nn.Module) for part in modules.values()):
        return projections
    converted = {
        kind: leaf(f"{site.name}.{ADDED[kind]}", part) for kind, part in modules.items() if isinstance(part, nn.Module)
    }
    parts = {kind: projection for kind, projection in converted.items() if projection is not None}
    if len(parts) < 3:
        raise ProjectionError(
            f"{site.name} also attends to other tokens, whose keys and values it makes by "
            f"{', '.join(part.name for part in parts.values())}, so that its logits depend on more than its own query "
            "and key weights"
        )
    context = separate(site, parts)
    if isinstance(context, str):
        raise ProjectionError(f"{site.name} {context}")
    out = getattr(module, OUTPUT, None)
    if isinstance(out, nn.Module):
        add_output(
            context, leaf(f"{site.name}.{OUTPUT}", out), context.heads, context.need("v", of="rows")[0].head_dim, site
        )
    else:
        context.thrown_away = True
    projections.context = context
    return projections
