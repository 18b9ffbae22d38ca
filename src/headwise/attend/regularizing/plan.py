"""The plan of which methods go on which sites, made before anything is changed; then attach all or none, and detach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from headwise.attend import hosts, projections
from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Method, SharedState, Site
from headwise.attend.hosts.layers.declared import Candidate
from headwise.attend.hosts.layers.refusal import refusal
from headwise.attend.hosts.sdpa.samples import run_and_learn
from headwise.attend.projections.capture import feed, untouched
from headwise.attend.regularizing.handle_place import HANDLE
from headwise.files.errors import suggest


def run(model: nn.Module, example: Any) -> Any:
    """Return the output of one run in eval mode without gradients; modes, buffers and random state are restored."""
    with untouched(model):
        return feed(model, example)


def learn_from_example(model: nn.Module, found: list[Candidate], example: Any) -> None:
    """Run the model on `example` and set on each site the shapes and properties that its call showed.

    Raises:
        ValueError: if the model does not run on the example.
    """
    probes = []
    with ExitStack() as stack:
        for candidate in found:
            if candidate.adapter is not None:
                probe = FittedLayer(candidate.site, [], SharedState(bare=True), candidate.adapter)
                probe.attach()
                stack.callback(probe.detach)
                probes.append((candidate.site, probe, (candidate.site.heads, candidate.site.windowed)))
                candidate.site.heads, candidate.site.windowed = None, False
        try:
            run_and_learn(found, example, partial(run, model))
        except Exception as error:
            for site, _, (heads, windowed) in probes:
                site.heads, site.windowed = heads, windowed
            raise ValueError(f"the model did not run on example ({type(error).__name__}: {error})") from error
    for site, probe, (heads, windowed) in probes:
        site.heads, site.windowed = heads, windowed
        for name, value in probe.seen.items():
            setattr(site, name, value)


Where = Callable[[Site], bool] | Iterable[str] | None


@dataclass
class Plan:
    """The chosen sites with their methods, the sites that are only read, and why the others are left out."""

    methods: list[Method]
    found: list[Candidate]
    chosen: list[tuple[Site, list[Method]]] = field(default_factory=list)
    read: list[Site] = field(default_factory=list)
    reasons: dict[Site, tuple[str, str]] = field(default_factory=dict)


def plan(
    model: nn.Module,
    methods: list[Method],
    where: Where,
    allow_none: bool,
    example: Any = None,
    attention: str | None = None,
) -> Plan:
    """Return which methods go on which sites; raise ValueError with all problems at once."""
    if attention not in (None, "headwise"):
        raise ValueError(
            'attention must be None, which keeps the kernel that the model was loaded with, or "headwise", got '
            f"{attention!r}; to choose a kernel, load the model with attn_implementation="
        )
    _check_arguments(model, methods, allow_none)
    # A deep copy of a watched model carries unused fitted layers: remove them.
    for bare in FittedLayer.bare_in(model).values():
        bare.detach()
    draft = Plan(methods, hosts.find(model))
    for candidate in draft.found:
        candidate.site.example, candidate.site.own_attention = example, attention == "headwise"
    if any(method.learns and "kv_heads" in method.shapes for method in methods):
        _count_key_heads(draft.found)
    if example is not None:
        learn_from_example(model, draft.found, example)
    reachable = [f for f in draft.found if f.adapter is not None]
    if not reachable:
        raise ValueError(no_site(model, draft.found))
    wanted, named = selection(where, draft.found)
    # Collected, so that a user can correct all of them at once.
    problems = []
    for candidate in draft.found:
        site = candidate.site
        if candidate.adapter is None:
            draft.reasons[site] = ("unreachable", candidate.reason)
            if site.name in named:
                problems.append(f"{site.name} ({type(site.module).__name__}) cannot be reached: {candidate.reason}")
        elif not wanted(site):
            draft.reasons[site] = ("skipped", "by where")
        else:
            problems += _assign(draft, site, site.name in named)
    if not draft.chosen and not problems:
        problems.append(_nothing_left(draft, methods))
    if draft.chosen:
        problems += _without_effect(draft, [f.site for f in reachable if wanted(f.site)])
    if problems:
        raise ValueError("\n".join(problems))
    _add_readers(draft, reachable)
    return draft


def _without_effect(draft: Plan, wanted: list[Site]) -> list[str]:
    """Return a message for each method that acts nowhere: a mistake, which a training would not show."""
    problems = []
    for method in draft.methods:
        if not any(m is method for _, ms in draft.chosen for m in ms):
            refused = {reason for site in wanted if (reason := refusal(method, site)) is not None}
            problems.append(f"{method!r} applies to none of the chosen sites: {'; '.join(sorted(refused))}")
        # On the first layer, whose own values are carried, such a method is the identity.
        elif method.carries and not _above_first(draft, method):
            reasons = [reason for _, reason in draft.reasons.values() if type(method).__name__ in reason]
            above = f"applies to no layer above it: {reasons[0]}" if reasons else "no layer above it was chosen"
            problems.append(f"{method!r} changes nothing on the first self attention of a stack, and {above}")
    return problems


def _check_arguments(model: Any, methods: list[Method], allow_none: bool) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"regularize() takes a torch module first, got {type(model).__name__}")
    for method in methods:
        _check_method(method, methods)
    refusing = next((m for m in methods if m.negative == "refuses"), None)
    making = next((m for m in methods if m.negative == "makes"), None)
    if refusing is not None and making is not None:
        raise ValueError(
            f"{refusing!r} has no logarithm for the negative weights that {making!r} makes: use one of them"
        )
    if not methods and not allow_none:
        raise ValueError("regularize() needs at least one method, such as headwise.DropHead(p=0.2)")
    _check_free(model)


def _check_method(method: Any, methods: list[Method]) -> None:
    """Raise TypeError for what is no method, and ValueError for one that its place among the others makes useless."""
    if isinstance(method, list | tuple):
        raise TypeError(
            "regularize() takes methods one by one: put a star before the list, regularize(model, *methods)"
        )
    if not isinstance(method, Method):
        remedy = "a method"
        if isinstance(method, type) and issubclass(method, Method):
            remedy = f"{method.__name__}() with parentheses"
        elif isinstance(method, str):
            remedy = f"*headwise.parse({method!r})"
        raise TypeError(f"regularize() takes methods, got {method!r}; pass {remedy}")
    # Two settings of one class may be meant; the same setting twice is a slip.
    if sum(m == method for m in methods) > 1:
        raise ValueError(f"{method!r} is given twice")
    if (earlier := _lost_before(method, methods)) is not None:
        raise ValueError(
            f"{method!r} computes its own logits, so that the changes of {earlier!r} before it would be lost: put "
            f"{earlier!r} after it"
        )


def _check_free(model: nn.Module) -> None:
    """Raise ValueError if the model, or a part of it, is regularized or watched already."""
    # A deep copy that failed half-way leaves sites without a module until it is garbage-collected.
    whole_models = {
        vars(f.site).get("module"): vars(f.site).get("model") for f in FittedLayer.live() if not f.shared.bare
    }
    for name, module in model.named_modules():
        if (whole := whole_models.get(module)) is not None and whole not in model.modules():
            raise ValueError(
                f"{name or 'this module'} is part of a model that is regularized already with "
                f"{whole.__dict__.get(HANDLE)!r}; call remove() on its handle first, or choose layers with where= on "
                "the whole model"
            )
        if HANDLE in module.__dict__:
            raise ValueError(
                f"{name or 'the model'} is regularized already with {module.__dict__[HANDLE]!r}; call remove() on its "
                "handle (headwise.handle(model)) first, or give all methods in one call"
            )
    watched = next((b.site for b in FittedLayer.bare_in(model).values() if b.observer is not None), None)
    if watched is not None:
        name = "the model" if watched.model is model else watched.name
        raise ValueError(f"{name} is watched by headwise.watch: regularize first, then watch (watch.remove() now)")


def _lost_before(method: Method, methods: list[Method]) -> Method | None:
    """Return an earlier method whose edit of the logits this one replaces, or None; dropped keys stay dropped."""
    if not method.replaces_logits:
        return None
    before = methods[: next(index for index, earlier in enumerate(methods) if earlier is method)]
    return next((earlier for earlier in before if earlier.overrides("logits") and not earlier.overrides("keep")), None)


def selection(where: Where, found: list[Candidate]) -> tuple[Callable[[Site], bool], set[str]]:
    """Return a predicate for the sites that `where` chooses, and the names that it lists.

    Raises:
        TypeError: if `where` is neither a function nor names.
        ValueError: if no layer has such a name; the message shows the nearest one.
    """
    if where is None:
        return (lambda site: True), set()
    if callable(where):
        return (lambda site: bool(where(site))), set()
    if not isinstance(where, Iterable):
        raise TypeError(f"where must be a function of a site or names of layers, got {where!r}")
    names = {where} if isinstance(where, str) else set(where)
    known = [f.site.name for f in found]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"where takes names of layers, got {name!r}: write {known[0]!r}, or choose by depth, where=lambda "
                "site: site.depth == 0"
            )
    for name in sorted(names):
        if name not in known:
            raise ValueError(f"There is no attention layer {name!r}.{suggest(name, known)} Layers: {', '.join(known)}.")
    return (lambda site: site.name in names), names


def _count_key_heads(found: list[Candidate]) -> None:
    """Set the number of key heads of sites that do not declare it, from their weights.

    Before an example is run, whose calls may hold keys that the layer has repeated already.
    """
    for candidate in found:
        if candidate.adapter is not None and candidate.site.kv_heads is None:
            # A layout that cannot be read leaves it to the example.
            with suppress(projections.ProjectionError, RuntimeError, ValueError, TypeError, NotImplementedError):
                projections.of(candidate.site)


def _assign(draft: Plan, site: Site, named: bool) -> list[str]:
    fitting, refused = [], []
    for method in draft.methods:
        reason = refusal(method, site) or (_why_not_carried(draft, site) if method.carries else None)
        if reason is None:
            fitting.append(method)
        else:
            name = type(method).__name__
            # some reasons begin with the method's name already
            refused.append(reason if reason.startswith(f"{name} ") else f"{name} {reason}")
    if fitting or not draft.methods:
        draft.chosen.append((site, fitting))
        if refused:
            draft.reasons[site] = ("regularized", "not applicable: " + "; ".join(refused))
    else:
        draft.reasons[site] = ("not applicable", "; ".join(refused))
    return [f"{site.name}: {text}" for text in refused] if named else []


def _why_not_carried(draft: Plan, site: Site) -> str | None:
    """Return why the values of the stack's first self attention cannot be carried to a site, or None if they can."""
    stack = [f for f in draft.found if f.site.stack == site.stack and not f.site.is_cross]
    first = stack[0]
    if len(stack) == 1:
        return "carries values from an earlier layer, and this is the only self attention of its stack"
    if first.adapter is None:
        return f"carries the values of {first.site.name}, which cannot be reached: {first.reason}"
    if first.site.windowed or first.site.pooled:
        kind = "attends in windows" if first.site.windowed else "pools its tokens"
        return f"carries the values of {first.site.name}, and that layer {kind}"
    for name, unit in (("heads", "heads"), ("head_dim", "channels a head"), ("value_dim", "channels of values")):
        here, there = getattr(site, name), getattr(first.site, name)
        if None not in (here, there) and here != there:
            return f"carries the values of {first.site.name}, which has {there} {unit} where this layer has {here}"
    return None


