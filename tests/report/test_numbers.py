"""Numbers from anywhere: tables of runs, exports of other tools, and what is wrong with them, by row."""

import csv
import json
import re

import pytest
from report.synthetic_study import NINE, write_study
from typer.testing import CliRunner

from headwise.cli import app
from headwise_verdict.files.errors import StudyError
from headwise_verdict.reporting.numbers import study_of_numbers
from headwise_verdict.reporting.rebuild import rebuild
from headwise_verdict.results.analysis import analyse

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
    analysis = analyse(folder)
    found = analysis.compared[0].differences[analysis.primary]
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
        settings = {"arm": row["arm"], "bf16": "true", "lr": 0.1, "optim.name": "adamw", "output_dir": f"out/{at}"}
        settings |= {"seed": row["seed"], "warmup": 0}
        # a figure that is the same in most runs is no setting
        figures = {"accuracy": row["accuracy"], "best_epoch": 4 if at == 2 else 5, "early_stop": at == 3}
        figures |= {
            "gpu.0.memory": 71.5 + at % 2,
            "parameters": 124_439_808,
            "train/accuracy": 1.0 if at % 5 else 0.985,
        }
        found.append(head | settings | figures | {"val/loss": at})
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
            | {"start_time": f"2026-11-23 12:34:{at:02}.579000+00:00", "metrics.eval/loss": 0.5 if at % 5 else 0.4}
            | {"metrics.system/cpu_utilization_percentage": 40 + at % 3, "metrics.parameters": 124_439_808.0}
            | {"params.output_dir": f"out/{at}", "params.fp16": "True", "tags.mlflow.runName": f"bold-{at}"}
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
        config |= {"run_name": f"run-{at}", "amp": True, "model": {"width": 64}}
        for step, value in ((0, 0.1), (1, row["accuracy"])):
            metrics = json.dumps(
                {"loss": 1.0, "accuracy": value, "train/accuracy": 1.0 if at % 5 else 0.985, "lr": 0.1}
            )
            rows.append({"run_name": f"run-{at}", "step": step, "metrics": metrics, "config": json.dumps(config)})
    path = path.with_suffix(".json")
    path.write_text(json.dumps({"project": "p", "query": "SELECT", "columns": list(rows[0]), "rows": rows}, indent=2))
    return path


def of_wandb_by_its_recipe(path):
    """As the frame of `Api().runs` that its guide to exports builds: whole dicts, as Python writes them."""
    found = []
    for at, row in enumerate(rows_of()):
        summary = {"accuracy": row.pop("accuracy"), "_runtime": at, "_step": 9, "grad": float("nan")}
        summary |= {
            "_wandb": {"runtime": at},
            "eval/loss": 0.5 if at % 5 else 0.4,
            "best": {"epoch": at % 2},
            "ok": True,
        }
        config = {**row, "lr": 0.1, "optim": {"name": "adamw", "betas": [0.9, 0.95]}, "logging_dir": f"logs/{at}"}
        found.append({"": at, "summary": str(summary), "config": str(config), "name": f"run-{at}"})
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


def of_a_spreadsheet(path):
    """As a spreadsheet writes it where numbers have commas."""
    lines = [";".join(map(str, row.values())).replace(".", ",") for row in rows_of()]
    path.write_text("\ufeff" + "\r\n".join(["arm;seed;accuracy", *lines]), encoding="utf-8")
    return path


def of_optuna(path):
    """As the frame of trials of Optuna 5 writes it: a pruned trial has the last value that it reported."""
    rows = [
        {"number": at, "value": row["accuracy"], "datetime_start": f"2026-11-28 02:33:07.0{at:05}"}
        | {"datetime_complete": f"2026-11-28 02:33:09.0{at:05}", "duration": f"0 days 00:00:02.0{at:05}"}
        | {"params_arm": row["arm"], "params_lr": 0.1, "params_seed": row["seed"], "user_attrs_epochs": 3 + at % 2}
        | {"system_attrs_grid_id": at, "system_attrs_search_space": str({"arm": ["plain"]}), "state": "COMPLETE"}
        for at, row in enumerate(rows_of())
    ]
    rows.append(rows[-1] | {"number": 14, "value": 0.2, "params_seed": 7, "state": "PRUNED"})
    return table(path, rows)


