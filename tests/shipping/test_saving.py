"""Saving a regularized model, loading it, and exporting it as a stock model."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from rounding import assert_same_to_rounding
from small_models import HOSTS, Own, vectors

import headwise
from headwise.attend.core.method import REGISTRY

pytest.importorskip("safetensors")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

FIVE = (
    "DropHead(p=0.2) + SigmaReparam() + EntropyPenalty(strength=0.01) + QKClip(threshold=0.5) + InputNoise(scale=0.1)"
)
ACTING = "NeuTRENO(strength=0.5) + GatedOutput() + XSA() + SigmaReparam() + DropHead(p=0.3)"


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, initializer_range=0.1, pad_token_id=0, **{**sizes, **changes})
    return LlamaForCausalLM(config)


def trained(model, text, steps=3, **options):
    handle = headwise.regularize(model.train(), *headwise.parse(text), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(steps):
        ids = torch.randint(1, 50, (3, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss + handle.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        handle.after_step()
    return handle


IDS = torch.arange(1, 19).view(2, 9)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def run(code, *arguments):
    """Run code in a process of its own, offline, and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


LOADED = """
import sys, torch, headwise
from transformers import LlamaConfig, LlamaForCausalLM
for folder in sys.argv[1:]:
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    handle = headwise.load_pretrained(model, folder)
    assert handle.step == 3, handle.step
    ids = torch.arange(1, 19).view(2, 9)
    tokens = model.eval().generate(ids, max_new_tokens=12, do_sample=False)
    torch.save({"tokens": tokens, "logits": model(input_ids=ids).logits.detach()}, folder + "/there.pt")
"""

WITHOUT_HEADWISE = """
import sys, torch
sys.modules["headwise"] = None
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    print("FOLDER", file=sys.stderr, flush=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.save(model.eval()(input_ids=torch.arange(1, 19).view(2, 9)).logits.detach(), folder + "/there.pt")
"""


def test_a_fresh_process_generates_the_same_tokens(tmp_path):
    models = {tmp_path / "five": (llama(), FIVE), tmp_path / "acting": (llama(), ACTING)}
    for folder, (model, text) in models.items():
        trained(model, text, seed=3).save_pretrained(folder)
    run(LOADED, *models)
    for folder, (model, _) in models.items():
        there = torch.load(folder / "there.pt")
        torch.testing.assert_close(there["logits"], logits(model), rtol=1e-5, atol=1e-6)
        assert torch.equal(there["tokens"], model.generate(IDS, max_new_tokens=12, do_sample=False))


@pytest.mark.grid
def test_what_a_process_without_headwise_is_told(tmp_path):
    stock, five, silent = (tmp_path / name for name in ("stock", "five", "silent"))
    model = llama()
    handle = trained(model, FIVE)
    keys = list(model.state_dict())
    done = handle.export(stock, example={"input_ids": IDS})
    assert done.difference <= 1e-5
    assert [type(m).__name__ for m in done.folded] == ["SigmaReparam"] and len(done.left_out) == 4
    assert list(model.state_dict()) == keys and len(handle.fitted) == 2
    assert "in its weights: SigmaReparam" in str(done) and "training only: DropHead" in str(done)
    assert "runs without headwise" in (stock / "README.md").read_text()
    handle.save_pretrained(five)
    trained(llama(), "XSA() + LinearAttention() + SigmaReparam() + DropHead(p=0.1)").save_pretrained(silent)
    told = run(WITHOUT_HEADWISE, stock, five, silent).split("FOLDER")[1:]
    for folder, said in zip((stock, five), told, strict=False):
        assert "UNEXPECTED" not in said and "MISSING" not in said
        torch.testing.assert_close(torch.load(folder / "there.pt"), logits(model), rtol=1e-5, atol=1e-6)
    # methods that learn nothing leave weights that fit, and another model
    assert "trained_with_XSA_and_LinearAttention__load_it_with_headwise.load_pretrained" in told[2]
    card = (silent / "README.md").read_text()
    assert "`XSA`, `LinearAttention`" in card and "computes something else" in card


def test_what_cannot_be_folded_is_named_and_nothing_is_written(tmp_path):
    handle = trained(llama(), ACTING)
    with pytest.raises(ValueError, match=r"NeuTRENO.*GatedOutput.*XSA.*cannot be folded: .*headwise.load_pretrained"):
        handle.export(tmp_path / "stock")
    assert not (tmp_path / "stock").exists()


