"""Numbers from anywhere: tables of runs, exports of other tools, and what is wrong with them, by row."""

import csv
import json

import pytest

from headwise.files.errors import StudyError
from headwise.reporting.numbers import study_of_numbers
from headwise.results.analysis import analyse

PLAIN = [0.80, 0.82, 0.79, 0.81, 0.83, 0.80, 0.78]
BETTER = [0.85, 0.86, 0.84, 0.85, 0.88, 0.84, 0.84]
OUTCOME = ["accuracy:higher"]


def rows_of(arm="arm", seed="seed", accuracy="accuracy", **more):
    found = []
    for label, values in (("plain", PLAIN), ("dropped", BETTER)):
        found += [{arm: label, seed: at, accuracy: value, **more} for at, value in enumerate(values)]
    return found


def table(path, rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def verdict(folder):
    found = analyse(folder).compared[0].differences["test/accuracy"]
    return found.by_seed, found.verdict, found.p_corrected


def test_a_table_is_judged_as_a_study_is(tmp_path):
    notes = study_of_numbers(table(tmp_path / "runs.csv", rows_of()), OUTCOME, "plain", tmp_path / "out")
    pairs, said, p = verdict(tmp_path / "out")
    assert said == "better" and p == pytest.approx(2 / 2**7) and not notes
    assert pairs == pytest.approx({str(at): b - a for at, (a, b) in enumerate(zip(PLAIN, BETTER))})


def jsonl(path):
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of()))
    return path


def of_wandb(path):
    """As its page wrote a table of runs in November 2025: every field in quotes, settings and then figures sorted."""
    found = []
    for at, row in enumerate(rows_of()):
        head = {"Name": f"run-{at}", "Agent": "", "State": "finished", "Notes": "-", "User": "", "Tags": ""}
        head |= {"Created": "2025-11-13T09:48:11.000Z", "Runtime": 9910 + at, "Sweep": ""}
        settings = {"arm": row["arm"], "lr": 0.1, "optim.name": "adamw", "seed": row["seed"]}
        # a figure that is the same in most runs is no setting
        found.append(head | settings | {"accuracy": row["accuracy"], "best_epoch": 4 if at == 2 else 5, "val/loss": at})
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, list(found[0]), quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(found)
    return path


def of_mlflow(path):
    rows = rows_of(
        arm="params.arm", seed="params.seed", accuracy="metrics.accuracy", status="FINISHED", experiment_id="1"
    )
    return table(
        path,
        [
            {"run_id": f"{at:x}" * 8, **row, "params.lr": "0.1", "artifact_uri": f"a/{at}"}
            for at, row in enumerate(rows)
        ],
    )


def of_trackio(path):
    """As pandas writes its metrics.parquet, arm and seed joined from configs.parquet: a row a step."""
    rows = []
    for at, row in enumerate(rows_of()):
        for step, value in ((0, 0.1), (10, row["accuracy"])):
            rows.append(
                {"timestamp": f"2026-01-01T00:{at:02}", "run_name": f"run-{at}", "step": step, **row, "accuracy": value}
            )
        rows[-1]["loss"] = 0.2
    return table(path, rows)


def of_trackio_by_its_query(path):
    """As `trackio query project --json` of trackio 0.43 prints metrics joined with configs."""
    rows = []
    for at, row in enumerate(rows_of()):
        when = f"2026-11-23T15:16:{at:02}.942084+00:00"
        config = {"arm": row["arm"], "seed": row["seed"], "lr": 0.1, "_Username": None, "_Created": when}
        for step, value in ((0, 0.1), (1, row["accuracy"])):
            metrics = json.dumps({"loss": 1.0, "accuracy": value})
            rows.append({"run_name": f"run-{at}", "step": step, "metrics": metrics, "config": json.dumps(config)})
    path = path.with_suffix(".json")
    path.write_text(json.dumps({"project": "p", "query": "SELECT", "columns": list(rows[0]), "rows": rows}, indent=2))
    return path


def of_wandb_by_its_recipe(path):
    """As the frame of `Api().runs` that its guide to exports builds: whole dicts, as Python writes them."""
    found = []
    for at, row in enumerate(rows_of()):
        summary = {"accuracy": row.pop("accuracy"), "_runtime": at, "_step": 9, "grad": float("nan")}
        found.append({"": at, "summary": str(summary), "config": str({**row, "lr": 0.1}), "name": f"run-{at}"})
    return table(path, found)