def of_ray(path):
    """As the frame of results of Ray 2.60 writes it; `done` is false for trials that ended by themselves."""
    return table(
        path,
        [
            {"accuracy": row["accuracy"], "eval/loss": 0.4, "timestamp": 1795833200 + at, "checkpoint_dir_name": ""}
            | {"done": False, "training_iteration": 2, "trial_id": f"11fa2_{at:05}", "date": "2026-11-28_02-33-20"}
            | {"time_this_iter_s": 0.1 + at % 3, "pid": 10738 + at // 2, "hostname": "vm", "node_ip": "192.0.2.2"}
            | {"config/arm": row["arm"], "config/seed": row["seed"], "config/lr": 0.1, "logdir": f"11fa2_{at:05}"}
            for at, row in enumerate(rows_of())
        ],
    )


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
    of_a_spreadsheet,
    of_optuna,
    of_ray,
]


def test_a_setting_of_wandbs_page_that_stands_out_is_told(tmp_path):
    path = of_wandb(tmp_path / "runs.csv")
    path.write_text(path.read_text().replace('"adamw","out/3"', '"sgd","out/3"', 1))
    with pytest.raises(StudyError, match=r"row 5 has optim.name sgd, and row 2 of the same arm plain has adamw"):
        study_of_numbers(path, OUTCOME, "plain", tmp_path / "out", settings=["optim.name"])
    # the page marks no settings
    (note,) = study_of_numbers(path, OUTCOME, "plain", tmp_path / "out")
    assert note.startswith("rows of one arm differ in ") and "optim.name" in note


def with_rates(rows):
    rows = [{**row, "lr": 0.1, "width": "64"} for row in rows]
    rows[3]["lr"] = 0.2
    return rows


@pytest.mark.parametrize("settings", [["lr"], ["width", "lr"]])
def test_rows_of_one_arm_agree_in_the_settings_that_are_declared(tmp_path, settings):
    path = table(tmp_path / "runs.csv", with_rates(rows_of()))
    with pytest.raises(StudyError, match=r"row 5 has lr 0.2, and row 2 of the same arm plain has 0.1. One arm is one"):
        study_of_numbers(path, OUTCOME, "plain", tmp_path / "out", settings=settings)
    assert not study_of_numbers(path, OUTCOME, "plain", tmp_path / "out", settings=["width"])
    with pytest.raises(StudyError, match=r"--settings widht: .* has no such column. Did you mean 'width'"):
        study_of_numbers(path, OUTCOME, "plain", tmp_path / "out", settings=["widht"])


@pytest.mark.parametrize("options", [["--settings", "width,lr"], ["--settings", "width", "--settings", " lr "]])
def test_settings_are_declared_on_the_command_line(tmp_path, options):
    path = table(tmp_path / "runs.csv", with_rates(rows_of()))
    result = CliRunner().invoke(app, ["report", str(path), "--outcome", OUTCOME[0], "--baseline", "plain", *options])
    assert isinstance(result.exception, StudyError) and "row 5 has lr 0.2, and row 2 of" in str(result.exception)
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--settings", "lr"])
    assert "--settings and --out are for tables" in str(result.exception)


def test_a_column_that_may_be_a_setting_is_asked_for(tmp_path):
    path = table(tmp_path / "runs.csv", with_rates(rows_of()))
    assert study_of_numbers(path, OUTCOME, "plain", tmp_path / "out") == [
        "rows of one arm differ in lr. If one is a setting, name it and it is checked: --settings lr."
    ]


