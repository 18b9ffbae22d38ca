"""Export of a report for papers and other programs: figures as SVG, PDF and PNG, tables as CSV, Markdown and LaTeX."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from html import unescape
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from headwise_verdict.files.errors import explain
from headwise_verdict.files.ownership import claim
from headwise_verdict.pages.formats import p_value
from headwise_verdict.reporting.headline import amount, changes, effect, power
from headwise_verdict.reporting.outcome_texts import by_effect, label_of, short_names, unit_of
from headwise_verdict.reporting.plain_tables import tex
from headwise_verdict.reporting.rebuild import report_files, write_files
from headwise_verdict.results.analysis_record import Analysis, Difference
from headwise_verdict.results.folder import StudyFolder, read_study

METHOD = re.compile(r"\b([A-Z]\w*)\(")
# longest name of an arm, in characters, that is not wrapped, so that the table fits one column of a paper
LONGEST = 24
ENTRY = re.compile(r"^@\w+\{(?P<key>\w+),\n(?P<body>.*?)^\}\n", re.DOTALL | re.MULTILINE)
USED = re.compile(r"  usedby = \{(?P<methods>[^}]*)\},\n")


def paper_files(study: StudyFolder, analysis: Analysis) -> dict[str, str]:
    """Return the files for a paper by name: a table, text to copy, and BibTeX."""
    return {
        "paper-table.tex": paper_table(study, analysis),
        "paper-text.tex": f"% Results, to copy\n{results_sentence(analysis)}\n\n% Methods, to "
        f"copy\n{methods_paragraph(study, analysis)}\n",
        "paper-references.bib": bibtex(analysis),
    }


def paper_table(study: StudyFolder, analysis: Analysis) -> str:
    """Return a LaTeX table (booktabs) that fits one column: arm, outcome, difference with interval, p."""
    metric, names, unit = analysis.metric, short_names(analysis), unit_of(analysis.metric)
    base = next(arm for arm in analysis.arms if arm.label == analysis.baseline)
    wrapped = any(len(name) > LONGEST for name in names.values())
    first_column, start = (r"p{0.3\columnwidth}", r"\raggedright ") if wrapped else ("l", "")
    rows = []
    for arm in (base, *by_effect(analysis)):
        entry, mean = arm.differences.get(analysis.primary), unit.number(arm.metrics[analysis.primary].mean)
        outcome = mean or ("diverged" if arm.all_diverged else "--")
        difference = effect(entry, analysis) if entry and entry.mean is not None else "--"
        p = p_value(entry.p_corrected) if entry else None
        rows.append([start + tex(names[arm.label]), tex(outcome), tex(difference), tex(p or "--")])
    name = f" ({unit.name})" if unit.name else ""
    kind = f" ({unit.difference})" if unit.difference else ""
    head = ["arm", tex(f"{metric.label}{name}"), tex(f"difference{kind} [95 %]"), "$p$"]
    lines = [" & ".join(row) + r" \\" for row in (head, *rows)]
    settings = "; ".join(f"{names[arm.label]}: {arm.label}" for arm in analysis.arms if names[arm.label] != arm.label)
    caption = (
        f"{metric.label[:1].upper()}{metric.label[1:]} over {len(analysis.seeds)} seeds, with paired differences to "
        f"the baseline. {settings}".strip()
    )
    body = "\n".join([lines[0], r"\midrule", *lines[1:]])
    label = re.sub(r"\W+", "-", study.study.name or "comparison")
    return (
        "% needs \\usepackage{booktabs}\n\\begin{table}[t]\n\\centering\\footnotesize\\setlength{\\tabcolsep}{4pt}\n"
        f"\\caption{{{tex(caption)}}}\n\\label{{tab:{label}}}\n"
        f"\\begin{{tabular}}{{@{{}}{first_column}rrr@{{}}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"
        "\\end{table}\n"
    )


def results_sentence(analysis: Analysis) -> str:
    """Return the result in the primary outcome, arm by arm, as LaTeX."""
    if not analysis.compared:
        return tex(analysis.answer)
    names = short_names(analysis)
    # the outcome is named once
    clauses = [
        _clause(
            names[arm.label], "it" if at else label_of(analysis.metric), arm.differences[analysis.primary], analysis
        )
        for at, arm in enumerate(by_effect(analysis))
    ]
    diverged = sum(len(arm.runs.diverged) for arm in analysis.arms)
    divergence = f" {diverged} of {len(analysis.arms) * len(analysis.seeds)} runs diverged." if diverged else ""
    start = "Over" if analysis.complete else "So far, over"
    return tex(f"{start} {len(analysis.seeds)} seeds, {'; '.join(clauses)}.{divergence}")


def _clause(name: str, outcome: str, entry: Difference, analysis: Analysis) -> str:
    if entry.mean is None:
        return f"{name} has no pair of finished runs"
    p = p_value(entry.p_corrected) or "–"
    p = f"p {'' if p.startswith('<') else '= '}{p}"
    if entry.verdict == "undecided":
        return f"whether {name} changes {outcome} cannot be decided ({entry.n} pairs)"
    if entry.verdict == "equivalent":
        unit = unit_of(analysis.metric)
        margin = f"±{unit.number(analysis.margin)} {unit.difference}".rstrip()
        return f"{name} leaves {outcome} equivalent within {margin} ({effect(entry, analysis)}, {p})"
    if entry.verdict == "no evidence":
        figures = f"{effect(entry, analysis)}, {p}{power(entry, analysis)}"
        return f"there is no evidence that {name} changes {outcome} ({figures})"
    return f"{name} {changes(entry)} {outcome} by {amount(entry, analysis, also=p)}"


def methods_paragraph(study: StudyFolder, analysis: Analysis) -> str:
    """Return how the arms were run and judged, as LaTeX, with a citation of every method that has an entry."""
    words, names = analysis.statistics, short_names(analysis)
    cited = [
        f"{tex(names[arm.label])} "
        f"(\\texttt{{{tex(arm.label)}}}{''.join(f', {chr(92)}cite{{{key}}}' for key in _keys(arm.label))})"
        for arm in analysis.compared
    ]
    versions = ", ".join(
        f"{name} {version}" for name, version in (study.study.versions or {}).items() if name in ("headwise", "torch")
    )
    tuned = study.study.settings.get("trials_per_arm")
    sentences = [
        f"We compared {', '.join(cited)} with {tex(names[analysis.baseline])}, each with the same "
        f"{len(analysis.seeds)} seeds; arms of a seed share their data and their order."
        if cited
        else "",
        tex(f"Every arm, the baseline included, was tuned by {tuned} trials on validation data.") if tuned else "",
        tex(
            f"Differences: {words['difference']}. Intervals: {words['interval']}. p: {words['p']}; correction: "
            f"{words['correction']}. Verdicts: {words['verdict']}."
        ),
        tex(f"Carried out with {versions}.") if versions else "",
    ]
    return " ".join(filter(None, sentences))


def bibtex(analysis: Analysis) -> str:
    """Return the BibTeX entries of the methods of all arms, in order; a comment names each method without an entry."""
    all_entries, keys, unknown = entries(), [], []
    for name in dict.fromkeys(name for arm in analysis.arms for name in METHOD.findall(arm.label)):
        matches = [key for key, (methods, _) in all_entries.items() if name in methods]
        keys += matches
        unknown += [] if matches else [f"% No entry is known for {name}.\n"]
    return "\n".join([*unknown, *(all_entries[key][1] for key in dict.fromkeys(keys))])


def entries() -> dict[str, tuple[list[str], str]]:
    """Return every entry of references.bib by key: the methods that it documents, and its text without their names."""
    text = (files("headwise_verdict.reporting") / "references.bib").read_text(encoding="utf-8")
    by_key = {}
    for entry in ENTRY.finditer(text):
        match = USED.search(entry[0])
        by_key[entry["key"]] = (match["methods"].split(", ") if match else [], USED.sub("", entry[0]))
    return by_key


def _keys(label: str) -> list[str]:
    names = METHOD.findall(label)
    return [key for key, (methods, _) in entries().items() if any(name in methods for name in names)]


WIDTH = 640
VARIABLE = re.compile(r"var\((--[a-z]+)\)")
SERIES = ("--blue", "--orange", "--green", "--purple", "--sky", "--vermillion", "--grey")


def on_paper(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a Vega-Lite specification in the colours of the light theme with a fixed width, and its configuration."""
    resolved = {key: value if key == "datasets" else _resolved(value) for key, value in spec.items()}
    # the columns of labels and numbers are part of the width
    fitted = {"width": WIDTH, "background": "white", "autosize": {"type": "fit-x", "contains": "padding"}}
    return resolved | fitted, _look()


