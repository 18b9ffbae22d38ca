"""The result of an audit with its report, whose HTML page needs headwise-verdict and whose Markdown does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headwise.files.durable import write_bytes
from headwise.files.optional_imports import needing
from headwise.files.ownership import claim
from headwise.health.auditing.result import AuditResult
from headwise.health.auditing.summary import files_of, markdown


@dataclass(frozen=True, kw_only=True, repr=False)
class Audit(AuditResult):
    """The health of a checkpoint's heads, which can be written as a report."""

    def write(self, out: str | Path) -> tuple[Path, Path]:
        """Write the report (Markdown if `out` ends in .md, else HTML) and the JSON next to it; return both paths.

        Raises:
            ValueError: if one of the files exists and was not written by headwise.
        """
        page, json_file = files_of(out)
        claim(page.parent, (page.name, json_file.name), shared=True)
        write_bytes(page, (markdown(self) if page.suffix == ".md" else _html(self)).encode())
        write_bytes(json_file, self.to_json().encode())
        return page, json_file


def _html(audit: Audit) -> str:
    with needing("The HTML report of an audit", "study"):
        from headwise.health.auditing.page import audit_page

        return audit_page(audit)