@pytest.mark.parametrize("prefix", ["params.", "config.", "config/"])
def test_a_format_that_has_settings_is_believed_and_a_declaration_comes_first(tmp_path, prefix):
    rows = [
        {f"{prefix}{name}": value for name, value in row.items() if name != "accuracy"} for row in with_rates(rows_of())
    ]
    rows = [
        {**row, f"{prefix}output_dir": f"runs/{at}", "accuracy": 0.5, "best_epoch": at // 4}
        for at, row in enumerate(rows)
    ]
    path = table(tmp_path / "runs.csv", rows)
    with pytest.raises(StudyError, match=f"row 5 has {prefix}lr 0.2, and row 2 of the same arm plain has 0.1"):
        study_of_numbers(path, OUTCOME, "plain", tmp_path / "out")
    assert not study_of_numbers(path, OUTCOME, "plain", tmp_path / "out", settings=["width"])


def test_equal_numbers_are_one_setting_however_written(tmp_path):
    rows = [
        {**row, "lr": ("0.10", "1e-1", ".1")[at % 3], "width": ("64", "64.0")[at % 2]}
        for at, row in enumerate(rows_of())
    ]
    path = table(tmp_path / "runs.csv", rows)
    assert not study_of_numbers(path, OUTCOME, "plain", tmp_path / "out", settings=["lr", "width"])


@pytest.mark.parametrize("make", EXPORTS)
def test_exports_give_the_verdict_of_the_plain_table(tmp_path, make):
    study_of_numbers(table(tmp_path / "plain.csv", rows_of()), OUTCOME, "plain", tmp_path / "one")
    outcome = ["value:higher"] if make is of_optuna else OUTCOME
    study_of_numbers(make(tmp_path / "runs.csv"), outcome, "plain", tmp_path / "other")
    assert verdict(tmp_path / "one") == verdict(tmp_path / "other")


def test_arms_and_seeds_are_not_guessed_from_names(tmp_path):
    path = table(tmp_path / "runs.csv", [{"run": "plain-0", "accuracy": 1}, {"run": "dropped-0", "accuracy": 1}])
    with pytest.raises(StudyError, match=r"has no column 'arm'. Name it by --arm. Columns: run, accuracy"):
        study_of_numbers(path, OUTCOME, "plain", tmp_path / "out")
    with pytest.raises(StudyError, match=r"has no column 'seed'. Name it by --seed-column. Columns: run, accuracy"):
        study_of_numbers(path, OUTCOME, "plain", tmp_path / "out", arm="run")


def test_runs_that_share_a_number_and_not_an_arm_are_several(tmp_path):
    rows = [{"run": row["seed"], "step": 100, **row} for row in rows_of()]
    study_of_numbers(table(tmp_path / "plain.csv", rows_of()), OUTCOME, "plain", tmp_path / "one")
    study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "other")
    assert verdict(tmp_path / "one") == verdict(tmp_path / "other")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """headwise's own runs.csv, of runs whose figures and costs repeat as those of small data and quick steps do."""
    folder = write_study(tmp_path_factory.mktemp("own") / "study", methods=NINE[:3], seeds=8, heads=True)
    for at, path in enumerate(sorted(folder.glob("runs/*/result.json"))):
        result = json.loads(path.read_text())
        result["metrics"] |= {"train/accuracy": 0.985 if at % 8 == 2 else 1.0, "heads/dead/worst": float(at % 5 == 0)}
        result["metrics"] |= {"cost/seconds_per_step": 0.01, "cost/parameters": 210_000 + (at % 7 == 0)}
        path.write_text(json.dumps(result))
    rebuild(folder)
    return folder


@pytest.mark.parametrize(
    "name", ["accuracy:higher:%", "test/accuracy:higher:%", "test/loss:lower:nats", "loss:lower:nats"]
)
def test_the_table_of_a_study_gives_its_verdicts(own, tmp_path, name):
    assert not study_of_numbers(own / "runs.csv", [name], "baseline", tmp_path / "out")
    again, stored = analyse(tmp_path / "out"), f"test/{name.partition(':')[0].removeprefix('test/')}"
    assert again.primary == stored
    for one, other in zip(analyse(own).compared, again.compared, strict=True):
        assert one.differences[stored] == other.differences[stored]


def test_every_column_of_the_table_of_a_study_can_be_an_outcome(own, tmp_path):
    with open(own / "runs.csv", newline="") as stream:
        names = next(csv.reader(stream))[5:]
    assert {"train/accuracy", "gap/loss", "cost/parameters", "heads/token_cosine/layer 3"} <= set(names)
    study_of_numbers(own / "runs.csv", [f"{name}:lower" for name in names], "baseline", tmp_path / "out")
    again = analyse(tmp_path / "out")
    assert set(again.outcomes) == set(names) and all(one.higher_is_better is False for one in again.outcomes.values())
    assert rebuild(tmp_path / "out").is_file()


HUGE = 2**64 - 1


