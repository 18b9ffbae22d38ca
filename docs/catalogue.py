"""Write the catalogue that `headwise methods` and `headwise studies` print, so that neither has to import torch.

Usage: `python docs/catalogue.py [--check]`. Methods and studies are read from their own modules, verdicts from the kept
results; the purposes of methods are listed here.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from headwise.attend import methods
from headwise.attend.core.method import REGISTRY
from headwise.lab.studies.registry import BUILT_IN, PAPERS

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src" / "headwise" / "lab" / "studies" / "catalogue.json"

# the lines on a study's duration as docs/keep_results.py writes them, for runs or for a study of findings
COMMAND = re.compile(r"^Command: `headwise compare (?P<name>\S+)(?P<options>[^`]*)`.*", re.MULTILINE)
RUNS = re.compile(r"(?P<runs>\d+) runs, (?P<minutes>[\d.]+) minutes of training altogether")
TOOK = re.compile(r"It took (?P<minutes>[\d.]+) minutes")
DEFAULT = "default"

# the purposes for which the methods' own papers propose them
PURPOSES = {
    "overfitting": "AttentionDropout AttentionNormPenalty BranchDrop DropAttention DropColumn DropHead DropKey "
    "InputNoise LSA "
    "RelaxedAttention",
    "unstable training": "EntropyPenalty LayerScale QKClip QKNorm QKRates SigmaReparam SoftCap SpectralCap "
    "SpectralNorm "
    "StableSoftmax Temperature ValueNorm WeightNorm ZLoss",
    "oversmoothing": "AttnScale ContraNorm FeatScale GFSA NeuTRENO ReAttention ValueResidual",
    "heads that do the same": "Decorrelation Disagreement DropHead InterleavedHeads ReAttention",
    "attention sinks": "AttentionSink DifferentialAttention GatedNorm GatedOutput Softpick XSA",
    "long contexts": "ForgettingAttention SSMax",
    "smaller models": "NuclearDecay ProductDecay SymmetricAttention",
    "small gradients": "LASER",
    "cost": "LinearAttention",
}


def of_methods() -> dict[str, Any]:
    """Return the entry of each method: text, summary, paper, purposes and docstring."""
    entries = {}
    for name in sorted(methods.__all__):
        cls = REGISTRY[name]
        entries[name] = {
            "written": repr(cls()),
            "summary": cls.summary(),
            "paper": cls.paper,
            "for": [purpose for purpose, names in PURPOSES.items() if name in names.split()],
            "about": inspect.cleandoc(cls.__doc__ or ""),
        }
    return entries


def of_studies() -> dict[str, Any]:
    """Return the entry of each study: question, arms, seeds, scales, data sets, duration and kept answer."""
    return {name: _study(name) for name in sorted({*BUILT_IN, *PAPERS})}


def _study(name: str) -> dict[str, Any]:
    module = importlib.import_module(_modules()[name])
    study = getattr(module, "STUDY", None)
    common = {"source": _sources().get(name, "own"), "measured": _measured(name), "kept": _kept(name)}
    if study is None:
        return {"question": module.TITLE} | common
    scales = {key: {"seeds": scale.seeds or study.seeds} for key, scale in study.scales.items()}
    data = [dataclasses.asdict(data_set) for data_set in study.task.data_sets()]
    entry = {"question": study.question, "arms": len(study.arms), "seeds": study.seeds, "scales": scales}
    return entry | {"data": data} | common


@cache
def _sources() -> dict[str, str]:
    """Return the source whose experiment each study repeats: the one whose page has its claims, or is in its name."""
    text = (ROOT / "docs" / "results" / "sources.toml").read_text(encoding="utf-8")
    sources = tomllib.loads(text)["source"]
    claims = [
        (source["key"], claim) for source in sources for part in source["part"] for claim in part.get("claims", [])
    ]
    known = {claim["of"].partition(":")[0]: key for key, claim in claims}
    keys = [source["key"] for source in sources]
    named = {name: name.partition("-")[0] for name in PAPERS if name.partition("-")[0] in keys}
    return named | known


def _measured(name: str) -> dict[str, Any]:
    """Return, by scale, the runs and minutes of training stated on a study's kept page; {} without a page."""
    path = ROOT / "docs" / "results" / name / "README.md"
    page = COMMAND.search(path.read_text(encoding="utf-8")) if path.exists() else None
    if page is None:
        return {}
    scale = re.search(r"--scale (\S+)", page["options"])
    match = RUNS.search(page[0]) or TOOK.search(page[0])
    if match is None:
        return {}
    figures = {key: float(value) if key == "minutes" else int(value) for key, value in match.groupdict().items()}
    return {scale[1] if scale else DEFAULT: figures}


def _modules() -> dict[str, str]:
    """Return the modules of all studies as named in this source tree, whatever version is installed."""
    papers = tomllib.loads((ROOT / "papers" / "pyproject.toml").read_text(encoding="utf-8"))
    return {**BUILT_IN, **papers["project"]["entry-points"]["headwise.studies"]}


def _kept(name: str) -> str:
    path = ROOT / "docs" / "results" / name / "analysis.json"
    return json.loads(path.read_text(encoding="utf-8")).get("answer", "") if path.exists() else ""


def text() -> str:
    """Return the text of the file."""
    return json.dumps({"methods": of_methods(), "studies": of_studies()}, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the file, or with --check return 1 if it is not current."""
    content = text()
    if "--check" in sys.argv:
        return int(not TARGET.exists() or TARGET.read_text(encoding="utf-8") != content)
    TARGET.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