def test_export_of_another_librarys_model_is_refused(tmp_path):
    handle = headwise.regularize(Own(), headwise.DropHead(p=0.2))
    with pytest.raises(ValueError, match="this is a Own: call fold"):
        handle.export(tmp_path)


def test_export_compares_what_it_wrote(tmp_path, monkeypatch):
    handle = trained(llama(), FIVE)
    from headwise.attend.regularizing import saving

    before = saving.write_weights

    def spoiled(model, plain, path, **options):
        before(model, {k: t + 0.1 for k, t in plain.items()}, path, **options)

    monkeypatch.setattr(saving, "write_weights", spoiled)
    with pytest.raises(RuntimeError, match=r"differs by .* do not use"):
        handle.export(tmp_path, example=IDS)


@pytest.mark.grid
@pytest.mark.parametrize("host", ["own", "llama", "bert-padded"])
@pytest.mark.parametrize("name", sorted(n for n, c in REGISTRY.items() if c.__module__.startswith("headwise.")))
def test_every_method_comes_back_as_it_was(name, host, tmp_path):
    host = HOSTS[host]
    method = REGISTRY[name](**REGISTRY[name].strong)
    model = host.make()
    try:
        handle = headwise.regularize(model, method, seed=5, example=host.example())
    except ValueError as error:
        assert (
            "not applicable" in str(error)
            or "applies to none" in str(error)
            or "no attention layer is left" in str(error)
        )
        return
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    handle.save_pretrained(tmp_path)
    again = host.make()
    back = headwise.load_pretrained(again, tmp_path, example=host.example())
    assert back.methods == handle.methods and back.shared.seed == 5
    for (key, here), (other, there) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert key == other
        assert torch.equal(here, there), key
    args, kwargs = host.batch()
    with torch.no_grad():
        ours, theirs = (host.run(one.eval(), (args, kwargs)) for one in (model, again))
    assert_same_to_rounding(ours, theirs)


def test_strengths_and_draws_go_on_where_they_were(tmp_path):
    model = llama()
    handle = trained(model, "DropHead(p=0.3)")
    handle.set(headwise.DropHead, p=0.5)
    handle.save_pretrained(tmp_path)
    again = llama()
    back = headwise.load_pretrained(again, tmp_path)
    assert back.state() == handle.state()
    with torch.no_grad():
        here, there = (one.train()(input_ids=IDS).logits for one in (model, again))
    assert_same_to_rounding(here, there)


def test_the_layers_of_each_method_come_back(tmp_path):
    model = llama(num_hidden_layers=3)
    where = "model.layers.2.self_attn"
    headwise.regularize(model, headwise.DropHead(p=0.3), where=[where]).save_pretrained(tmp_path)
    back = headwise.load_pretrained(llama(num_hidden_layers=3), tmp_path)
    assert [f.site.name for f in back.fitted] == [where]


def test_an_own_model_with_tied_weights_is_saved_and_loaded(tmp_path):
    def tied():
        model = Own()
        model.more = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        model.more[1].weight = model.more[0].weight
        return model

    model = tied()
    headwise.regularize(model, headwise.NeuTRENO(), headwise.SigmaReparam()).save_pretrained(tmp_path)
    again = tied()
    headwise.load_pretrained(again, tmp_path)
    assert again.more[0].weight is again.more[1].weight
    args, kwargs = vectors()
    assert_same_to_rounding(model.eval()(*args, **kwargs), again.eval()(*args, **kwargs))


def test_parametrizations_of_torch_stay_the_hosts_own(tmp_path):
    def normed():
        model = Own()
        model.extra = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
        return model

    model = normed()
    headwise.regularize(model, headwise.DropHead()).save_pretrained(tmp_path)
    again = normed()
    headwise.load_pretrained(again, tmp_path)
    assert torch.equal(model.extra.weight, again.extra.weight)