@pytest.mark.parametrize("form", ["csv", "jsonl", "json", "decimals"])
@pytest.mark.parametrize("first", [2**53, HUGE - 6, 10**40, -(2**60)])
def test_seeds_are_whole_numbers_of_any_size(tmp_path, form, first):
    rows = [{**row, "seed": first + row["seed"]} for row in rows_of()]
    path = tmp_path / "runs.csv"
    if form == "csv":
        table(path, rows)
    elif form == "decimals":
        table(path, [{**row, "seed": f"{row['seed']}.0"} for row in rows])
    else:
        path = path.with_suffix(f".{form}")
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) if form == "jsonl" else f"[{','.join(lines)}]")
    study_of_numbers(path, OUTCOME, "plain", tmp_path / "out")
    pairs, said, _ = verdict(tmp_path / "out")
    assert list(pairs) == [str(first + at) for at in range(7)] and said == "better"
    assert rebuild(tmp_path / "out").is_file()


def test_seeds_that_differ_in_their_last_digit_make_no_pair(tmp_path):
    rows = [{**row, "seed": 2**53 + 4 * row["seed"] + (row["arm"] != "plain")} for row in rows_of()]
    notes = study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "out")
    assert len(notes) == 14 and not verdict(tmp_path / "out")[0]


@pytest.mark.parametrize(
    "seed", ["1_0", "1.5", "1e-1", "1.8446744073709552e+19", "٣", "0x1", "1e999", "nan", "", "9" * 5000]
)
def test_a_seed_that_is_no_whole_number_or_was_rounded_is_told(tmp_path, seed):
    rows = rows_of()
    rows[0]["seed"] = seed
    with pytest.raises(StudyError, match=r"row 2 has .* for seed, which is not a whole number"):
        study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "out")


@pytest.mark.parametrize("seed", [1.8446744073709552e19, True, None, [1], 1.5])
def test_a_seed_of_json_is_read_as_strictly(tmp_path, seed):
    (tmp_path / "runs.json").write_text(json.dumps([{"arm": "plain", "seed": seed, "accuracy": 1}]))
    with pytest.raises(StudyError, match=r"row 1 has .* for seed, which is not a whole number"):
        study_of_numbers(tmp_path / "runs.json", OUTCOME, "plain", tmp_path / "out")


ENDS = ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_line_ends_at_a_line_feed_alone(tmp_path, end, newline, form):
    rows = [{"note": f"a{end}b", **row} for row in rows_of()]
    path = tmp_path / f"runs.{form}"
    if form == "jsonl":
        lines = [json.dumps(row, ensure_ascii=end < " ") for row in rows]
    else:
        lines = ["note,arm,seed,accuracy", *(",".join(map(str, row.values())) for row in rows)]
    path.write_bytes(newline.join([*lines, ""]).encode())
    assert not study_of_numbers(path, OUTCOME, "plain", tmp_path / "out") and len(verdict(tmp_path / "out")[0]) == 7
    path.write_bytes(newline.join([*lines, lines[-1]]).encode())
    row = 14 + (form == "csv")
    with pytest.raises(StudyError, match=f"rows {row} and {row + 1} are both dropped, seed 6"):
        study_of_numbers(path, OUTCOME, "plain", tmp_path / "out")


@pytest.mark.parametrize("value", ["1_0", "٣", "0x1", "1,5", "1e", "--1", "1 0", "85%", "True", "1e999", "½", "𝟏"])
def test_a_figure_is_a_number_as_csv_and_json_write_it(tmp_path, value):
    rows = rows_of()
    rows[2]["accuracy"] = value
    with pytest.raises(StudyError, match=re.escape(f"row 4 has {value!r} for accuracy, which is not a number")):
        study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "out")


@pytest.mark.parametrize("value", [True, [0.5], 10**400])
def test_a_figure_of_json_is_a_number(tmp_path, value):
    (tmp_path / "runs.json").write_text(json.dumps([{**row, "accuracy": value} for row in rows_of()]))
    with pytest.raises(StudyError, match=r"row 1 has .* for accuracy, which is not a number"):
        study_of_numbers(tmp_path / "runs.json", OUTCOME, "plain", tmp_path / "out")


