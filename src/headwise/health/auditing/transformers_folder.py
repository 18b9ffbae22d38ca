"""The audit of a transformers folder: config.json and safetensors, read layer by layer into an empty structure."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend import Site, hosts, projections
from headwise.attend.projections import Block, Leaf, ProjectionError, Projections
from headwise.files.errors import CheckpointError
from headwise.files.foreign_models import model_of
from headwise.files.optional_imports import quiet_transformers
from headwise.files.tensor_files import TensorFiles, explained, of_adapter, read_object
from headwise.health.auditing.checkpoint import Batches, unfitting
from headwise.health.auditing.configs import check_depths, config_of, structure_of

DEPTH = re.compile(r"^(num_|n_)?(hidden_|encoder_|decoder_)?layers?$|^num_(en|de)coder_layers$|^depth$")
LAYERS, VOCABULARY = 2, 64


class Shallow:
    """A model of the same config with two layers per stack, a small vocabulary and random weights.

    Its layers show the layout of the checkpoint's layers of the same class, sizes and place.
    """

    def __init__(self, config: Any, cls: type[nn.Module]) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = cls(_small(config)).eval()
        self._seen: dict[Any, tuple[Site, Projections]] = {}
        self._hidden: dict[Any, str] = {}
        for candidate in hosts.find(self.model):
            if candidate.adapter is None:
                self._hidden[_key(candidate.site)] = type(candidate.site.module).__name__
            else:
                self._seen.setdefault(_key(candidate.site), (candidate.site, None))  # type: ignore[arg-type]

    def projections(self, site: Site, model: nn.Module) -> Projections:
        """Return the projections of a site, with the layout of the shallow model's layer of the same kind.

        Raises:
            ProjectionError: if that layout cannot be determined either; the message has the reason.
        """
        key = _key(site)
        if key in self._hidden:
            raise ProjectionError(
                f"{site.name} ({self._hidden[key]}) keeps queries, keys and values together and computes its attention "
                "itself, so that their rows cannot be separated. Load the model yourself, split them into q_proj, "
                "k_proj and v_proj, and pass it as module.py:factory"
            )
        if key not in self._seen:
            raise ProjectionError(f"{site.name} has no counterpart in a model of the same config with {LAYERS} layers")
        twin, layout = self._seen[key]
        if layout is None:
            layout = projections.find(twin, self.model)
            self._seen[key] = (twin, layout)
        return _moved(layout, twin, site, model)


def _key(site: Site) -> tuple[Any, ...]:
    shapes = tuple(
        (leaf.name[len(site.name) :], leaf.rows, leaf.columns) for leaf in Leaf.below(site.module, site.name)
    )
    return type(site.module), site.is_cross, re.sub(r"\d+", "#", site.name), shapes


def _moved(layout: Projections, twin: Site, site: Site, model: nn.Module) -> Projections:
    moved = Projections(site.name, layout.layout, missing=dict(layout.missing), verified=layout.verified)
    for block in layout.blocks:
        setattr(moved, block.kind, _moved_block(block, twin, site, model))
    return moved


def _moved_block(block: Block, twin: Site, site: Site, model: nn.Module) -> Block:
    name = _moved_name(block.where, twin.name, site.name)
    moved = copy.copy(block)
    moved.where, moved.module = name, model.get_submodule(name.rpartition(".")[0])
    if block.bias_module is not None:
        moved.bias_module = moved.module if block.bias_module is block.module else site.module
    return moved


def _moved_name(where: str, twin: str, site: str) -> str:
    """Return the name in the site's layer for a name in the twin's layer, below it or next to it."""
    if where.startswith(f"{twin}."):
        return site + where[len(twin) :]
    return site.rpartition(".")[0] + where[len(twin.rpartition(".")[0]) :]


def _small(config: Any) -> Any:
    small = copy.deepcopy(config)
    for part in [small, *(v for v in vars(small).values() if hasattr(v, "to_dict"))]:
        depths = {v for k, v in vars(part).items() if DEPTH.match(k) and isinstance(v, int)}
        for key, value in list(vars(part).items()):
            if DEPTH.match(key) and isinstance(value, int):
                setattr(part, key, min(value, LAYERS))
            elif isinstance(value, list) and len(value) in depths:
                setattr(part, key, value[:LAYERS])
            elif key == "vocab_size" and isinstance(value, int):
                setattr(part, key, min(value, VOCABULARY))
            elif key.endswith("token_id") and isinstance(value, int):
                setattr(part, key, min(value, VOCABULARY - 1))
    return small


class TransformersFolder:
    """A checkpoint in a transformers folder, read without running code from the folder."""

    kind = "transformers folder"

    def __init__(self, folder: Path) -> None:
        # For a symbolic link, the name of the link is more informative than that of its target.
        self.folder, self.name = folder, folder.name or folder.resolve().name
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                of_adapter(folder) or f"{folder} holds no config.json: it is not a transformers folder"
            )
        self.settings = read_object(folder / "config.json")
        self.config = config_of(folder, self.settings)
        self.files = TensorFiles.of_folder(folder)
        build = partial(structure_of, folder, settings=self.settings)
        check_depths(folder, self.config, self.files.shapes(), build)
        self.model = build(self.config)
        self._renamed, self._converts, self.unused = _renamed(self.model, self.files.names)
        _refuse_parametrized(folder, self.unused)
        _refuse_compressed(folder, self.unused)
        self.remarks = _remarks(folder, self.files)
        self._shallow: Shallow | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._whole: nn.Module | None = None

    def projections(self, site: Site) -> Projections:
        """Return a site's weights by name, or by a layout verified on a model of the same config with fewer layers.

        Raises:
            CheckpointError: if the config claims other sizes than the tensors have; this is checked before a model of
                those sizes is built.
        """
        self._check_sizes(site)
        try:
            return projections.find(site, self.model)
        except ProjectionError:
            self._shallow = self._shallow or Shallow(self.config, type(self.model))
            return self._shallow.projections(site, self.model)

    def _check_sizes(self, site: Site) -> None:
        self._shapes = self._shapes or self.files.shapes()
        for name, parameter in site.module.named_parameters(prefix=site.name):
            shape = self._shapes.get(self._renamed.get(name, ""))
            if shape is not None and shape != tuple(parameter.shape):
                raise CheckpointError(unfitting(name, shape, parameter))

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """Return parameters by their names in the model."""
        missing = [name for name in names if name not in self._renamed]
        if missing and not self._converts:
            raise CheckpointError(f"the checkpoint holds no {missing[0]}: weights and config do not belong together")
        if missing:
            # transformers makes these from several tensors, so its own loader loads the whole model.
            state = self.whole().state_dict()
            return {name: state[name] for name in names}
        read = self.files.read([self._renamed[name] for name in names])
        return {name: read[self._renamed[name]] for name in names}

    def whole(self) -> nn.Module:
        """Return the model, made by transformers from the tensors and the harmless config.

        Raises:
            CheckpointError: if weights are missing, which the loader would draw at random, or do not fit.
        """
        if self._whole is None:
            # Any: mypy does not know that this is a class of transformers with from_pretrained.
            cls: Any = type(self.model)
            tensors = self.files.read(self.files.names)
            with explained(f"transformers cannot load {self.folder}"), quiet_transformers():
                model, info = model_of(cls, self.config, tensors, dtype=torch.float32)
            if missing := sorted(info["missing_keys"]):
                raise CheckpointError(
                    f"the checkpoint holds no {missing[0]} ({len(missing)} weights are missing): weights and config "
                    "do not belong together"
                )
            self._whole = model
        return self._whole

    def batches(self) -> Batches:
        """Return the maker of batches for this model from texts and images."""
        return Batches(self.folder, self.config, first=_first_position(self.model))


def _remarks(folder: Path, files: TensorFiles) -> list[str]:
    """Return what a reader must know of the files: prefixes, adapters and numbers of 8 bits."""
    remarks = []
    if files.prefix:
        remarks.append(f"the names in the files begin with or hold {files.prefix}, which is left out here")
    if of_adapter(folder):
        remarks.append(
            f"{folder} also holds an adapter, which is not read: merge it into the model (merge_and_unload in peft) "
            "and save that to audit both"
        )
    if eight := files.of_eight_bits():
        layers = {name.rpartition(".")[0] for name in eight}
        scale = next((n for n in files.names if "scale" in n.rpartition(".")[2] and n.rpartition(".")[0] in layers), "")
        if scale:
            raise CheckpointError(
                f"{folder} holds {eight[0]} in 8 bits with the scale {scale}, so that its numbers are not the weights: "
                "audit the model it was made from"
            )
        more = f" and {len(eight) - 1} more" if len(eight) > 1 else ""
        remarks.append(f"8-bit numbers without scales are read as they are: {eight[0]}{more}")
    return remarks


def _refuse_parametrized(folder: Path, unused: list[str]) -> None:
    """Raise CheckpointError if weights were saved as the parts of a parametrization."""
    name = next((name for name in unused if ".parametrizations." in name), None)
    if name is None:
        return
    methods = sorted({method for other in unused for method in re.findall(r"\.headwise\.([A-Z]\w+)\.", other)})
    remedy = (
        "call handle.fold() on the regularized model before save_pretrained()"
        if methods
        else "call torch.nn.utils.parametrize.remove_parametrizations on its layers before save_pretrained()"
    )
    who = " and ".join(methods) if methods else "a parametrization of torch"
    layer, _, rest = name.partition(".parametrizations.")
    raise CheckpointError(
        f"{folder} was saved while {who} parametrized its weights: it holds {name} instead of "
        f"{layer}.{rest.split('.')[0]}. To audit it, {remedy}"
    )


def _refuse_compressed(folder: Path, unused: list[str]) -> None:
    """Raise CheckpointError for the smaller layers of `headwise.compress`, which no config describes."""
    names = set(unused)
    for name in unused:
        layer = name.removesuffix(".inner.weight")
        if layer != name and names & {f"{layer}.rows", f"{layer}.columns"}:
            raise CheckpointError(
                f"{folder} was saved after headwise.compress: it holds {name}, of a smaller layer than {layer}.weight. "
                "Audit the model as it was before; headwise.load_compressed loads this one"
            )


def _first_position(model: nn.Module) -> int:
    """Return the number of the first token's position: models like RoBERTa count from the padding's position on."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding) and "position" in name and part.padding_idx is not None:
            return part.padding_idx + 1
    return 0


