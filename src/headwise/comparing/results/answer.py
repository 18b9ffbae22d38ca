"""Say the result of a comparison in one or two sentences."""

from __future__ import annotations


def answer(analysis: dict) -> str:
    """Return the result of the study in one or two sentences, built from its verdicts on the main metric."""
    name, label = analysis["metric"]["name"], analysis["metric"]["label"]
    by_verdict: dict[str, list[str]] = {}
    for method in analysis["methods"]:
        if name in method["differences"]:
            by_verdict.setdefault(method["differences"][name]["verdict"], []).append(method["label"])
    total, seeds = sum(map(len, by_verdict.values())), count(len(analysis["seeds"]), "seed")
    if not total:
        return f"Only {analysis['baseline']} was run, with {seeds}: there is nothing to compare."
    start = f"{'In' if analysis['complete'] else 'So far, in'} {label}, with {seeds}"
    whole = f"any of {total} methods" if total > 1 else next(iter(by_verdict.values()))[0]
    if len(by_verdict.get("no evidence", [])) == total:
        text = f"{start}, there is no evidence that {whole} differs from the baseline."
    elif len(by_verdict.get("undecided", [])) == total:
        text = f"{start}, it cannot be decided whether {whole} differs from the baseline."
    else:
        text = f"{start}: {'; '.join(_clauses(by_verdict))}."
    return " ".join([text, *_divergences(analysis)])


def _clauses(by_verdict: dict[str, list[str]]) -> list[str]:
    clauses = []
    for verdict in ("better", "worse"):
        labels = by_verdict.get(verdict, [])
        if labels:
            clauses.append(f"{_list(labels)} {'is' if len(labels) == 1 else 'are'} {verdict} than the baseline")
    unknown = {"no evidence": "there is no evidence of a difference for", "undecided": "it cannot be decided for"}
    for verdict, words in unknown.items():
        labels = by_verdict.get(verdict, [])
        if labels:
            clauses.append(f"{words} {_list(labels) if len(labels) <= 2 else f'{len(labels)} methods'}")
    return clauses


def _divergences(analysis: dict) -> list[str]:
    counts = {method["label"]: len(method["runs"]["diverged"]) for method in analysis["methods"]}
    return [
        f"{label} diverged in {count} of {len(analysis['seeds'])} seeds." for label, count in counts.items() if count
    ]


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it belongs."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _list(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else ", ".join(labels[:-1]) + " and " + labels[-1]
