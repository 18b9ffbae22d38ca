"""The plugin for axolotl, `headwise.axolotl.HeadwisePlugin`."""

from __future__ import annotations

from typing import Any, Literal

import torch

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, ConfigDict, field_validator, model_validator
except ModuleNotFoundError as missing:
    raise ImportError(
        f"headwise.axolotl needs {missing.name}, which is not installed: it is a plugin of axolotl, pip install axolotl"
    ) from missing

from headwise.attend import Method, parse, sites
from headwise.attend.projections import is_adapted
from headwise.files.user_warnings import warn
from headwise.lab import HeadwiseCallback

__all__ = ["HeadwiseArgs", "HeadwisePlugin", "HeadwiseSection"]


class HeadwiseSection(BaseModel):
    """The section `headwise:` of the YAML.

    Attributes:
        methods: in order of action, such as `DropHead(p=0.1) + EntropyPenalty(strength=0.01)`; without it, the model is
            only watched.
        watch: settings of `headwise.watch`, such as `every: 50`; without it, the model is not watched.
        where: names of the layers to regularize; by default all layers to which a method applies.
        seed: of the methods' random draws.
        draws: what these follow, `counter` or `torch`, as for `headwise.regularize`.
        attention: with `headwise`, headwise computes the attention of layers that have their own kernel.
    """

    model_config = ConfigDict(extra="forbid")

    methods: str | None = None
    watch: dict[str, Any] | None = None
    where: list[str] | None = None
    seed: int = 0
    draws: Literal["counter", "torch"] = "counter"
    attention: str | None = None

    @field_validator("methods")
    @classmethod
    def check_methods(cls, value: str | None) -> str | None:
        """Raise ValueError if a method or a setting is unknown."""
        if value is not None:
            parse(value)
        return value

    @model_validator(mode="after")
    def check_something(self) -> HeadwiseSection:
        """Raise ValueError if neither methods nor watch is given."""
        if self.methods is None and self.watch is None:
            raise ValueError("give methods: 'DropHead(p=0.1)', watch: {every: 50}, or both")
        return self


class HeadwiseArgs(BaseModel):
    """The part of axolotl's configuration that the plugin reads.

    Attributes:
        headwise: the section of this name.
    """

    headwise: HeadwiseSection


class HeadwisePlugin(BasePlugin):  # type: ignore[misc]
    """A plugin that regularizes and watches the model of axolotl: `plugins: [headwise.axolotl.HeadwisePlugin]`.

    It adds a `HeadwiseCallback` with the settings of the YAML's section `headwise:` to axolotl's trainer. A full
    fine-tuning ends with a folder that `headwise.load_pretrained` reads. With adapters, only methods without learned
    parameters are accepted, because axolotl would not save these.

    Attributes:
        callback: the `HeadwiseCallback` of the latest trainer, with its handle and its watch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.callback: HeadwiseCallback | None = None

    def get_input_args(self) -> str:
        """Return the name of the class that checks the section."""
        return f"{__name__}.{HeadwiseArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Check a model, also a reference model, before the data are read.

        Raises:
            ValueError: if no attention layer can be reached, or a method learns parameters and the model has adapters.
        """
        if not sites(model):
            raise ValueError(
                f"headwise reaches no attention layer of this {type(model).__name__}: remove the plugin from plugins:, "
                "or set attn_implementation to one that transformers dispatches (sdpa, eager, flash_attention_2)"
            )
        learning = [method for method in _methods(cfg) if method.has_parameters()]
        if learning and any(map(is_adapted, model.modules())):
            raise ValueError(
                f"{' + '.join(map(repr, learning))} learn parameters, and axolotl saves only the adapters: train "
                "without adapter:, or use methods that learn nothing"
            )

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callback that regularizes the model once its trainer is made."""
        section = _section(cfg)
        self.callback = HeadwiseCallback(
            *_methods(cfg),
            watch=section.watch,
            where=section.where,
            seed=section.seed,
            attention=section.attention,
            draws=section.draws,
        )
        return [self.callback]

    def post_train(self, cfg: Any, model: Any) -> None:
        """Write a full model's folder for plain loaders and `headwise.load_pretrained`, on the first process.

        axolotl calls this both before and after it saves the model, and the last call counts. An error is only a
        warning, because axolotl may still have to write its own files.
        """
        handle = None if self.callback is None else self.callback.regularized
        if handle is None or handle.removed or not cfg.get("output_dir"):
            return
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        if any(map(is_adapted, handle.model.modules())):
            return
        try:
            handle.save_pretrained(cfg["output_dir"])
        except ValueError as error:
            warn(f"headwise.load_pretrained will not read {cfg['output_dir']}: {error}")


def _section(cfg: Any) -> HeadwiseSection:
    section = cfg.get("headwise")
    if not section:
        raise ValueError(
            "plugins: names headwise.axolotl.HeadwisePlugin, but the YAML has no section headwise: add it with "
            "methods: or watch:"
        )
    # a plain dict, because axolotl's class returns None for missing keys and would reach transformers as a setting
    plain = section.to_dict() if hasattr(section, "to_dict") else section
    return HeadwiseSection.model_validate(plain)


def _methods(cfg: Any) -> list[Method]:
    text = _section(cfg).methods
    return [] if text is None else list(parse(text))
