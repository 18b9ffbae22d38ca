"""Recipe: how a task is trained, as plain settings; no task writes a training loop."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

OptimizerName = Literal[
    "adamw", "adam", "sgd", "lars", "adagrad", "muon", "muon-head", "muon-hyperball", "muon-stiefel"
]
Share = Annotated[float, Field(ge=0, lt=1)]

# Settings of each optimizer, with the value used for None: torch's own defaults, except momentum 0.9, as papers mean by
# SGD. LARS: You et al. 2017, arXiv 1708.03888. Muon: Jordan et al. 2024, for the matrices of attention and MLPs, with
# AdamW for the rest; betas and eps are AdamW's. "muon" takes each weight as it is stored, "muon-head" each head of
# attention alone; "muon-hyperball" keeps the norm of each projection, and "muon-stiefel" the singular values of each
# head.
MUON: dict[str, Any] = {"momentum": 0.95, "nesterov": True, "betas": (0.9, 0.999), "eps": 1e-8}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8},
    "sgd": {"momentum": 0.9, "nesterov": False},
    "lars": {"momentum": 0.9, "nesterov": False, "trust": 0.001},
    "adagrad": {"eps": 1e-10},
    "muon": MUON,
    "muon-head": MUON,
    "muon-hyperball": MUON,
    "muon-stiefel": MUON,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "cosine": {"final_learning_rate": 0.0},
    "linear": {"final_learning_rate": 0.0},
    "inverse_sqrt": {},
    "plateau": {"patience": 5, "factor": 0.1},
}


class Recipe(BaseModel):
    """The training settings of a run: optimizer, learning rate, weight decays, length, batches and precision."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    epochs: int = Field(10, ge=1, description="passes over the training examples")
    steps: int | None = Field(None, ge=1, description="optimizer steps; if set, they replace epochs")
    batch_size: int = Field(256, ge=1, description="examples of one batch")
    tokens_per_batch: int | None = Field(
        None, ge=1, description="most tokens of one batch, padding included; if set, it replaces batch_size"
    )
    accumulation: int = Field(1, ge=1, description="batches whose gradients make one optimizer step")
    optimizer: OptimizerName = "adamw"
    learning_rate: float = Field(1e-3, gt=0, allow_inf_nan=False, description="after the warm-up")
    method_rate: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="of parameters that methods add: a multiple of learning_rate"
    )
    betas: tuple[Share, Share] | None = Field(None, description="of adamw, adam and muon's AdamW; None: (0.9, 0.999)")
    eps: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="of adamw, adam, muon's AdamW and adagrad; None: torch's own"
    )
    momentum: Share | None = Field(None, description="of sgd, lars and muon; None: 0.9, of muon 0.95")
    nesterov: bool | None = Field(
        None, description="Nesterov's momentum, of sgd, lars and muon; None: false, of muon true"
    )
    trust: float | None = Field(None, gt=0, allow_inf_nan=False, description="trust coefficient of lars; None: 0.001")
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt", "plateau"] = "constant"
    warmup: float = Field(
        0, ge=0, allow_inf_nan=False, description="steps of linear warm-up; below 1: their share of all steps"
    )
    final_learning_rate: float | None = Field(
        None, ge=0, description="where cosine and linear end; None: 0", allow_inf_nan=False
    )
    patience: int | None = Field(None, ge=0, description="epochs without a lower loss before plateau acts; None: 5")
    factor: float | None = Field(None, gt=0, lt=1, description="by which plateau lowers the learning rate; None: 0.1")
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False)
    attention_weight_decay: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="of attention's q, k, v and o weights; None: weight_decay"
    )
    mlp_weight_decay: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="of the weights of the blocks' MLPs; None: weight_decay"
    )
    clip: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="largest norm of the gradients; None: not clipped"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="bfloat16: autocast")

    @model_validator(mode="after")
    def _limits_stay(self) -> Recipe:
        """Apply the limits declared here to a task that overrides a field's default (`epochs: int = 30`)."""
        if type(self) is Recipe:
            return self
        try:
            Recipe(**{name: getattr(self, name) for name in Recipe.model_fields})
        except ValidationError as error:
            first = error.errors()[0]
            place = f"{first['loc'][0]}: " if first["loc"] else ""
            raise ValueError(f"{place}{first['msg'].removeprefix('Value error, ')}") from error
        return self

    @model_validator(mode="after")
    def _settings_have_a_meaning(self) -> Recipe:
        """Refuse a setting that the chosen optimizer or schedule does not have and would ignore."""
        for kind, table in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            chosen = getattr(self, kind)
            known = {name for settings in table.values() for name in settings}
            foreign = sorted(name for name in known - set(table[chosen]) if getattr(self, name) is not None)
            if foreign:
                raise ValueError(
                    f"{kind} {chosen} has no {', '.join(foreign)}. Its settings: "
                    f"{', '.join(table[chosen]) or 'none'}. Leave {foreign[0]} out, or set it to none."
                )
        return self

    def optimizer_settings(self) -> dict[str, Any]:
        """Return the settings of the optimizer, with defaults for those that are None."""
        return self._filled(OPTIMIZERS[self.optimizer])

    def schedule_settings(self) -> dict[str, Any]:
        """Return the settings of the schedule, with defaults for those that are None."""
        return self._filled(SCHEDULES[self.schedule])

    def _filled(self, defaults: dict[str, Any]) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in defaults}
        return {name: defaults[name] if value is None else value for name, value in values.items()}
