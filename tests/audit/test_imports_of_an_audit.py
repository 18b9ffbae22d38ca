"""An audit of weights takes only what reads weights, and leaves the model as it was."""

import pytest
from absent_libraries import run_without

# rooms that read activations, change models or train them
OTHERS = ("watching", "regularizing", "compressing", "comparing")

AUDIT = """
import sys, headwise
headwise.audit({folder!r})
print(sorted(name for name in sys.modules if name.startswith({rooms!r})))
"""


@pytest.fixture
def folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    return tmp_path


def test_an_audit_of_weights_imports_no_room_that_watches_or_changes_models(folder):
    rooms = tuple(f"headwise.{room}" for room in OTHERS)
    done = run_without(set(), AUDIT.format(folder=str(folder), rooms=rooms))
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stdout + done.stderr


def test_opening_a_folder_adds_nothing_of_ours_to_the_model(folder):
    from headwise.health.auditing.opening import open_checkpoint

    model = open_checkpoint(folder).model
    assert not [name for module in model.modules() for name in vars(module) if "headwise" in name]
