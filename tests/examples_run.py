"""Run the examples of the public names' docstrings: `python tests/examples_run.py`; tests/test_examples.py starts it in
a separate process.

Examples define methods, which remain in the registry of their process.
"""

from __future__ import annotations

import doctest
import importlib
import sys

MODULES = ("headwise", "headwise.study", "headwise.report", "headwise.testing")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public() -> dict[str, object]:
    """Return every public name except the methods, whose pages have the examples."""
    from headwise.attend import methods

    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for one in sorted({*module.__all__, *(dir(module) if name == "headwise" else ())}):
            if one not in methods.__all__ and not one.startswith("_"):
                found[f"{name}.{one}"] = getattr(module, one)
    return found


def main() -> int:
    """Run all examples; return 1 if a name has none or one fails."""
    runner, finder = doctest.DocTestRunner(optionflags=FLAGS), doctest.DocTestParser()
    wrong = []
    for name, found in public().items():
        test = finder.get_doctest(found.__doc__ or "", {"__name__": "__main__"}, name, None, None)
        if not test.examples:
            wrong.append(name)
        runner.run(test)
    print(f"{runner.summarize(verbose=False).attempted} examples; without one: {', '.join(wrong) or 'none'}")
    return 1 if wrong or runner.failures else 0


if __name__ == "__main__":
    sys.exit(main())