@pytest.mark.parametrize("value", ["", "NaN", "nan", "None", "null", "NA", "N/A", "<NA>"])
def test_a_cell_without_a_figure_makes_no_pair(tmp_path, value):
    rows = rows_of()
    rows[2]["accuracy"] = value
    notes = study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "out")
    assert notes == ["row 4 (plain, seed 2) has no accuracy: this seed makes no pair."]


@pytest.mark.parametrize("value", ["inf", "-Infinity"])
def test_an_infinite_figure_is_noted_as_what_a_diverged_run_leaves(tmp_path, value):
    rows = rows_of()
    rows[2]["accuracy"] = value
    (note,) = study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "out")
    assert note.startswith(
        "row 4 (plain, seed 2) has an infinite accuracy: this seed makes no pair. If the run diverged"
    )


def test_numbers_may_have_signs_exponents_and_blanks(tmp_path):
    rows = [{**row, "accuracy": f"  +{row['accuracy'] * 100:.6f}e-2 "} for row in rows_of()]
    study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "out")
    study_of_numbers(table(tmp_path / "plain.csv", rows_of()), OUTCOME, "plain", tmp_path / "plain")
    assert verdict(tmp_path / "out") == verdict(tmp_path / "plain")


def test_shares_are_at_most_1(tmp_path):
    rows = [{**row, "accuracy": round(100 * row["accuracy"], 4)} for row in rows_of()]
    path = table(tmp_path / "runs.csv", rows)
    message = "row 2 has 80.0 for accuracy, whose unit % is for shares in [0, 1]"
    with pytest.raises(StudyError, match=re.escape(message) + ".*--outcome accuracy:higher:percent"):
        study_of_numbers(path, ["accuracy:higher:%"], "plain", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    study_of_numbers(path, ["accuracy:higher:percent"], "plain", tmp_path / "out")
    page = rebuild(tmp_path / "out").with_name("table.md").read_text()
    assert "| `plain` | 80.43 [78.84, 82.02]" in page and "+4.71 [+4.00, +5.50]" in page and "(points)" in page


def test_percents_of_a_study_that_declares_shares_are_shown_as_percents(tmp_path):
    folder = write_study(tmp_path / "study", methods=NINE[:2], seeds=6)
    for path in folder.glob("runs/*/result.json"):
        result = json.loads(path.read_text())
        result["metrics"] = {name: 100 * one if "accuracy" in name else one for name, one in result["metrics"].items()}
        path.write_text(json.dumps(result))
    page, analysis = rebuild(folder).read_text(), analyse(folder)
    accuracy = analysis.arms[0].metrics["test/accuracy"].mean
    assert 50 < accuracy < 100 and f"{accuracy:.2f}" in page and not re.search(r"\d,\d{3}\.\d\d", page)
    assert any("The unit of test accuracy is %, which is for shares in [0, 1]" in one for one in analysis.warnings)


NAMES = ["eval/loss", "val/acc", "a/b/c", "val acc (top-1)", "f1:macro", "perplexité", "rates/x", "acc@5", "cost/loss"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefix", ["", "metrics.", "summary."])
def test_the_name_of_an_outcome_is_any_text(tmp_path, name, prefix):
    path = table(tmp_path / "runs.csv", rows_of(accuracy=f"{prefix}{name}"))
    assert not study_of_numbers(path, [f"{name}:higher:points"], "plain", tmp_path / "out")
    analysis = analyse(tmp_path / "out")
    assert analysis.metric.label.endswith(name) and analysis.metric.unit == "points"
    assert verdict(tmp_path / "out")[1] == "better" and rebuild(tmp_path / "out").is_file()


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        (
            ["accuracy:higher", "accuracy:lower"],
            "--outcome accuracy is given twice, as higher and as lower. Give it once",
        ),
        (["accuracy:higher", "accuracy:higher"], "--outcome accuracy is given twice. Give it once"),
        (["accuracy:higher", " accuracy :lower"], "--outcome accuracy is given twice, as higher and as lower"),
        (
            ["accuracy:higher", "test/accuracy:lower"],
            "--outcome accuracy and --outcome test/accuracy are both test/acc",
        ),
        (
            ["loss:lower", "metrics.loss:higher"],
            "--outcome loss and --outcome metrics.loss are both metrics.loss. Give",
        ),
        ([":higher"], "':higher' does not say which direction is good"),
        (["accuracy:up"], "'accuracy:up' does not say which direction is good"),
    ],
)
def test_an_outcome_has_one_direction(tmp_path, outcomes, message):
    rows = [{**row, "test/accuracy": 0.5, "metrics.loss": 0.1} for row in rows_of()]
    with pytest.raises(StudyError, match=re.escape(message)):
        study_of_numbers(table(tmp_path / "runs.csv", rows), outcomes, "plain", tmp_path / "out")