def _resolved(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: value if key == "values" else _resolved(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolved(item) for item in node]
    match = VARIABLE.fullmatch(node) if isinstance(node, str) else None
    return _colours()[match[1]] if match else node


@cache
def _colours() -> dict[str, str]:
    # the first block of the style sheet defines the light colours
    style = (files("headwise_verdict.pages") / "shell.css").read_text(encoding="utf-8").partition("}")[0]
    return dict(re.findall(r"(--[a-z]+): (#[0-9a-f]+);", style))


def _look() -> dict[str, Any]:
    colours = _colours()
    muted, line, rule = (colours[name] for name in ("--muted", "--line", "--rule"))
    inks = {"labelColor": muted, "titleColor": muted, "gridColor": line, "domainColor": rule, "tickColor": rule}
    axis = {**inks, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11.5}
    legend = {"labelColor": muted, "titleColor": muted, "titleFontWeight": "normal", "symbolSize": 70}
    series, text = {"category": [colours[name] for name in SERIES]}, {"color": colours["--ink"]}
    return {"axis": axis, "legend": legend, "view": {"stroke": None}, "range": series, "text": text}


TABLES = (".csv", ".tex", ".md")
FIGURE = re.compile(
    r'<figure id="figure-(?P<name>[^"]+)".*?<script type="application/json">(?P<spec>.*?)</script>', re.DOTALL
)


def export(folder: str | Path, out: str | Path) -> list[Path]:
    """Write all figures of a folder's report (also of closed folds), its tables and its files for a paper into `out`.

    Return the paths of the files. Figures are drawn in the light colours, 640 pixels wide, as PNG twice that; LaTeX
    takes the PDF.
    Raises the errors of `headwise_verdict.reporting.write`, and StudyError if `out` is not writable.
    """
    path, target = Path(folder), Path(out)
    files = report_files(path)
    tables: dict[str, str | bytes] = {name: text for name, text in files.items() if name.endswith(TABLES)}
    if "analysis.json" in files:
        tables |= paper_files(read_study(path), Analysis.model_validate_json(files["analysis.json"]))
    drawn = list(figures_in(files["report.html"]))
    names = [*tables, *(f"{name}.{kind}" for name, _ in drawn for kind in KINDS)]
    try:
        claim(target, names, "--export")
    except OSError as error:
        raise explain(error, target, "--export") from error
    write_files(target, tables, "--export")
    for name, spec in drawn:
        write_files(target, {f"{name}.{kind}": made(spec) for kind, made in KINDS.items()}, "--export")
    return [target / name for name in names]


def figures(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Return every figure of a folder's report as Vega-Lite, by name.

    Raises the errors of `headwise_verdict.reporting.write`.
    """
    return dict(figures_in(report_files(Path(folder))["report.html"]))


def figures_in(html: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the Vega-Lite specification of each figure of a page."""
    for match in FIGURE.finditer(html):
        yield unescape(match["name"]), json.loads(match["spec"])


def svg(spec: dict[str, Any]) -> str:
    """Return a Vega-Lite figure as SVG for print."""
    paper, settings = _for_print(spec)
    return import_module("vl_convert").vegalite_to_svg(paper, **settings)  # type: ignore[no-any-return]


def _png(spec: dict[str, Any]) -> bytes:
    paper, settings = _for_print(spec)
    return import_module("vl_convert").vegalite_to_png(paper, scale=2, **settings)  # type: ignore[no-any-return]


def _pdf(spec: dict[str, Any]) -> bytes:
    # LaTeX includes no SVG
    paper, settings = _for_print(spec)
    return import_module("vl_convert").vegalite_to_pdf(paper, **settings)  # type: ignore[no-any-return]


# the formats of an exported figure, by the ending of its file
KINDS: dict[str, Callable[[dict[str, Any]], str | bytes]] = {"svg": svg, "pdf": _pdf, "png": _png}


def _for_print(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    version = import_module("altair").SCHEMA_VERSION
    paper, config = on_paper(spec)
    return paper, {"vl_version": ".".join(version.lstrip("v").split(".")[:2]), "config": config}