def untouched(model, before):
    return all(torch.equal(t, before[k]) for k, t in model.state_dict().items()) and "headwise" not in str(model)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: (f / "headwise.json").unlink(), "no headwise.json"),
        (lambda f: (f / "headwise.json").write_text("{"), "damaged"),
        (lambda f: (f / "headwise.json").write_text("[]"), "damaged"),
        (lambda f: change(f, "format", 9), "format 9"),
        (lambda f: change(f, "model", "BertModel"), "holds a BertModel"),
        (lambda f: change(f, "methods", [{"method": "Unheard()", "module": "mine", "layers": []}]),
        r"lists them\. Import mine, which"),
        (lambda f: change(f, "methods", [{"method": "DropHead(p=7)", "module": "headwise.x", "layers": []}]),
        "cannot be made"),
        (lambda f: (f / "headwise.safetensors").unlink(), "headwise.safetensors is missing"),
        (lambda f: (f / "headwise.safetensors").write_bytes(b"x" * 40), "damaged"),
        (lambda f: shorten(f), "is missing"),
        # without a config transformers would build its default, of billions of weights
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "model.safetensors").unlink(), "cannot be read.*save it again"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 40), "cannot be read.*save it again"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_told_and_the_model_stays_plain(harm, words, tmp_path):
    trained(llama(), "GatedOutput() + DropHead()").save_pretrained(tmp_path)
    harm(tmp_path)
    model = llama()
    before = {k: t.clone() for k, t in model.state_dict().items()}
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        headwise.load_pretrained(model, tmp_path)
    assert untouched(model, before)


def change(folder, key, value):
    path = folder / "headwise.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def shorten(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "headwise.safetensors")
    tensors.pop(next(k for k, t in tensors.items() if t.numel()))
    save_file(tensors, folder / "headwise.safetensors")


def test_a_name_on_a_hub_is_told_how_it_becomes_a_folder():
    with pytest.raises(FileNotFoundError, match=r"no folder me/model on this machine.*snapshot_download"):
        headwise.load_pretrained(Own(), "me/model")


def test_the_code_of_a_card_loads_the_model(tmp_path):
    model = llama()
    headwise.regularize(model, headwise.GatedOutput(start="half")).save_pretrained(tmp_path)
    code = (tmp_path / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names = {}
    exec(code.replace('"folder"', repr(str(tmp_path))), names)
    assert_same_to_rounding(logits(model), logits(names["model"]))
    headwise.regularize(Own(), headwise.XSA()).save_pretrained(tmp_path / "own")
    assert "model = ...  # a plain Own, built" in (tmp_path / "own" / "README.md").read_text()


def test_another_size_is_told_and_the_model_stays_plain(tmp_path):
    headwise.regularize(Own(), headwise.DropHead()).save_pretrained(tmp_path)
    model = Own()
    model.more = torch.nn.Linear(3, 3)
    before = {k: t.clone() for k, t in model.state_dict().items()}
    with pytest.raises(ValueError, match="do not fit this model"):
        headwise.load_pretrained(model, tmp_path)
    assert untouched(model, before)


def test_a_shorter_model_is_told(tmp_path):
    trained(llama(num_hidden_layers=3), "GatedOutput()").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="other layers than in the saved model"):
        headwise.load_pretrained(llama(num_hidden_layers=2), tmp_path)