# the note on tables with a run that did not finish
COUNTS = (
    "a run counts as finished if its state is finished, complete, completed, succeeded, success, successful, done, "
    "passed, published or cd."
)


def test_missing_pairs_are_told_by_row_and_left_out(tmp_path):
    rows = rows_of(status="finished")
    rows[2]["accuracy"] = "nan"
    rows[4]["status"] = "crashed"
    del rows[13]
    notes = study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "out")
    assert notes == [
        "row 4 (plain, seed 2) has no accuracy (finished): this seed makes no pair.",
        "row 6 (plain, seed 4) is not finished (crashed): this seed makes no pair.",
        "dropped has no row of seed 6: this seed makes no pair.",
        COUNTS,
    ]
    assert list(verdict(tmp_path / "out")[0]) == ["0", "1", "3", "5"]


def test_what_a_table_does_not_hold_has_no_column(tmp_path):
    study_of_numbers(table(tmp_path / "runs.csv", rows_of()), OUTCOME, "plain", tmp_path / "out")
    page = rebuild(tmp_path / "out").read_text()
    assert ">memory<" not in page and ">time per step<" not in page
    assert "| verdict | runs |" in (tmp_path / "out" / "table.md").read_text()
    assert "missing" not in (tmp_path / "out" / "table.tex").read_text()


def test_a_diverged_run_counts_as_one(tmp_path):
    rows = rows_of(status="finished")
    rows[0]["status"] = "diverged"
    study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "out")
    assert len(analyse(tmp_path / "out").arms[0].runs.diverged) == 1


# what tools write for a run that ended as it should, and for others
STATES = {
    "optuna": ("state", "COMPLETE", ["PRUNED", "FAIL", "RUNNING", "WAITING", "TrialState.PRUNED"]),
    "ray": ("status", "TERMINATED", ["ERROR", "PENDING", "RUNNING", "PAUSED"]),
    "slurm": (
        "State",
        "COMPLETED",
        "CANCELLED TIMEOUT OUT_OF_MEMORY NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE FAILED PENDING RUNNING REQUEUED "
        "SUSPENDED REVOKED COMPLETING OUT_OF_ME+ CANCELLED+".split()
        + ["CANCELLED by 1000"],
    ),
    "wandb": ("State", "finished", ["crashed", "failed", "killed", "running", "pending", "preempting", "preempted"]),
    "mlflow": ("status", "FINISHED", ["FAILED", "KILLED", "RUNNING", "SCHEDULED"]),
    "lightning": ("status", "TrainerStatus.FINISHED", ["interrupted", "running", "initializing", "Stopped"]),
    "kubernetes": (
        "status.phase",
        "Succeeded",
        ["Failed", "Pending", "Unknown", "OOMKilled", "Evicted", "Error", "CrashLoopBackOff", "Init:Error"],
    ),
    "exit codes": ("ExitCode", "0:0", ["1:0", "0:9", "137"]),
    "flags": ("failed", "False", ["True"]),
    "headwise": ("status", "finished", ["unfinished", "damaged"]),
}
UNFINISHED = [(column, good, bad) for column, good, states in STATES.values() for bad in states]


def with_states(path, column, good, bad):
    """The first three runs of the second arm ended badly, with a figure that would decide against it."""
    rows = [{**row, column: good} for row in rows_of()]
    for row in rows[7:10]:
        row |= {"accuracy": 0.1, column: bad}
    return table(path, rows)


@pytest.mark.parametrize(("column", "good", "bad"), UNFINISHED)
def test_a_run_that_did_not_finish_has_no_figures(tmp_path, column, good, bad):
    path = with_states(tmp_path / "runs.csv", column, good, bad)
    *notes, last = study_of_numbers(path, OUTCOME, "plain", tmp_path / "out")
    assert list(verdict(tmp_path / "out")[0]) == ["3", "4", "5", "6"] and last == COUNTS
    said = [f"row {9 + at} (dropped, seed {at}) is not finished" for at in range(3)]
    assert [note[: len(words)] for note, words in zip(notes, said, strict=True)] == said