def _above_first(draft: Plan, method: Method) -> bool:
    firsts = {s.stack: s for s in reversed([f.site for f in draft.found if not f.site.is_cross])}
    return any(firsts[s.stack] is not s for s, methods in draft.chosen if any(m is method for m in methods))


def _add_readers(draft: Plan, reachable: list[Candidate]) -> None:
    """Mark the first self attention of each stack as read if chosen sites carry its values."""
    stacks = {s.stack for s, ms in draft.chosen if any(m.carries for m in ms)}
    chosen = [s for s, _ in draft.chosen]
    for stack in sorted(stacks):
        first = next(f.site for f in reachable if f.site.stack == stack and not f.site.is_cross)
        # Fitted even if no method acts on it: its values are kept for the layers above.
        draft.read.append(first)
        if first not in chosen:
            draft.chosen.insert(0, (first, []))
            draft.reasons.pop(first, None)


def no_site(model: nn.Module, found: list[Candidate]) -> str:
    """Return a message that says why none of a model's layers can be reached."""
    if not found:
        return (
            f"{type(model).__name__} has no attention layer that headwise can see: no nn.MultiheadAttention, no module "
            "on transformers' attention interface and none that calls torch.nn.functional.scaled_dot_product_attention "
            "(called by that name, not imported from it). Compute its attention by one of these"
        )
    lines = by_text(
        [(f.site.name, f"({type(f.site.module).__name__}) cannot be reached: {f.reason}") for f in found], " "
    )
    return f"none of the attention layers of {type(model).__name__} can be reached:\n" + "\n".join(lines)