def test_weights_of_an_earlier_save_go(tmp_path):
    handle = trained(llama(), "DropHead()")
    handle.save_pretrained(tmp_path)
    handle.save_pretrained(tmp_path, max_shard_size="10KB")
    assert not (tmp_path / "model.safetensors").exists() and len(list(tmp_path.glob("model-*.safetensors"))) > 1
    handle.export(tmp_path)
    names = {path.name for path in tmp_path.glob("*.safetensors*")}
    assert names == {"model.safetensors"} and not (tmp_path / "headwise.json").exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.safetensors", "model-00001-of-00002.safetensors", "config.json"]
)
def test_the_model_of_others_in_a_folder_is_neither_replaced_nor_removed(tmp_path, name):
    handle = trained(llama(), "DropHead()")
    (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    for write in (handle.save_pretrained, handle.export):
        with pytest.raises(ValueError, match=f"holds {name}, which headwise did not write. Choose another folder"):
            write(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: b"mine", "tokenizer.json": b"{}"}


def test_adapters_are_refused_before_anything_is_written(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    handle = headwise.regularize(model, headwise.DropHead())
    for write in (handle.save_pretrained, handle.export):
        with pytest.raises(ValueError, match=r"adapters of peft.*merge_and_unload"):
            write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_removed_handle_and_a_file_in_the_place_of_the_folder_are_told(tmp_path):
    handle = headwise.regularize(Own(), headwise.DropHead())
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        handle.save_pretrained(tmp_path / "file")
    handle.remove()
    with pytest.raises(RuntimeError, match="no longer regularized"):
        handle.save_pretrained(tmp_path)


def test_a_card_keeps_what_somebody_wrote(tmp_path):
    handle = headwise.regularize(Own(), headwise.DropHead())
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\n---\n\nMine.\n")
    handle.save_pretrained(tmp_path)
    handle.save_pretrained(tmp_path)
    text = card.read_text()
    assert text.startswith("---\nlicense: mit\n---\n\nMine.\n") and text.count("## Attention methods") == 1
    card.write_text(text + "\nBelow.\n")
    headwise.regularize(Own(), headwise.XSA()).save_pretrained(tmp_path)
    text = card.read_text()
    assert text.endswith("\nBelow.\n") and "XSA" in text and "DropHead" not in text


def test_a_push_keeps_the_hubs_card_and_removes_stale_weights(monkeypatch):
    from local_hub import Hub

    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    old = {
        "README.md": b"---\nlicense: mit\n---\n\nMine.\n",
        "model-00001-of-00002.safetensors": b"old",
        "notes.txt": b"x",
    }
    with Hub({"me/model": dict(old)}) as hub:
        handle = trained(llama(), "NeuTRENO() + DropHead()")
        address = handle.push_to_hub("me/model", token="hf_x", endpoint=hub.address, commit_message="Two methods")
        files = hub.files["me/model"]
        assert address.startswith(hub.address) and hub.messages == ["Two methods"]
        assert "model-00001-of-00002.safetensors" not in files and files["notes.txt"] == b"x"
        assert {"config.json", "headwise.json", "headwise.safetensors", "model.safetensors"} <= set(files)
        card = files["README.md"].decode()
        assert card.startswith("---\nlicense: mit\n---\n\nMine.\n") and "NeuTRENO" in card
        handle.push_to_hub("me/new", token="hf_x", private=True, endpoint=hub.address)
        assert (
            hub.private["me/new"] == "private"
            and "library_name: transformers" in hub.files["me/new"]["README.md"].decode()
        )


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=50, **sizes, **experts))


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def tied():
    return llama(tie_word_embeddings=True).bfloat16()


@pytest.mark.parametrize("make", [mixtral, t5, tied])
def test_models_with_experts_two_stacks_or_tied_weights_are_saved_in_shards_and_exported(make, tmp_path):
    model = make()
    handle = headwise.regularize(model, headwise.GatedOutput(), headwise.SigmaReparam())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    handle.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    again = make()
    headwise.load_pretrained(again, tmp_path)
    for (key, here), there in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert here.dtype == there.dtype and torch.equal(here, there), key
    batch = {"input_ids": IDS, "decoder_input_ids": IDS} if make is t5 else {"input_ids": IDS}
    exported = headwise.regularize(make(), headwise.SigmaReparam(), headwise.DropHead())
    assert exported.export(tmp_path, example=batch).difference <= (0.05 if make is tied else 1e-5)


def of_diffusers():
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "sample_size": 8, "patch_size": 2}
    return DiTTransformer2DModel(num_layers=2, num_embeds_ada_norm=10, **sizes)


def of_hub():
    from huggingface_hub import PyTorchModelHubMixin

    class Net(Own, PyTorchModelHubMixin):
        pass

    return Net()


@pytest.mark.parametrize("make", [of_diffusers, of_hub])
def test_models_of_other_libraries_with_a_save_of_their_own_come_back(make, tmp_path):
    if make is of_diffusers:
        pytest.importorskip("diffusers")
    model = make()
    handle = headwise.regularize(model, headwise.GatedOutput(), headwise.SigmaReparam())
    handle.save_pretrained(tmp_path)
    again = make()
    headwise.load_pretrained(again, tmp_path)
    for (key, here), there in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(here, there), key
    plain = headwise.regularize(make(), headwise.SigmaReparam())
    with pytest.raises(ValueError, match=r"export\(\) writes models of transformers.*its own library"):
        plain.export(tmp_path / "stock")
    assert not (tmp_path / "stock").exists()


def merged():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    handle = headwise.regularize(model, *headwise.parse("GatedOutput() + DropHead(p=0.3)"))
    return handle, model.merge_and_unload()


def compiled():
    model = torch.compile(llama(), backend="eager")
    return headwise.regularize(model, *headwise.parse("GatedOutput() + DropHead(p=0.3)")), model._orig_mod


