"""A study from Python: the numbers of the command line, as a table, a plot, verdicts and a page."""

import re

import pytest
from small_studies import PLACE
from test_script import ARM, COMMAND, source  # noqa: F401

import headwise
from headwise.lab.studies.digits import Digits
from headwise.lab.studies.from_python import _kind_and_name, _settings, _text
from headwise_verdict.files.errors import StudyError


def test_a_script_gives_a_table_a_plot_verdicts_and_a_page(tmp_path):
    result = headwise.compare(COMMAND, methods=[ARM], seeds=6, outcome="accuracy:higher", out=tmp_path, silent=True)
    assert result.verdicts == {ARM: "better"} and ARM in result.answer
    table = result.table()
    row = table[(table.arm == ARM) & (table.outcome == "test/accuracy")].iloc[0]
    assert row.difference == pytest.approx(0.2) and row.pairs == 6 and row.verdict == "better"
    assert result.plot().to_dict()["$schema"] and result.report.path == tmp_path / "report.html"
    assert result.report._repr_html_().startswith("<iframe srcdoc=")
    with pytest.raises(ValueError, match=r"the report has no figure 'nothing'. Figures: "):
        result.plot("nothing")


def test_what_is_compared_is_told_by_what_it_is():
    assert _kind_and_name("digits") == {"study": "digits"} and _kind_and_name("python train.py") == {
        "script": "python train.py"
    }
    assert _kind_and_name("my.py:Mine") == {"task": "my.py:Mine"} and _kind_and_name(Digits) == {
        "task": "headwise.lab.studies.digits:Digits"
    }
    assert _settings(Digits(epochs=2, learning_rate=0.01)) == ["epochs=2", "learning_rate=0.01"]
    assert _text((headwise.DropHead(p=0.2), headwise.LSA())) == "DropHead(p=0.2) + LSA(diagonal=True)"


def test_a_task_that_stands_in_no_file_is_refused():
    kind = type("Mine", (Digits,), {"__module__": "__main__", "__annotations__": {}})
    with pytest.raises(StudyError, match=r"Mine is not defined in a file|defined inside"):
        _kind_and_name(kind)


def test_a_task_gives_the_numbers_of_the_command(tmp_path):
    result = headwise.compare(f"{PLACE}:Tiny", methods=[headwise.DropHead(p=0.3)], seeds=1, out=tmp_path, silent=True)
    assert result.verdicts == {"DropHead(p=0.3)": "undecided"} and len(result.table()) > 2


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"seeds": 0}, "seeds=0 is not a whole number of at least 1"),
        ({"seeds": -3}, "seeds=-3 is not a whole number of at least 1"),
        ({"seeds": 2.5}, "seeds=2.5 is not a whole number"),
        ({"seeds": True}, "seeds=True is not a whole number"),
        ({"seeds": "6"}, "seeds='6' is not a whole number"),
        ({"trials": -1}, "trials=-1 is not a whole number of at least 0"),
        ({"trials": None}, "trials=None is not a whole number"),
        ({"jobs": 0}, "jobs=0 is not a whole number of at least 1"),
        ({"timeout": 0.0}, "--timeout 0: give seconds above 0"),
        ({"timeout": float("nan")}, "--timeout nan: give seconds above 0"),
        ({"timeout": "1"}, "timeout='1' is not a number. Give seconds above 0"),
    ],
)
@pytest.mark.parametrize("subject", ["digits", COMMAND])
def test_numbers_that_mean_nothing_are_refused(tmp_path, subject, numbers, message):
    outcome = "accuracy:higher" if subject is COMMAND else ()
    with pytest.raises(StudyError, match=re.escape(message)):
        headwise.compare(subject, outcome=outcome, out=tmp_path / "out", silent=True, **numbers)
    assert not (tmp_path / "out").exists()


def test_a_study_of_a_file_is_compared_by_its_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from headwise.lab.studies.digits import Digits\n"
        "from headwise.study import Study\n"
        "task = Digits(epochs=1, train_size=50, test_size=50)\n"
        "mine = Study(name='own', title='Own', question='?', task=task,\n"
        "    task_place='headwise.lab.studies.digits:Digits', methods=('DropHead(p=0.2)',), seeds=1, margin=0.02)\n"
    )
    result = headwise.compare(f"{tmp_path / 'mine.py'}:mine", out=tmp_path / "out", silent=True)
    assert result.verdicts == {"DropHead(p=0.2)": "undecided"} and result.analysis.margin == 0.02
