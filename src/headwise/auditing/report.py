"""Report: the audit that a user holds, and the files it is written to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headwise.auditing.page import audit_page
from headwise.auditing.result import AuditResult
from headwise.auditing.summary import markdown


@dataclass(frozen=True, kw_only=True)
class Audit(AuditResult):
    """The health of a checkpoint's heads, which can be written as a report."""

    def write(self, out: str | Path) -> tuple[Path, Path]:
        """Write the report to `out` and the JSON beside it; give both paths. HTML, or Markdown where `out` ends in .md."""
        page = Path(out)
        page = page if page.suffix in (".html", ".md") else page.with_name(page.name + ".html")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(markdown(self) if page.suffix == ".md" else audit_page(self), encoding="utf-8")
        beside = page.with_suffix(".json")
        beside.write_text(self.to_json(), encoding="utf-8")
        return page, beside