@pytest.mark.parametrize("make", [merged, compiled])
def test_the_model_inside_is_what_is_saved(make, tmp_path):
    handle, inside = make()
    handle.save_pretrained(tmp_path)
    again = llama()
    back = headwise.load_pretrained(again, tmp_path)
    assert [f.site.name for f in back.fitted] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    torch.testing.assert_close(logits(inside), logits(again))
    assert not (tmp_path / "adapter_config.json").exists()
    handle.remove(discard=True)


def test_prompts_of_peft_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    handle = headwise.regularize(peft.get_peft_model(llama(), config), headwise.DropHead())
    with pytest.raises(ValueError, match="learns prompts of peft"):
        handle.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_adapters_that_lie_in_the_folder_or_in_the_repository_are_told(tmp_path, monkeypatch):
    from local_hub import Hub

    (tmp_path / "adapter_config.json").write_text("{}")
    handle = headwise.regularize(llama(), headwise.DropHead())
    for write in (handle.save_pretrained, handle.export):
        with pytest.raises(ValueError, match=r"holds adapters of peft \(adapter_config.json\)"):
            write(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    with Hub({"me/model": {"adapter_config.json": b"{}"}}) as hub:
        with pytest.raises(ValueError, match="me/model holds adapters"):
            handle.push_to_hub("me/model", token="hf_x", endpoint=hub.address)
        assert [*hub.files["me/model"]] == ["adapter_config.json"]


@pytest.mark.parametrize("option", [{"variant": "fp16"}, {"push_to_hub": True}, {"state_dict": {}}])
def test_options_after_which_nobody_could_load_are_refused(option, tmp_path):
    handle = headwise.regularize(llama(), headwise.DropHead())
    for write in (handle.save_pretrained, handle.export):
        with pytest.raises(TypeError, match=f"{next(iter(option))} cannot be given here"):
            write(tmp_path / "out", **option)
    assert not (tmp_path / "out").exists()


def test_an_error_while_saving_costs_no_earlier_save(tmp_path):
    handle = headwise.regularize(llama(), headwise.SigmaReparam())
    handle.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    # what transformers refuses to write
    handle.model.generation_config.temperature = 0.5
    for write in (handle.save_pretrained, handle.export):
        with pytest.raises(ValueError, match="GenerationConfig is invalid"):
            write(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_layer_of_a_model_that_stands_at_two_places_is_saved_once_for_both(tmp_path):
    class Shared(Own):
        def __init__(self):
            super().__init__()
            self.beside = next(m for m in self.modules() if type(m) is torch.nn.Linear)

    model = Shared()
    headwise.regularize(model, headwise.SigmaReparam()).save_pretrained(tmp_path)
    again = Shared()
    headwise.load_pretrained(again, tmp_path)
    args, kwargs = vectors()
    assert_same_to_rounding(model.eval()(*args, **kwargs), again.eval()(*args, **kwargs))


@pytest.fixture
def fetched(monkeypatch):
    """Notes each kernel that would be fetched from the Hub."""
    from transformers.integrations import hub_kernels

    seen = []

    def fetch(name, *others, **settings):
        seen.append(name)
        raise RuntimeError("a kernel was asked for")

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *a, **k: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", fetch)
    return seen


KERNEL = "someone/kernel"
CHOOSING = {
    "an attention": {"attn_implementation": KERNEL},
    "an attention of its own": {"_attn_implementation": KERNEL},
    "an attention of a part": {"attn_implementation": {"": KERNEL}},
    "code beside it": {"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}, "trust_remote_code": True},
    "pickled weights": {"transformers_weights": "pytorch_model.bin"},
    "a quantizer": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
}


@pytest.mark.parametrize("settings", CHOOSING.values(), ids=CHOOSING)
def test_no_setting_of_a_folder_chooses_code(settings, fetched, tmp_path):
    trained(llama(), "GatedOutput()").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    model = llama()
    headwise.load_pretrained(model, tmp_path)
    assert fetched == [] and not (tmp_path / "ran").exists()
    assert model.config._attn_implementation != KERNEL


class Trap:
    """Unpickling this would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_config_made_from_a_folder_chooses_no_code_when_its_weights_are_read(fetched, tmp_path):
    trained(llama(), "GatedOutput()").save_pretrained(tmp_path)
    model = llama()
    # as in a config that was read from the folder for a model that has another attention now
    model.config._attn_implementation_internal = KERNEL
    headwise.load_pretrained(model, tmp_path)
    assert fetched == []


def test_an_adapter_of_the_folder_is_not_put_onto_the_model(tmp_path):
    trained(llama(), "GatedOutput()").save_pretrained(tmp_path)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "someone/model", "target_modules": ["q_proj"], "r": 2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    model = llama()
    headwise.load_pretrained(model, tmp_path)
    assert not any("lora" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_weight_that_the_folder_lacks_is_not_drawn_at_random(name, tmp_path):
    from safetensors.torch import load_file, save_file

    trained(llama(), "GatedOutput()").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state[name]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"do not fit this model: {name} is missing"):
        headwise.load_pretrained(llama(), tmp_path)


def test_a_model_of_other_sizes_or_layers_is_told_by_its_weights(tmp_path):
    trained(llama(), "DropHead(p=0.1)").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"up_proj.weight is \(48, 32\) there and \(64, 32\) here"):
        headwise.load_pretrained(llama(intermediate_size=64), tmp_path)
    trained(llama(attention_bias=True), "DropHead(p=0.1)").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"self_attn\.\w+\.bias has no place here"):
        headwise.load_pretrained(llama(), tmp_path)


@pytest.mark.parametrize("method", ["SigmaReparam()", "SpectralNorm()", "WeightNorm()"])
def test_a_pickled_model_of_reparametrized_layers_is_told_the_remedy(method, tmp_path):
    model = Own()
    handle = headwise.regularize(model, *headwise.parse(method))
    for save in (lambda: torch.save(model, tmp_path / "model.pt"), lambda: pickle.dumps(model)):
        with pytest.raises(
            RuntimeError, match=r"this Linear has weights that .*save_pretrained\(folder\), or handle.fold"
        ):
            save()
    copy.deepcopy(model)
    handle.fold()
    torch.save(model, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=False).state_dict().keys() == Own().state_dict().keys()


STATE = {"step": 3, "counters": {}, "methods": [], "strengths": []}
CHOICE = {"method": 1, "kind": "DropHead", "setting": "p"}
HOSTILE = {
    "deep lists": lambda settings: "[" * 100_000,
    "deep objects": lambda settings: '{"a":' * 100_000,
    "deep and whole": lambda settings: json.dumps(settings)[:-1] + ',"x":' + "[" * 900 + "]" * 900 + "}",
    "a number of thousands of digits": lambda settings: '{"format": ' + "9" * 10_000 + "}",
    "no methods": lambda settings: json.dumps(settings | {"methods": []}),
    "layers that are no names": lambda settings: json.dumps(
        settings | {"methods": [settings["methods"][0] | {"layers": [[]]}]}
    ),
    "a method of thousands of terms": lambda settings: json.dumps(
        settings | {"methods": [settings["methods"][0] | {"method": "DropHead()+" * 5000 + "DropHead()"}]}
    ),
    **{
        f"{key} {value!r}": lambda settings, key=key, value=value: json.dumps(
            settings | {"state": settings["state"] | {key: value}}
        )
        for key in STATE
        for value in (None, -5, 1.5, "x", [[]], [{}], {"a": {}}, 10**30)
        if not (key == "methods" and value == "x")
    },
    **{
        f"strength {choice!r}": lambda settings, choice=choice: json.dumps(
            settings | {"state": settings["state"] | {"strengths": [CHOICE | choice]}}
        )
        for choice in (
            {"value": "x"}, {"value": 7.0}, {"value": None}, {"method": -1, "value": 0.5},
            {"setting": [], "value": 0.5},
            {"schedule": "number", "fields": {}}, {"schedule": "Linear", "fields": {"zzz": 1}}, {"schedule": "__doc__"},
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_record_of_methods_is_one_sentence_and_leaves_the_model_plain(case, tmp_path):
    saved = llama()
    headwise.regularize(saved, headwise.GatedOutput(), headwise.DropHead(p=0.1)).save_pretrained(tmp_path)
    path = tmp_path / "headwise.json"
    path.write_text(HOSTILE[case](json.loads(path.read_text())))
    model = llama()
    before = {k: t.clone() for k, t in model.state_dict().items()}
    with pytest.raises(ValueError) as raised:
        headwise.load_pretrained(model, tmp_path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000
    assert untouched(model, before)