def watchable(model: nn.Module, found: list[Candidate], where: Where) -> list[Candidate]:
    """Return the layers of a model that `where` chooses for a watch.

    Raises:
        ValueError: if no layer can be reached, if `where` names one that cannot, or if it chooses none.
    """
    if all(candidate.adapter is None for candidate in found):
        raise ValueError(no_site(model, found))
    wanted, named = selection(where, found)
    unreached = [c for c in found if c.adapter is None and c.site.name in named]
    if unreached:
        raise ValueError("\n".join(f"{c.site.name} cannot be reached: {c.reason}" for c in unreached))
    chosen = [candidate for candidate in found if candidate.adapter is not None and wanted(candidate.site)]
    if not chosen:
        raise ValueError("where= selects no attention layer to watch: choose other layers or leave it out")
    return chosen


def _nothing_left(draft: Plan, methods: list[Method]) -> str:
    lines = by_text([(site.name, f"{status}: {reason}") for site, (status, reason) in draft.reasons.items()])
    return f"no attention layer is left for {' + '.join(map(repr, methods))}:\n" + "\n".join(lines)


def by_text(messages: Iterable[tuple[str, str]], between: str = ": ") -> list[str]:
    """Return a line for each (layer, text) pair, but one line for a text that more than three layers share."""
    layers: dict[str, list[str]] = {}
    for name, text in messages:
        layers.setdefault(text, []).append(name or "the model")
    lines = []
    for text, names in layers.items():
        many = len(names) > 3
        listed = [f"{names[0]} to {names[-1]} ({len(names)} layers)"] if many else names
        lines += [f"{label}{between}{text}" for label in listed]
    return lines