def _renamed(model: nn.Module, names: list[str]) -> tuple[dict[str, str], bool, list[str]]:
    """Match the tensors of a checkpoint to a model's parameters.

    Returns:
        The tensor's name in the checkpoint for each parameter that is one such tensor; whether transformers converts
        others; and the names, as they would be in the model, of tensors that the model does not use.
    """
    parameters = model.state_dict()
    rename = _renamer(model, parameters)
    sources, converts, unused = {}, False, []
    for name in names:
        target, unchanged = rename(name)
        converts = converts or not unchanged
        if unchanged and target in parameters:
            sources[target] = name
        elif unchanged:
            unused.append(target)
    return sources, converts, unused


def _renamer(model: Any, parameters: dict[str, Any]) -> Callable[[str], tuple[str, bool]]:
    """Return a function from a tensor's name to its name in the model, and whether the tensor is used unchanged.

    transformers maps old names in internal tables; if these have moved, only the base model's prefix is tried.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return lambda name: (_with_prefix(model, name, parameters), True)
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def rename(name: str) -> tuple[str, bool]:
        target, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        return target, converted is None

    return rename


def _with_prefix(model: Any, name: str, parameters: dict[str, Any]) -> str:
    prefix = f"{model.base_model_prefix}."
    choices = (name, prefix + name, name.removeprefix(prefix))
    return next((choice for choice in choices if choice in parameters), name)
