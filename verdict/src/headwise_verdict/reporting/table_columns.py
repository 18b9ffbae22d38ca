"""The columns of a table of runs: which hold arm, seed, outcomes and settings, by the formats of the tools.

A setting is a column that the user declares, or one that a tool's export puts among its settings. No column is taken
for a setting because its values repeat: outcomes, costs and counts do so too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from headwise_verdict.files.errors import StudyError, suggest

ARMS = ("arm", "method", "group")
SEEDS = ("seed", "random_seed", "data_seed")
STEPS = ("step", "_step", "global_step")
RUNS = ("run_id", "run id", "run", "run_name", "id", "name")
# prefixes by which exports distinguish settings from figures
SETTINGS = ("params.", "config.", "config/")
FIGURES = ("metrics.", "summary.", "summary/")
TAGS = "tags."
# the prefixes of Optuna's frame of trials, which has these columns
OPTUNA, OF_OPTUNA = ("params_", "user_attrs_"), {"number", "state", "datetime_start"}
# first columns of the CSV from Weights & Biases' page; settings and then figures follow, each in alphabetical order
OF_WANDB = ("name", "state", "created", "runtime")
# the first columns of headwise's own runs.csv, of which all others are outcomes and costs
OF_HEADWISE = ["arm", "seed", "run", "status", "diverged_at_step"]
# entries of a configuration that differ between runs of one arm: their numbers, names and folders
OF_EACH_RUN = (
    *RUNS,
    *SEEDS,
    "output_dir",
    "out_dir",
    "logging_dir",
    "log_dir",
    "logdir",
    "save_dir",
    "checkpoint_dir",
    "run_dir",
    "hub_model_id",
    "resume_from_checkpoint",
    "local_rank",
    "hostname",
    "device",
)


def plain(name: str) -> str:
    """Return a column's name in lower case, without the prefix of a tool's settings."""
    lower = name.lower()
    prefixes = (*SETTINGS, TAGS, *OPTUNA)
    return next((lower.removeprefix(before) for before in prefixes if lower.startswith(before)), lower)


def column_of(names: list[str], requested: str, candidates: Sequence[str], option: str, path: Path) -> str:
    """Return the column of the arms or seeds: the requested one, else the first of the candidates.

    Raises:
        StudyError: if there is no such column.
    """
    if requested:
        if requested not in names:
            raise StudyError(
                f"{option} {requested!r}: {path} has no such column.{suggest(requested, names)} Columns: "
                f"{', '.join(names)}."
            )
        return requested
    by_plain_name = {plain(name): name for name in reversed(names)}
    match = next((by_plain_name[name] for name in candidates if name in by_plain_name), None)
    if match is None:
        raise StudyError(
            f"{path} has no column {candidates[0]}. Columns: {', '.join(names)}. Name the column with {option} NAME."
        )
    return match


def figure_column(names: list[str], name: str, path: Path) -> str:
    """Return the column of an outcome: its name, alone or with the prefixes of headwise and of tools.

    Raises:
        StudyError: if there is no such column.
    """
    own = (name, f"test/{name}")
    for candidate in (*own, *(f"{before}{each}" for each in own for before in FIGURES)):
        if candidate in names:
            return candidate
    raise StudyError(f"--outcome {name}: {path} has no such column.{suggest(name, names)} Columns: {', '.join(names)}.")


def declared_settings(names: list[str], declared: Iterable[str], path: Path) -> list[str]:
    """Return the columns of the settings that the user declared, with or without a tool's prefix.

    Raises:
        StudyError: if there is no such column.
    """
    columns = []
    for name in declared:
        match = next((f"{before}{name}" for before in ("", *SETTINGS, *OPTUNA) if f"{before}{name}" in names), None)
        if match is None:
            raise StudyError(
                f"--settings {name}: {path} has no such column.{suggest(name, names)} Columns: {', '.join(names)}."
            )
        columns.append(match)
    return columns


def settings_of_format(names: Sequence[str]) -> list[str] | None:
    """Return the columns that an export declares as settings of an arm; None if its format declares none."""
    prefixes = (*SETTINGS, "params_") if set(names) >= OF_OPTUNA else SETTINGS
    section = [name for name in names if name.lower().startswith(prefixes)] or _settings_of_wandb(names)
    if not section:
        # headwise exports no settings: an arm's label is its configuration
        return [] if list(names[: len(OF_HEADWISE)]) == OF_HEADWISE else None
    # names that begin with _ are entries that trackers add for their own use
    return [name for name in section if plain(name) not in OF_EACH_RUN and plain(name)[:1] != "_"]


def unasked_columns(names: Sequence[str], used: Iterable[str]) -> list[str]:
    """Return the columns that may or may not be settings, in a table whose format does not say."""
    of_the_run = (*OF_EACH_RUN, *STEPS, "timestamp", "series_key")
    return [
        name
        for name in names
        if name not in used and not name.startswith((*FIGURES, TAGS, "_")) and plain(name) not in of_the_run and name
    ]


def _settings_of_wandb(names: Sequence[str]) -> list[str]:
    """Return the settings in the CSV of Weights & Biases' page: up to the column from where the alphabet starts again.

    Empty if it does not start again exactly once.
    """
    lower = [name.lower() for name in names]
    if not set(OF_WANDB) <= set(lower):
        return []
    begin = 1 + max(at for at, name in enumerate(lower) if name in (*OF_WANDB, "sweep"))
    for keys in (names, lower):
        falls = [at for at in range(begin + 1, len(names)) if keys[at] < keys[at - 1]]
        if len(falls) == 1:
            return list(names[begin : falls[0]])
    return []
