"""The JSON of `headwise audit` and `headwise alarms` is what their shipped schemas describe."""

import json
import math
from importlib import resources

import jsonschema
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

import headwise
from headwise.health.auditing.log_alarms import AlarmsContent
from headwise.health.auditing.records import AuditContent

SHIPPED = {
    "headwise.audit/1": (AuditContent, resources.files("headwise.health.auditing") / "audit.schema.json"),
    "headwise.alarms/1": (AlarmsContent, resources.files("headwise.health.auditing") / "alarms.schema.json"),
}


def described(name):
    """Return the JSON Schema of a content, in which every number that is not whole may be null."""

    def nullable(part):
        if isinstance(part, dict):
            number = {"type": ["number", "null"]} if part.get("type") == "number" else {}
            return {key: nullable(value) for key, value in part.items()} | number
        return [nullable(one) for one in part] if isinstance(part, list) else part

    made = nullable(TypeAdapter(SHIPPED[name][0]).json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": name, **made}


def check(answer):
    """Return what a validator of the shipped schema finds, after seeing that it would find something."""
    schema = json.loads(SHIPPED[answer["schema"]][1].read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    assert list(validator.iter_errors(answer | {"notes": "none"}))
    # all fields are described
    assert set(answer) == set(schema["properties"]) == set(schema["required"])
    return list(validator.iter_errors(answer))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_schema_is_that_of_the_content(name):
    kept = json.loads(SHIPPED[name][1].read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(kept)
    assert kept == described(name), f"write described({name!r}) into {SHIPPED[name][1]}"


def test_an_audit_is_what_its_schema_describes(tmp_path):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    with torch.no_grad():
        model.self_attn.in_proj_weight[32:40] = 0  # the values of head 0
    torch.save(model, tmp_path / "model.pt")
    (tmp_path / "built.py").write_text(
        f"import torch\ndef build():\n    return torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
    )
    answer = json.loads(headwise.audit(f"{tmp_path / 'built.py'}:build").to_json())
    assert answer["schema"] == "headwise.audit/1" and check(answer) == [] and answer["alerts"]
    # a figure that is not finite is null, which the schema allows
    first = next(iter(answer["figures"]))
    answer["figures"][first]["values"] = {"layer": [None, 0.5]}
    assert check(answer) == []


def test_alarms_are_what_their_schema_describes(tmp_path):
    log = tmp_path / "log.csv"
    losses = [2 + 0.01 * (step % 3) for step in range(60)] + [9.0, math.nan]
    log.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(losses)))
    answer = json.loads(headwise.alarms(log).to_json())
    assert answer["schema"] == "headwise.alarms/1" and check(answer) == [] and answer["runs"][0]["alerts"]
