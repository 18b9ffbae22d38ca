"""The files of a run and of a study in their folders, for those who write them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headwise_verdict.files.durable import clear_partials, read_json, write_json
from headwise_verdict.files.ownership import REPORT, STUDY, claim, plain_folder, why_foreign
from headwise_verdict.results.digests import CHECKPOINT, HEALTH, RESULT, broken_seal, damage, digests, sealed
from headwise_verdict.results.folder import sealed_study, strangers
from headwise_verdict.results.health_records import Line, read_health
from headwise_verdict.results.records import MAPS, LayerMaps, MapsRecord, RunResult, StudyRecord, environments_of


@dataclass(frozen=True)
class RunFiles:
    """The files of one run by their names in its folder, and what makes them readable as a finished run.

    Example:
        >>> from pathlib import Path
        >>> from headwise_verdict.results import RunFiles
        >>> RunFiles(Path("results/digits/runs/0a1b")).health.name
        'health.jsonl'
    """

    folder: Path

    @property
    def config(self) -> Path:
        """Return the file of the run's configuration."""
        return self.folder / "config.json"

    @property
    def metrics(self) -> Path:
        """Return the file of its epochs, one a line."""
        return self.folder / "metrics.jsonl"

    @property
    def health(self) -> Path:
        """Return the file of the readings and alerts of a watched run, one a line."""
        return self.folder / HEALTH

    @property
    def result(self) -> Path:
        """Return the file that a run writes last."""
        return self.folder / RESULT

    @property
    def checkpoint(self) -> Path:
        """Return the file of its newest checkpoint."""
        return self.folder / CHECKPOINT

    def make_folder(self) -> None:
        """Make the folder, and claim for headwise the folder of runs that it is in.

        Raises:
            StudyError: if one of them is not headwise's, or is a link.
        """
        runs = self.folder.parent
        claim(runs.parent, (runs.name,), shared=True)
        plain_folder(self.folder)

    def clear_partials(self) -> None:
        """Remove the files that a killed process was writing."""
        clear_partials(self.folder)

    def readings(self) -> list[Line]:
        """Return the readings and alerts of a watched run; none without their file.

        Raises:
            ValueError: if a whole line is neither; the message has file, line and field.
        """
        return read_health(self.health)

    def write_maps(self, tokens: int, layers: Iterable[tuple[str, int, list[list[list[float]]]]]) -> None:
        """Write attention maps of an example of `tokens` tokens: of each layer its name, depth and maps (H, T, N)."""
        maps = [LayerMaps(layer=name, depth=depth, heads=heads) for name, depth, heads in layers]
        write_json(self.folder / MAPS, MapsRecord(tokens=tokens, layers=maps).model_dump(mode="json"))

    def write_result(self, result: RunResult) -> RunResult:
        """Write the result of a run whose other files are whole, and return it with the digests of all of them."""
        result = result.model_copy(update={"digests": digests(self.folder)})
        write_json(self.result, sealed(result.model_dump(mode="json")))
        return result

    def read_result(self, identity: str) -> tuple[RunResult | None, list[str]]:
        """Return the result and what is wrong with the files of a finished run: its result is then not returned.

        Without a result there is neither. `identity` is the hash of the run whose folder this should be.
        """
        if not self.result.exists():
            return None, []
        written = read_json(self.result)
        try:
            result = RunResult.model_validate(written)
        except ValidationError:
            return None, [f"{RESULT} holds no result that can be read"]
        if result.hash != identity:
            return None, [f"{RESULT} is of the run {result.hash}"]
        if broken := broken_seal(written or {}, required=True):
            return None, [f"{RESULT} {broken}"]
        problems = damage(self.folder, result.digests, checkpoint=True)
        return (None if problems else result), problems


@dataclass(frozen=True)
class StudyFiles:
    """The files of a study in its folder, for those who write them."""

    folder: Path

    @property
    def findings(self) -> Path:
        """Return the file of the findings of a study without arms."""
        return self.folder / "findings.json"

    def claim(self) -> None:
        """Make the folder, and claim in it all files of a study and its report.

        Raises:
            StudyError: if one of them is not headwise's, or the folder holds other files; nothing is written then.
        """
        claim(self.folder, (*STUDY, *REPORT))

    def may_be_claimed(self) -> bool:
        """Return whether `claim` would succeed."""
        return not why_foreign(self.folder, (*STUDY, *REPORT))

    def known(self) -> dict[str, Any] | None:
        """Return the content of study.json as it is, or None if it is absent, torn or no record."""
        content = read_json(self.folder / "study.json")
        return content if isinstance(content, dict) else None

    def write(self, study: StudyRecord, results: Iterable[RunResult]) -> None:
        """Write study.json, sealed, with the environments of the results.

        The most frequent one is the study's; without results it stays as `study` has it.
        """
        changes: dict[str, Any] = {"environments": (origins := environments_of(results))}
        if origins:
            changes |= origins[0].model_dump(include={"commit", "versions", "hardware"})
        described = sealed_study(study.model_copy(update=changes))
        write_json(self.folder / "study.json", described.model_dump(mode="json"))

    def strangers(self, hashes: Collection[str]) -> list[Path]:
        """Return the folders of runs that are not among the study's, whose hashes are given."""
        return [self.folder / "runs" / name for name in strangers(self.folder, hashes)]