def fold_methods(fitted: list[FittedLayer]) -> list[FittedLayer]:
    """Fold or drop the methods that evaluation does not need, and return the sites that keep a method."""
    remaining = []
    for layer in fitted:
        for method in [m for m in layer.methods if m.overrides("fold") or not m.acts_in(training=False)]:
            layer.drop(method, fold=True)
        if layer.methods or layer.shares_values:
            remaining.append(layer)
    # A layer shares its values only for methods that carry them: without methods nothing is shared.
    return remaining if any(layer.methods for layer in remaining) else []


def attach(plan: Plan, shared: SharedState) -> list[FittedLayer]:
    """Fit the methods of a plan and return the fitted layers; if one step fails, all are undone."""
    adapters = {f.site: f.adapter for f in plan.found}
    counts = Counter(id(method) for _, methods in plan.chosen for method in methods)
    layers: list[FittedLayer] = []
    built: set[int] = set()
    undo: list[Callable[[], None]] = []
    try:
        for site, methods in plan.chosen:
            fitted = FittedLayer(site, methods, shared, adapters[site])
            layers.append(fitted)
            fitted.shares_values = site in plan.read
            _build(fitted, counts, built, undo)
            built |= set(map(id, methods))
            # Registered before the step, so that a step that fails half-way is undone too.
            undo.append(fitted.detach)
            fitted.attach()
    except BaseException:
        # No site may count as fitted while adapters leave: the last one to leave restores the state that all share.
        for fitted in layers:
            fitted.alive = False
        for step in reversed(undo):
            step()
        raise
    return layers


def _build(fitted: FittedLayer, counts: Counter[int], built: set[int], undo: list[Callable[[], None]]) -> None:
    for method, state in zip(fitted.methods, fitted.states, strict=True):
        undo.append(state.clear)
        state.first = id(method) not in built
        if method.over_layers == "mean":
            state.layers = counts[id(method)]
        if method.overrides("build"):
            method.build(fitted.site, state)
        if method.overrides("unbuild"):
            undo.append(partial(method.unbuild, fitted.site, state))


def detach(which: Iterable[FittedLayer], fold: bool) -> None:
    """Remove the methods of these sites and detach the sites; with `fold`, into plain weights where possible."""
    for fitted in list(which):
        for method in list(fitted.methods):
            fitted.drop(method, fold=fold)
        fitted.detach()
