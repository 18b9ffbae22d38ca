"""axolotl: the plugin under axolotl's own plugin manager and schema, in a run of transformers' Trainer.

axolotl's own trainer cannot be imported without CUDA libraries: transformers' Trainer, whose subclass it is, replaces
it.
"""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torchvision_stub  # noqa: F401  (before transformers)
import yaml
from absent_libraries import run_without

import headwise

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    base = pytest.importorskip("axolotl.integrations.base")
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

# of torch on a machine without a GPU, and of peft, which reads an attribute that transformers renamed
pytestmark = pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set:UserWarning", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

PAGE = Path(__file__).parents[1] / "docs" / "at_home.md"
NAME = "headwise.axolotl.HeadwisePlugin"
# keys that axolotl requires in every YAML
BESIDE = {
    "base_model": "a-model",
    "datasets": [{"path": "rows", "type": "alpaca"}],
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.001,
    "sequence_len": 8,
}


def of_page():
    """Return the YAML of the page."""
    found = re.search(r"```yaml\n(plugins:.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return yaml.safe_load(found[1])


@pytest.fixture
def manager():
    plugins = base.PluginManager.get_instance()
    plugins.plugins.clear()
    yield plugins
    plugins.plugins.clear()


def prepared(manager, settings):
    """Register plugins, validate a YAML like axolotl, and return its configuration."""
    for name in settings["plugins"]:
        manager.register(name)
    assert [*manager.plugins] == settings["plugins"]
    _, schema = merge_input_args()
    return DictDefault(schema(**BESIDE, **settings).model_dump(exclude_none=True))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


ROWS = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(1, 32, (16, 8), generator=torch.Generator().manual_seed(0))
]


def trained(manager, cfg, model, folder, **options):
    """Call axolotl's hooks in its order, with transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    manager.post_model_load(cfg, model)
    settings = {"max_steps": 4, "save_steps": 2, "gradient_accumulation_steps": cfg.gradient_accumulation_steps}
    arguments = TrainingArguments(
        str(folder),
        **settings,
        per_device_train_batch_size=cfg.micro_batch_size,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = manager.add_callbacks_pre_trainer(cfg, model)
    trainer = Trainer(model, arguments, train_dataset=ROWS, callbacks=callbacks)
    manager.post_trainer_create(cfg, trainer)
    trainer.train(**options)
    manager.post_train(cfg, trainer.model)
    trainer.save_model(str(folder))
    manager.post_train(cfg, model)
    return trainer


def test_the_pages_yaml_trains_resumes_and_is_loaded(manager, tmp_path):
    settings = of_page()
    settings["headwise"]["watch"]["every"] = 2
    settings["headwise"]["methods"] += " + GatedOutput()"
    cfg = prepared(manager, {**settings, "output_dir": str(tmp_path)})
    model = llama()
    trained(manager, cfg, model, tmp_path)
    callback = manager.plugins[NAME].callback
    assert callback.regularized.step == 4 and callback.regularized.model is model
    assert {record["step"] for record in callback.watch.records()} == {0, 2}
    back = headwise.load_pretrained(llama(), tmp_path)
    assert back.step == 4 and back.methods == callback.regularized.methods
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        logits, loaded_logits = (one.eval()(input_ids=ids).logits for one in (model, back.model))
    torch.testing.assert_close(logits, loaded_logits)
    # a run resumed in the middle ends as this one
    again = llama()
    trained(manager, cfg, again, tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_the_run_is_that_of_the_callback_alone(manager, tmp_path, monkeypatch):
    from transformers import Trainer, TrainingArguments

    monkeypatch.chdir(tmp_path)
    cfg = prepared(manager, {"plugins": [NAME], "headwise": {"methods": "EntropyPenalty(strength=0.5)", "seed": 3}})
    model, plain = llama(), llama()
    trained(manager, cfg, model, tmp_path / "one")
    arguments = TrainingArguments(
        str(tmp_path / "two"), max_steps=4, gradient_accumulation_steps=2, per_device_train_batch_size=2, report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callback = headwise.HeadwiseCallback(headwise.EntropyPenalty(strength=0.5), seed=3)
    Trainer(plain, arguments, train_dataset=ROWS, callbacks=[callback]).train()
    for (name, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    # without output_dir the folder is axolotl's default
    assert cfg.output_dir == "./model-out" and headwise.load_pretrained(llama(), tmp_path / "model-out").step == 4


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"methods": "DropHed(p=0.1)"}, "Did you mean 'DropHead'"),
        ({"methods": "DropHead(p=7)"}, "p"),
        ({"method": "DropHead()"}, "Extra inputs are not permitted"),
        ({}, "give methods: 'DropHead"),
        (None, "Field required"),
    ],
)
def test_a_wrong_section_is_told_before_the_model_is_loaded(manager, section, words):
    settings = {"plugins": [NAME], "headwise": section}
    with pytest.raises(ValueError, match=words):
        prepared(manager, {key: value for key, value in settings.items() if value is not None})


def test_what_learns_beside_adapters_and_a_model_without_attention_are_refused(manager, tmp_path):
    peft = pytest.importorskip("peft")
    settings = {"plugins": [NAME], "headwise": {"methods": "GatedOutput()"}, "output_dir": str(tmp_path)}
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    cfg = prepared(manager, settings)
    with pytest.raises(ValueError, match=r"GatedOutput.* learn parameters, and axolotl saves only the adapters"):
        manager.post_model_load(cfg, adapted)
    with pytest.raises(ValueError, match="reaches no attention layer of this Linear"):
        manager.post_model_load(cfg, torch.nn.Linear(2, 2))
    manager.plugins.clear()
    cfg = prepared(manager, {**settings, "headwise": {"methods": "DropHead(p=0.2)"}})
    trained(manager, cfg, adapted, tmp_path)
    assert manager.plugins[NAME].callback.regularized.step == 4
    assert (tmp_path / "adapter_model.safetensors").exists() and not (tmp_path / "headwise.json").exists()


def test_what_cannot_be_written_is_told_and_stops_nothing(manager, tmp_path):
    cfg = prepared(
        manager, {"plugins": [NAME], "headwise": {"methods": "DropHead(p=0.2)"}, "output_dir": str(tmp_path / "o")}
    )
    model = llama()
    trained(manager, cfg, model, tmp_path / "o")
    model.hf_quantizer = object()
    with pytest.warns(UserWarning, match=r"load_pretrained will not read .*quantized"):
        manager.post_train(cfg, model)


def test_without_axolotl_the_remedy_is_named():
    done = run_without({"axolotl"}, "import headwise.axolotl")
    assert "headwise.axolotl needs axolotl" in done.stderr and "pip install axolotl" in done.stderr