def of_mlflow_by_its_command(path):
    """As `mlflow experiments csv` of MLflow 3 wrote a file store of these runs, by two users on two machines."""
    rows = rows_of(arm="params.arm", seed="params.seed", accuracy="metrics.accuracy")
    more = {"tags.mlflow.source.type": "LOCAL", "tags.mlflow.source.name": "train.py", "status": "FINISHED"}
    times = {"start_time": "2026-11-23 12:34:28.579+00:00", "experiment_id": "830249794581424701"}
    return table(
        path,
        [
            {"run_id": f"{at:032x}", **times, **row, "params.lr": "0.1", **more}
            | {"tags.mlflow.user": "me" if at % 4 else "you", "tags.mlflow.runName": f"bold-{at}"}
            for at, row in enumerate(reversed(rows))
        ],
    )


def of_a_plot_of_trackio(path):
    """As the dashboard of trackio 0.43 downloads a plot: arm and seed stand in the run's name alone."""
    rows = []
    for at, row in enumerate(rows_of()):
        of_run = {"series_key": f"{at:032x}", "run": f"{row['arm']}-{row['seed']}"}
        rows += [{"step": step, "accuracy": value, **of_run} for step, value in ((0, 0.1), (1, row["accuracy"]))]
    return table(path, rows)


def of_bars_of_trackio(path):
    """As it downloads a plot of runs that logged a figure once."""
    return table(path, [{"run": f"{row['arm']}, seed {row['seed']}", "accuracy": row["accuracy"]} for row in rows_of()])


def of_a_spreadsheet(path):
    """As a spreadsheet writes it where numbers have commas."""
    lines = [";".join(map(str, row.values())).replace(".", ",") for row in rows_of()]
    path.write_text("\ufeff" + "\r\n".join(["arm;seed;accuracy", *lines]), encoding="utf-8")
    return path


def of_json(path):
    path = path.with_suffix(".json")
    path.write_text(json.dumps(rows_of()))
    return path


EXPORTS = [
    jsonl,
    of_json,
    of_wandb,
    of_wandb_by_its_recipe,
    of_mlflow,
    of_mlflow_by_its_command,
    of_trackio,
    of_trackio_by_its_query,
    of_a_plot_of_trackio,
    of_bars_of_trackio,
    of_a_spreadsheet,
]


def test_a_setting_of_wandbs_page_that_stands_out_is_told(tmp_path):
    path = of_wandb(tmp_path / "runs.csv")
    path.write_text(path.read_text().replace('"adamw","3"', '"sgd","3"', 1))
    with pytest.raises(StudyError, match=r"row 5 has optim.name sgd, and row 2 of the same arm plain has adamw"):
        study_of_numbers(path, OUTCOME, "plain", tmp_path / "out")


@pytest.mark.parametrize("make", EXPORTS)
def test_exports_give_the_verdict_of_the_plain_table(tmp_path, make):
    study_of_numbers(table(tmp_path / "plain.csv", rows_of()), OUTCOME, "plain", tmp_path / "one")
    study_of_numbers(make(tmp_path / "runs.csv"), OUTCOME, "plain", tmp_path / "other")
    assert verdict(tmp_path / "one") == verdict(tmp_path / "other")


def test_arms_and_seeds_of_names_are_told(tmp_path):
    notes = study_of_numbers(of_a_plot_of_trackio(tmp_path / "runs.csv"), OUTCOME, "plain", tmp_path / "out")
    assert notes == ["arms and seeds are taken from the names in run: plain-0 is plain, seed 0."]
    path = table(tmp_path / "other.csv", [{"run": "plain-0", "accuracy": 1}, {"run": "resnet18", "accuracy": 1}])
    with pytest.raises(StudyError, match="has no column arm"):
        study_of_numbers(path, OUTCOME, "plain", tmp_path / "other")


def test_runs_that_share_a_number_and_not_an_arm_are_several(tmp_path):
    rows = [{"run": row["seed"], "step": 100, **row} for row in rows_of()]
    study_of_numbers(table(tmp_path / "plain.csv", rows_of()), OUTCOME, "plain", tmp_path / "one")
    study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "other")
    assert verdict(tmp_path / "one") == verdict(tmp_path / "other")


def test_missing_pairs_are_told_by_row_and_left_out(tmp_path):
    rows = rows_of(status="finished")
    rows[2]["accuracy"] = "nan"
    rows[4]["status"] = "crashed"
    del rows[13]
    notes = study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "out")
    assert notes == [
        "row 4 (plain, seed 2) has no accuracy (finished): this seed makes no pair.",
        "row 6 (plain, seed 4) has no accuracy (crashed): this seed makes no pair.",
        "dropped has no row of seed 6: this seed makes no pair.",
    ]
    assert list(verdict(tmp_path / "out")[0]) == ["0", "1", "3", "5"]


