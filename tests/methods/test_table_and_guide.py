import re
from pathlib import Path

import pytest

from headwise.attend import methods
from headwise.attend.core import method

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def table(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(DOCS)
    import methods_table

    monkeypatch.setattr(methods_table, "PAGE", tmp_path / "methods.md")
    return methods_table


def test_the_table_has_a_row_for_every_method(table):
    rows = [line for line in table.table().splitlines() if line.startswith("| `")]
    assert sorted(re.match(r"\| `(\w+)\(", row).group(1) for row in rows) == sorted(methods.__all__)
    for row in rows:
        cells = re.split(r"(?<!\\)\|", row)[1:-1]
        assert len(cells) == 3 and all(cell.strip() for cell in cells)


def test_a_method_without_a_family_is_named(table, monkeypatch):
    monkeypatch.setattr(table.methods, "__all__", [*methods.__all__, "Unheard"])
    with pytest.raises(ValueError, match=r"Unheard: docs/site/methods\.toml names no family"):
        table.families()


def test_the_table_tells_what_runs_without_the_matrix(table):
    told = {name: table.matrix_free(method.REGISTRY[name]) for name in methods.__all__}
    assert told["SoftCap"] == told["StableSoftmax"] == "on CUDA"
    assert told["Decorrelation"] == "with other settings"
    assert told["DropKey"] == told["AttentionDropout"] == "yes"
    assert {told[name] for name in ("DropAttention", "RelaxedAttention", "EntropyPenalty", "NeuTRENO")} == {"yes"}


def test_check_sees_a_table_that_is_out_of_date(table, capsys):
    table.PAGE.write_text(f"# Title\n{table.BEGIN}\nstale text\n{table.END}\nrest\n", encoding="utf-8")
    assert table.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert table.main([]) == 0
    assert table.main(["--check"]) == 0
    text = table.PAGE.read_text(encoding="utf-8")
    assert text.startswith("# Title\n") and text.endswith("rest\n") and "stale text" not in text


def test_a_page_without_a_place_for_the_table_is_refused(table, capsys):
    table.PAGE.write_text("# Title\n", encoding="utf-8")
    assert table.main([]) == 1
    assert "no place for the tables of methods" in capsys.readouterr().err


@pytest.fixture
def contract(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import method_contract

    return method_contract


def test_every_class_variable_stage_and_hook_is_explained(contract):
    declared = {name for name, kind in method.Method.__annotations__.items() if "ClassVar" in str(kind)}
    assert {*contract.class_variables()} == declared
    assert {*contract.stages()} >= {
        *method.STAGES,
        *method.CALL_STAGES,
        *(t for ts in method.TWINS.values() for t in ts),
    }
    for name, (code, said) in {**contract.class_variables(), **contract.stages(), **contract.hooks()}.items():
        assert code
        assert len(said.split()) >= 10, f"{name} is not explained in core/method.py"


def test_the_guide_shows_what_the_class_says(contract, monkeypatch, tmp_path, capsys):
    assert contract.main(["--check"]) == 0
    stale = tmp_path / "own_method.md"
    stale.write_text(f"# Title\n{contract.BEGIN}\nstale\n{contract.END}\nrest\n", encoding="utf-8")
    monkeypatch.setattr(contract, "GUIDE", stale)
    assert contract.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert contract.main([]) == 0
    assert contract.main(["--check"]) == 0
    text = stale.read_text(encoding="utf-8")
    assert (
        "`rowwise = False`" in text
        and "`weights(a, call)`" in text
        and "`at(name, step, site)`" in text
        and "stale" not in text
    )
    assert text.startswith("# Title\n") and text.endswith("rest\n")
