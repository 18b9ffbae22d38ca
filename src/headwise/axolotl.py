"""axolotl: the plugin that its YAML names, `headwise.axolotl.HeadwisePlugin`."""

from __future__ import annotations

import warnings
from typing import Any

import torch

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, ConfigDict, field_validator, model_validator
except ModuleNotFoundError as missing:
    raise ImportError(
        f"headwise.axolotl needs {missing.name}, which is not installed: it is a plugin of axolotl, pip install axolotl"
    ) from missing

from headwise.core.method import Method
from headwise.hosts.finding import sites
from headwise.methods.text import parse
from headwise.projections.adapted import is_adapted
from headwise.training.trainer_callback import HeadwiseCallback

__all__ = ["HeadwiseArgs", "HeadwisePlugin", "HeadwiseSection"]


class HeadwiseSection(BaseModel):
    """What stands under `headwise:` in the YAML.

    Attributes:
        methods: in order of action, as `DropHead(p=0.1) + EntropyPenalty(strength=0.01)`; none: the model is only
            watched.
        watch: settings of `headwise.watch`, such as `every: 50`; none: the model is not watched.
        where: names of the layers that are regularized; none: every one on which a method has a meaning.
        seed: of the methods' draws.
        attention: `headwise` has headwise compute the attention of layers with a kernel of their own.
    """

    model_config = ConfigDict(extra="forbid")

    methods: str | None = None
    watch: dict[str, Any] | None = None
    where: list[str] | None = None
    seed: int = 0
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
        """Raise ValueError if nothing is asked for."""
        if self.methods is None and self.watch is None:
            raise ValueError("give methods: 'DropHead(p=0.1)', watch: {every: 50}, or both")
        return self


class HeadwiseArgs(BaseModel):
    """The part of axolotl's configuration that the plugin reads.

    Attributes:
        headwise: the section of that name.
    """

    headwise: HeadwiseSection


class HeadwisePlugin(BasePlugin):  # type: ignore[misc]
    """Regularizes and watches the model that axolotl trains: `plugins: [headwise.axolotl.HeadwisePlugin]`.

    What the section `headwise:` of the YAML says is what `HeadwiseCallback` does in axolotl's trainer. A full
    fine-tuning ends with a folder that `headwise.load_pretrained` reads; beside adapters only methods that learn
    nothing are taken, for what others learn would be in no file.

    Attributes:
        callback: the `HeadwiseCallback` of the latest trainer: its handle, and its watch with the records.
    """

    def __init__(self) -> None:
        super().__init__()
        self.callback: HeadwiseCallback | None = None

    def get_input_args(self) -> str:
        """Return the name of the class that checks the section."""
        return f"{__name__}.{HeadwiseArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Refuse a model that methods cannot reach, before the data are read; a reference model comes here too.

        Raises:
            ValueError: if no attention layer can be reached, or adapters stand beside methods that learn.
        """
        if not sites(model):
            raise ValueError(
                f"headwise reaches no attention layer of this {type(model).__name__}: take the plugin out of plugins:, "
                "or set attn_implementation to one that transformers dispatches (sdpa, eager, flash_attention_2)"
            )
        learning = [method for method in _methods(cfg) if method.learns]
        if learning and any(map(is_adapted, model.modules())):
            raise ValueError(
                f"{' + '.join(map(repr, learning))} learn, and axolotl saves the adapters alone: train without "
                "adapter:, or take methods that learn nothing"
            )

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callback that regularizes the model to be trained when its trainer is made."""
        section = _section(cfg)
        self.callback = HeadwiseCallback(
            *_methods(cfg),
            watch=section.watch,
            where=section.where,
            seed=section.seed,
            attention=section.attention,
        )
        return [self.callback]

    def post_train(self, cfg: Any, model: Any) -> None:
        """Write a full model's folder so that plain loaders and `headwise.load_pretrained` read it, on the first
        process.

        axolotl calls this before it saves the model and behind that: the last call counts. What cannot be written is
        told and stops nothing, for axolotl's own files are still to be written then.
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
            warnings.warn(f"headwise.load_pretrained will not read {cfg['output_dir']}: {error}", stacklevel=2)


def _section(cfg: Any) -> HeadwiseSection:
    given = cfg.get("headwise")
    if not given:
        raise ValueError(
            "plugins: names headwise.axolotl.HeadwisePlugin, and there is no headwise: section beside it: give it "
            "methods: or watch:"
        )
    # axolotl's dict says None of what is not there, and its own class would reach transformers as a setting
    plain = given.to_dict() if hasattr(given, "to_dict") else given
    return HeadwiseSection.model_validate(plain)


def _methods(cfg: Any) -> list[Method]:
    text = _section(cfg).methods
    return [] if text is None else list(parse(text))
