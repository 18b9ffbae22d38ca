"""Script: a training script of the user's own as what a study is about; its arguments are the settings."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from headwise.experiments.arm_settings import NAME
from headwise.experiments.configuration import RATES
from headwise.experiments.evaluation import Metric
from headwise.experiments.subject import Subject
from headwise.files.errors import StudyError

FORMS = ("argparse", "hydra", "environment", "yaml:PATH")
# endings of files in which scripts are given their settings
CONFIGURATIONS = (".yaml", ".yml", ".toml", ".json", ".ini", ".cfg")


class Script(Subject):
    """Hold a command line and what is changed of its arguments; `script_of` gives the class of a study its outcomes."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())
    metrics: ClassVar[tuple[Metric, ...]] = ()

    # the command as it was written, and how a changed argument is handed over
    script: str
    arguments: str = "argparse"
    divergence_factor: float | None = Field(
        None,
        gt=1,
        description="a run whose smoothed loss exceeds this many times its minimum has diverged; None: NaN alone",
    )
    divergence_smoothing: float = Field(0.95, ge=0, lt=1, description="weight of the past in the smoothed loss")

    def has_setting(self, name: str) -> bool:
        """Return whether a change may name this: any argument, but not the command itself."""
        return NAME.fullmatch(name) is not None and name not in ("script", "arguments")

    def setting(self, name: str) -> Any:
        """Return the value of an argument that was changed, or of an own setting; None for another."""
        known = type(self).model_fields
        return getattr(self, name) if name in known else (self.__pydantic_extra__ or {}).get(name)

    @property
    def changed(self) -> dict[str, Any]:
        """Return the arguments that were changed, by name."""
        return dict(self.__pydantic_extra__ or {})

    def files(self) -> list[Path]:
        """List the configuration files that the command names: their content is part of every run's identity."""
        words = [word.rpartition("=")[2] for word in split_command(self.script)]
        form, path = check_form(self.arguments)
        named = [word for word in words if word.endswith(CONFIGURATIONS)] + ([path] if form == "yaml" else [])
        return [file for file in map(Path, dict.fromkeys(named)) if file.is_file()]

    def rate(self) -> tuple[str, float] | None:
        """Return name and value of the learning rate that the command line or a change names; None where none does."""
        found = {**given_arguments(self.script), **{name: str(value) for name, value in self.changed.items()}}
        for name in RATES:
            try:
                return name, float(found[name])
            except (KeyError, ValueError):
                continue
        return None