def test_a_diverged_run_counts_as_one(tmp_path):
    rows = rows_of(status="finished")
    rows[0]["status"] = "diverged"
    study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "out")
    assert len(analyse(tmp_path / "out").arms[0].runs.diverged) == 1


def mixed(rows):
    for row in rows:
        row["lr"] = 0.1
    rows[3]["lr"] = 0.2
    return rows


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: [*rows, rows[3]], "rows 5 and 16 are both plain, seed 3. A pair needs one run of each arm"),
        (mixed, "row 5 has lr 0.2, and row 2 of the same arm plain has 0.1. One arm is one configuration"),
        (lambda rows: [{**rows[0], "seed": "one"}, *rows[1:]], "row 2 has 'one' for seed, which is not a whole number"),
        (lambda rows: [{**rows[0], "arm": ""}, *rows[1:]], "row 2 has no arm"),
        (
            lambda rows: [{**rows[0], "accuracy": "good"}, *rows[1:]],
            "row 2 has 'good' for accuracy, which is not a number",
        ),
        (
            lambda rows: [{"who": row["arm"], "seed": row["seed"], "accuracy": 1} for row in rows],
            "no column arm. Columns: who, seed, accuracy. .*--arm NAME",
        ),
        (lambda rows: [{**row, "accuracy": None, "acuracy": 1} for row in rows][:0], "contains no rows"),
    ],
)
def test_what_is_wrong_is_told_by_row(tmp_path, spoil, message):
    path = table(tmp_path / "runs.csv", spoil(rows_of()))
    with pytest.raises(StudyError, match=message):
        study_of_numbers(path, OUTCOME, "plain", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            '{"arm": "plain"}\n{"arm": "x", "acc',
            "line 2, is not valid JSON: unterminated string .*delete it if",
        ),
        ("a.json", "[]", "contains no rows"),
        ("a.json", '{"arm": "plain"}', r'contains no list of runs. Write \[{"arm": ..., "seed": ...}, ...\]'),
        ("a.json", '[{"arm": "plain"', "a.json is not valid JSON: Expecting"),
        (
            "a.csv",
            "arm,seed,accuracy\nplain,0,0,5\n",
            "row 2, has 4 fields and the heading 3. Put a field .* into quotes",
        ),
        (
            "a.csv",
            'config,seed\n{1: "b,0\n',
            "row 2: config is not a readable dict. Export its entries as columns",
        ),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_its_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(StudyError, match=message):
        study_of_numbers(tmp_path / name, OUTCOME, "plain", tmp_path / "out")
    with pytest.raises(StudyError, match=r"nowhere.csv does not exist in .*Give the path of a CSV or JSONL"):
        study_of_numbers(tmp_path / "nowhere.csv", OUTCOME, "plain", tmp_path / "out")


def test_a_baseline_or_an_outcome_that_is_not_there_is_told_with_those_that_are(tmp_path):
    path = table(tmp_path / "runs.csv", rows_of())
    with pytest.raises(StudyError, match=r"no arm 'plane'. Did you mean 'plain'. Arms: plain, dropped"):
        study_of_numbers(path, OUTCOME, "plane", tmp_path / "out")
    with pytest.raises(StudyError, match=r"--outcome acuracy: .*no such column. Did you mean 'accuracy'"):
        study_of_numbers(path, ["acuracy:higher"], "plain", tmp_path / "out")


def test_the_numbers_of_a_report_give_its_verdicts_again(tmp_path, capsys):
    from headwise.reporting.command import report_numbers

    page = report_numbers(table(tmp_path / "runs.csv", rows_of()), OUTCOME, "plain")
    assert page == tmp_path / "runs-report" / "report.html" and page.is_file() and "better" in capsys.readouterr().out
    study_of_numbers(page.with_name("runs.csv"), OUTCOME, "plain", tmp_path / "again")
    assert verdict(tmp_path / "again") == verdict(page.parent)


def test_the_folder_of_a_study_is_not_written_over(tmp_path):
    (tmp_path / "study.json").write_text('{"kind": "compare"}')
    with pytest.raises(StudyError, match=r"already contains another study. Choose another --out"):
        study_of_numbers(table(tmp_path / "runs.csv", rows_of()), OUTCOME, "plain", tmp_path)
