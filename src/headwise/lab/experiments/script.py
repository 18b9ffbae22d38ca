"""Script: the user's own training script as the subject of a study; its arguments are the settings."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from headwise.files.durable import write_bytes
from headwise.lab.experiments.arm_settings import NAME
from headwise.lab.experiments.configuration import RATES
from headwise.lab.experiments.evaluation import Metric
from headwise.lab.experiments.subject import Subject
from headwise_verdict import StudyError
from headwise_verdict.files import plain_folder
from headwise_verdict.results import declared_outcomes

FORMS = ("argparse", "hydra", "environment", "yaml:PATH")
# endings of configuration files of scripts
CONFIGURATIONS = (".yaml", ".yml", ".toml", ".json", ".ini", ".cfg")


class Script(Subject):
    """A command line and the changes of its arguments; `script_of` makes the class of a study with its outcomes."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())
    metrics: ClassVar[tuple[Metric, ...]] = ()

    # the command as written, and the form in which changed arguments are passed
    script: str
    arguments: str = "argparse"
    divergence_factor: float | None = Field(
        None,
        gt=1,
        description="a run whose smoothed loss exceeds this many times its minimum has diverged; None: NaN alone",
    )
    divergence_smoothing: float = Field(0.95, ge=0, lt=1, description="weight of the past in the smoothed loss")

    def has_setting(self, name: str) -> bool:
        """Return whether a change may have this name: any argument, but not the command itself."""
        return NAME.fullmatch(name) is not None and name not in ("script", "arguments")

    def setting(self, name: str) -> Any:
        """Return the value of a changed argument or of a field of this class; None for any other name."""
        known = type(self).model_fields
        return getattr(self, name) if name in known else (self.__pydantic_extra__ or {}).get(name)

    @property
    def changed(self) -> dict[str, Any]:
        """Return the changed arguments by name."""
        return dict(self.__pydantic_extra__ or {})

    def files(self) -> list[Path]:
        """Return the configuration files that the command names; their content is part of every run's identity."""
        words = [word.rpartition("=")[2] for word in split_command(self.script)]
        form, path = check_form(self.arguments)
        named = [word for word in words if word.endswith(CONFIGURATIONS)] + ([path] if form == "yaml" else [])
        return [file for file in map(Path, dict.fromkeys(named)) if file.is_file()]

    def rate(self) -> tuple[str, float] | None:
        """Return name and value of the learning rate in the command line or a change, or None if there is none."""
        arguments = {**given_arguments(self.script), **{name: str(value) for name, value in self.changed.items()}}
        for name in RATES:
            try:
                return name, float(arguments[name])
            except (KeyError, ValueError):
                continue
        return None


def script_of(outcomes: tuple[str, ...]) -> type[Script]:
    """Return the class of a script's study with outcomes `name:higher` or `name:lower:unit`; the first decides.

    Raises:
        StudyError: if there is no outcome, one has no direction, or one is given twice.
    """
    if not outcomes:
        raise StudyError(
            "--script needs --outcome: a name that run.record records and which direction is good: "
            "--outcome accuracy:higher."
        )
    metrics = tuple(Metric(one.name, one.label, one.higher_is_better, one.unit) for one in declared_outcomes(outcomes))
    return type("Script", (Script,), {"metrics": metrics, "__module__": __name__, "__annotations__": {}})


def given_arguments(command: str) -> dict[str, str]:
    """Return the arguments of a command line by name: `--name value`, `--name=value` and `name=value`."""
    words, arguments = split_command(command), {}
    for word, after in zip(words, [*words[1:], ""]):
        name, equals, value = word.partition("=")
        if word.startswith("--") and not equals and after and not after.startswith("--"):
            arguments[word[2:]] = after
        elif equals and NAME.fullmatch(name.lstrip("-+")):
            arguments[name.lstrip("-+")] = value
    return arguments


def split_command(command: str) -> list[str]:
    """Return the words of a command, split as a shell does, without running one.

    Raises:
        StudyError: if the command is empty or has an unclosed quote.
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
    source = next((path for path in files if path.is_file()), None)
    if files and source is None:
        raise StudyError(
            f"--script names {files[0]}, which does not exist in {Path.cwd()}. Start the command where the script runs."
        )
    return source


def name_of(command: str) -> str:
    """Return the name of a script's study: its file's, else the module's or program's."""
    source = source_of(command)
    if source is not None:
        return source.stem
    words = split_command(command)
    named = words[words.index("-m") + 1] if "-m" in words[:-1] else words[0]
    return re.sub(r"[^\w.-]", "-", Path(named).name) or "script"


Form = Literal["argparse", "hydra", "environment", "yaml"]


def check_form(text: str) -> tuple[Form, str]:
    """Return the form in which changed arguments are passed, and the path of a YAML file.

    Raises:
        StudyError: with the list of forms, if the form is unknown.
    """
    form, _, path = text.partition(":")
    if form == "yaml" and path:
        return "yaml", path
    if text in FORMS[:3]:
        return text, ""  # type: ignore[return-value]
    raise StudyError(f"--arguments {text!r} is not known. Forms: {', '.join(FORMS)}.")


def command_line(settings: dict[str, Any], own: Path) -> tuple[list[str], dict[str, str]]:
    """Return the words of one run's command and its additional environment; a changed YAML file is written into `own`.

    For argparse, `true` becomes the flag `--name` and `false` becomes `--no-name`; a string in quotes is passed
    unchanged.
    """
    words = split_command(settings["script"])
    form, path = check_form(settings.get("arguments", "argparse"))
    changed = {name: value for name, value in settings.items() if name not in Script.model_fields}
    if form == "argparse":
        return [*words, *(word for name, value in changed.items() for word in _argument(name, value))], {}
    if form == "hydra":
        return [*words, *(f"{name}={_hydra_text(value)}" for name, value in changed.items())], {}
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


def _hydra_text(value: Any) -> str:
    """Return a value as Hydra's grammar reads it back: a string with special characters is quoted."""
    if not isinstance(value, str) or re.fullmatch(r"[\w./:@%?|+-]+", value):
        return _plain(value)
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _with_yaml(words: list[str], path: str, changed: dict[str, Any], own: Path) -> list[str]:
    """Write the YAML file with its changes (dots separate nested names); return the command with the new path."""
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
                f"{name}: a part of this name is not a mapping in {path}. Change a value that has its own name."
            )
        at[keys[-1]] = value
    target = own / Path(path).name
    plain_folder(own)
    write_bytes(target, yaml.safe_dump(content, sort_keys=False).encode())
    return [
        word.removesuffix(path) + os.fspath(target) if word == path or word.endswith(f"={path}") else word
        for word in words
    ]
