"""What happened to a regularized model that its methods cannot follow: adapters, shards, layers no longer reached."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from headwise import projections
from headwise.attention.fitted_layer import FittedLayer
from headwise.core.passes import UNDIFFERENTIATED
from headwise.hosts.layers.hooks import Hooks
from headwise.projections import ProjectionError
from headwise.projections.adapted import base_of, is_adapted
from headwise.projections.block import Block
from headwise.regularizing.learned_parameters import is_own


def check_reached(model: nn.Module, fitted: list[FittedLayer], first: bool) -> None:
    """Raise RuntimeError where methods did nothing because a training step did not come to their layers.

    Args:
        model: the regularized model.
        fitted: its sites; which of them were reached is known since the last optimizer step.
        first: whether this is the first step. In later ones a layer may rest, as long as it is still in the model.
    """
    missing = [f for f in fitted if not f.reached and f.methods]
    if missing and first:
        _check_first(missing)
    elif missing:
        _check_replaced(model, missing)


COMPILED = ". A graph that torch.compile made before regularize() knows nothing of it: torch.compiler.reset() drops it"


def _check_first(missing: list[FittedLayer]) -> None:
    never = [f.site.name for f in missing if not f.without_gradients]
    if never:
        raise RuntimeError(
            f"never reached in the first training step: {', '.join(never)}. The methods there did nothing. Call the "
            "model in training mode before loss() and after_step(), or leave these sites out with where=" + COMPILED
        )
    # Methods without draws, penalties and carried values do the same however often a layer runs.
    repeated = [f for f in missing if f.passes.repeats_matter]
    if repeated:
        names, methods = (
            ", ".join(f.site.name for f in repeated),
            dict.fromkeys(f.passes.repeated_methods() for f in repeated),
        )
        raise RuntimeError(UNDIFFERENTIATED.format(sites=names, methods=" + ".join(methods)))


def _check_replaced(model: nn.Module, missing: list[FittedLayer]) -> None:
    modules = set(model.modules())
    gone = [f.site.name for f in missing if f.site.module not in modules]
    if gone:
        raise RuntimeError(
            f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} no longer in the model, so that the methods there "
            "do nothing: what stands in the place now was put there after regularize(). Put the layers back, or call "
            "remove() and regularize() the model as it is now"
        )


REMEDY = (
    "adapters, frozen layers and shards belong before regularize(): call it last, on the model as it will be trained "
    "(remove() takes off what is fitted)"
)


def check_followed(fitted: Iterable[FittedLayer]) -> None:
    """Ask the methods again that read or write weights between forwards, before any of them acts.

    Raises:
        RuntimeError: naming the layer, the method and what changed.
    """
    for one in fitted:
        for method in one.methods:
            if method.overrides("penalty") or method.overrides("after_step"):
                reason = method.refuse(one.site)
                if reason is not None:
                    raise RuntimeError(f"{one.site.name}: {method!r} can no longer act: {reason}; {REMEDY}")
        _check_branch(one)
        _check_learned(one)


def _check_branch(one: FittedLayer) -> None:
    """Raise where adapters stand around an output projection whose own output was hooked."""
    if not one.needs("branch"):
        return
    block: Block | None
    try:
        block = projections.output(one.site, "what acts on the branch")
    except ProjectionError:
        block = projections.of(one.site).o
    if block is None or not block.adapted:
        return
    # The adapter stands around the layer, so that hooks on the layer inside it miss what the adapter adds.
    owners = [getattr(hook, "__self__", None) for hook in base_of(block.module)._forward_hooks.values()]
    if any(isinstance(owner, Hooks) and owner.fitted is one for owner in owners):
        names = [repr(m) for m in one.methods if m.overrides("branch")]
        raise RuntimeError(
            f"{one.site.name}: {' + '.join(names)} sees what {block.where.rpartition('.')[0]} gives without the "
            f"adapters that were put around it since; {REMEDY}"
        )


def _check_learned(one: FittedLayer) -> None:
    """Raise where what methods learn was frozen along with a backbone, as peft freezes all that is not its own."""
    learners = [repr(m) for m in one.methods if m.learns]
    if not learners:
        return
    own = [p for name, p in one.site.module.named_parameters() if is_own(name)]
    model = one.site.model
    # Without adapters in the model, its user froze them.
    if own and model is not None and not any(p.requires_grad for p in own) and any(map(is_adapted, model.modules())):
        raise RuntimeError(
            f"{one.site.name}: what {' + '.join(learners)} learns is frozen (requires_grad=False), as get_peft_model() "
            f"freezes all but its adapters; {REMEDY}"
        )