def script_of(outcomes: tuple[str, ...]) -> type[Script]:
    """Return the class of a script's study, whose outcomes are `name:higher` or `name:lower:unit`; the first decides.

    Raises:
        StudyError: where there is no outcome, or one has no direction.
    """
    if not outcomes:
        raise StudyError(
            "--script needs --outcome: what run.record gives and which direction is good, such as "
            "--outcome accuracy:higher."
        )
    found = tuple(map(read_outcome, outcomes))
    names = [metric.name for metric in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise StudyError(f"--outcome {twice} is given twice. Give it once.")
    return type("Script", (Script,), {"metrics": found, "__module__": __name__, "__annotations__": {}})


def read_outcome(text: str) -> Metric:
    """Read `accuracy:higher`, `loss:lower:nats` or `accuracy:higher:%`, whose figures are shares in [0, 1]."""
    name, _, rest = text.partition(":")
    direction, _, unit = rest.partition(":")
    if not re.fullmatch(r"\w[\w.-]*", name) or direction not in ("higher", "lower"):
        raise StudyError(
            f"--outcome {text!r} does not say which direction is good. Write NAME:higher or NAME:lower, such as "
            "accuracy:higher; a third part is the unit: accuracy:higher:% for shares in [0, 1]."
        )
    return Metric(name, higher_is_better=direction == "higher", unit=unit)


def given_arguments(command: str) -> dict[str, str]:
    """Return what a command line gives by name: `--name value`, `--name=value` and `name=value`."""
    words, found = split_command(command), {}
    for word, after in zip(words, [*words[1:], ""]):
        name, equals, value = word.partition("=")
        if word.startswith("--") and not equals and after and not after.startswith("--"):
            found[word[2:]] = after
        elif equals and NAME.fullmatch(name.lstrip("-+")):
            found[name.lstrip("-+")] = value
    return found


def split_command(command: str) -> list[str]:
    """Split a command as a shell does, without running one.

    Raises:
        StudyError: where it is empty or a quote is open.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise StudyError(f"--script {command!r}: {error}. Close the quote.") from error
    if not words:
        raise StudyError('--script is empty. Write the command that trains once, such as --script "python train.py".')
    return words


def source_of(command: str) -> Path | None:
    """Return the Python file of a command, whose text is part of every run's identity; None for a module or program."""
    files = [Path(word) for word in split_command(command) if word.endswith(".py")]
    found = next((path for path in files if path.is_file()), None)
    if files and found is None:
        raise StudyError(
            f"--script names {files[0]}, which does not exist in {Path.cwd()}. Start the command where the script runs."
        )
    return found


def name_of(command: str) -> str:
    """Name a script's study: by its file, else by the module or program."""
    found = source_of(command)
    if found is not None:
        return found.stem
    words = split_command(command)
    named = words[words.index("-m") + 1] if "-m" in words[:-1] else words[0]
    return re.sub(r"[^\w.-]", "-", Path(named).name) or "script"


Form = Literal["argparse", "hydra", "environment", "yaml"]


def check_form(text: str) -> tuple[Form, str]:
    """Return the form in which changed arguments are handed over, and the path of a YAML file.

    Raises:
        StudyError: naming the forms there are.
    """
    form, _, path = text.partition(":")
    if form == "yaml" and path:
        return "yaml", path
    if text in FORMS[:3]:
        return text, ""  # type: ignore[return-value]
    raise StudyError(f"--arguments {text!r} is not known. Forms: {', '.join(FORMS)}.")


def command_line(settings: dict[str, Any], own: Path) -> tuple[list[str], dict[str, str]]:
    """Return the words of one run's command and what is added to its environment; a changed YAML file is written into
    `own`.

    Of argparse `true` is the bare flag `--name` and `false` is `--no-name`; a text in quotes is handed over as it is.
    """
    words = split_command(settings["script"])
    form, path = check_form(settings.get("arguments", "argparse"))
    changed = {name: value for name, value in settings.items() if name not in Script.model_fields}
    if form == "argparse":
        return [*words, *(word for name, value in changed.items() for word in _argument(name, value))], {}
    if form == "hydra":
        return [*words, *(f"{name}={_of_hydra(value)}" for name, value in changed.items())], {}
    if form == "environment":
        return words, {name: _plain(value) for name, value in changed.items()}
    return _with_yaml(words, path, changed, own), {}


def _argument(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [f"--{name}", *map(_plain, values)]


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_plain, value))}]"
    return repr(value) if isinstance(value, float) else str(value)


def _of_hydra(value: Any) -> str:
    """Write a value as Hydra's grammar reads it back: a text with marks of that grammar stands in quotes."""
    if not isinstance(value, str) or re.fullmatch(r"[\w./:@%?|+-]+", value):
        return _plain(value)
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _with_yaml(words: list[str], path: str, changed: dict[str, Any], own: Path) -> list[str]:
    """Write the YAML file with its changes (dots name what lies inside), and put the copy into the command."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise StudyError("--arguments yaml:PATH needs PyYAML, which is not installed: pip install pyyaml.") from error
    if path not in words and not any(word.endswith(f"={path}") for word in words):
        raise StudyError(
            f"--arguments yaml:{path}: the command of --script does not name {path}. Write it there as it is."
        )
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise StudyError(f"--arguments yaml:{path}: the file cannot be read: {error}.") from error
    for name, value in changed.items():
        at, keys = content, name.split(".")
        for key in keys[:-1]:
            at = at.setdefault(key, {}) if isinstance(at, dict) else None
        if not isinstance(at, dict):
            raise StudyError(
                f"{name}: what stands there in {path} holds no names. Change a value that has a name of its own."
            )
        at[keys[-1]] = value
    target = own / Path(path).name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return [
        word.removesuffix(path) + os.fspath(target) if word == path or word.endswith(f"={path}") else word
        for word in words
    ]