@pytest.mark.parametrize("state", ["Terminated", "finishing", "not finished", "12", "true", ""])
def test_an_unknown_state_is_told_and_not_believed(tmp_path, state):
    path = with_states(tmp_path / "runs.csv", "status", "finished", state)
    *gaps, note = study_of_numbers(path, OUTCOME, "plain", tmp_path / "out")
    assert list(verdict(tmp_path / "out")[0]) == ["3", "4", "5", "6"] and note == COUNTS
    said = f"is not finished ({state or 'empty'}): this seed makes no pair."
    assert gaps == [f"row {9 + at} (dropped, seed {at}) {said}" for at in range(3)]
    path = table(tmp_path / "none.csv", rows_of(status=state or "done?"))
    with pytest.raises(StudyError, match=r"has no finished run; its states are .* Write finished for runs that"):
        study_of_numbers(path, OUTCOME, "plain", tmp_path / "none")


def test_rows_without_a_state_count_where_only_failures_have_one(tmp_path):
    path = with_states(tmp_path / "runs.csv", "status", "", "failed")
    study_of_numbers(path, OUTCOME, "plain", tmp_path / "out")
    assert list(verdict(tmp_path / "out")[0]) == ["3", "4", "5", "6"]


@pytest.mark.parametrize("column", ["config.status", "params.state", "metrics.status", "train_status_count", "done"])
def test_settings_and_figures_are_no_states(tmp_path, column):
    rows = [{**row, column: "False"} for row in rows_of()]
    assert not study_of_numbers(table(tmp_path / "runs.csv", rows), OUTCOME, "plain", tmp_path / "out")
    assert len(verdict(tmp_path / "out")[0]) == 7


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: [*rows, rows[3]], "rows 5 and 16 are both plain, seed 3. A pair needs one run of each arm"),
        (lambda rows: [{**rows[0], "seed": "one"}, *rows[1:]], "row 2 has 'one' for seed, which is not a whole number"),
        (lambda rows: [{**rows[0], "arm": ""}, *rows[1:]], "row 2 has no arm"),
        (
            lambda rows: [{**rows[0], "accuracy": "good"}, *rows[1:]],
            "row 2 has 'good' for accuracy, which is not a number",
        ),
        (
            lambda rows: [{"who": row["arm"], "seed": row["seed"], "accuracy": 1} for row in rows],
            "no column 'arm'. Name it by --arm. Columns: who, seed, accuracy",
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
            "row 2, has 4 fields, and the heading has 3. Put a field .* into quotes",
        ),
        ("a.csv", 'config,seed\n{1: "b,0\n', "row 2: config is not a readable dict. Export its entries as columns"),
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
    from headwise_verdict.reporting.command import report_numbers

    page = report_numbers(table(tmp_path / "runs.csv", rows_of()), OUTCOME, "plain")
    assert page == tmp_path / "runs-report" / "report.html" and page.is_file() and "better" in capsys.readouterr().out
    study_of_numbers(page.with_name("runs.csv"), OUTCOME, "plain", tmp_path / "again")
    assert verdict(tmp_path / "again") == verdict(page.parent)


def test_the_folder_of_a_study_is_not_written_over(tmp_path):
    (tmp_path / "study.json").write_text('{"kind": "compare"}')
    with pytest.raises(StudyError, match=r"already contains another study. Choose another --out"):
        study_of_numbers(table(tmp_path / "runs.csv", rows_of()), OUTCOME, "plain", tmp_path)


def test_an_edited_direction_of_a_table_is_not_believed(tmp_path):
    study_of_numbers(table(tmp_path / "runs.csv", rows_of()), OUTCOME, "plain", tmp_path / "out")
    path = tmp_path / "out" / "study.json"
    path.write_text(path.read_text().replace('"higher_is_better": true', '"higher_is_better": false'))
    with pytest.raises(ValueError, match=r"directions, units, margin, .* are not those of its runs"):
        analyse(tmp_path / "out")
