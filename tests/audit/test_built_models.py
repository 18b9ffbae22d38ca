"""Audits of timm models with a file, and of models that a function of yours builds."""

from __future__ import annotations

import pytest
import timm
import torch
from safetensors.torch import save_file

from headwise.health.auditing.audit import CheckpointError, audit


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A timm model's weights on disk, with the classifier of another task."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7)
    path = tmp_path_factory.mktemp("timm") / "weights.safetensors"
    save_file(model.state_dict(), path)
    return path, model


def test_a_timm_name_with_a_file_is_read(weights):
    path, model = weights
    found = audit(f"vit_tiny_patch16_224:{path}")
    assert (found.kind, found.model) == ("timm model", "VisionTransformer")
    weight = model.blocks[5].attn.qkv.weight.detach()
    q, k = weight[64:128], weight[192 + 64 : 192 + 128]
    record = next(
        r for r in found.records if (r["site"], r["head"], r["statistic"]) == ("blocks.5.attn", 1, "spectral_norm_qk")
    )
    assert record["value"] == pytest.approx(torch.linalg.matrix_norm(k.T @ q, 2).item(), rel=1e-4)
    assert found.layers[0]["layout"] == "stacked (3, H, d) as q, k, v"


def test_images_are_read_by_a_timm_model(weights, tmp_path):
    from PIL import Image

    path, _ = weights
    Image.new("RGB", (50, 40), (10, 200, 30)).save(tmp_path / "one.jpg")
    found = audit(f"vit_tiny_patch16_224:{path}", images=tmp_path)
    assert len([r for r in found.records if r["statistic"] == "attention_entropy"]) == 36


def test_the_file_of_a_timm_model_is_read_tensor_by_tensor(weights, monkeypatch):
    from headwise.files.tensor_files import TensorFiles

    read, asked = TensorFiles.read, []

    def counting(files, names):
        asked.append(len(names))
        return read(files, names)

    monkeypatch.setattr(TensorFiles, "read", counting)
    assert audit(f"vit_tiny_patch16_224:{weights[0]}").records
    assert len(asked) > 10
    assert set(asked) == {1}


def test_weights_of_another_model_are_refused(weights):
    path, _ = weights
    with pytest.raises(
        CheckpointError,
        match=r"does not fit vit_small_patch16_224: cls_token is \(1, 1, 192\) in the file and \(1, 1, 384\)",
    ):
        audit(f"vit_small_patch16_224:{path}")


def test_a_function_of_yours_gives_the_model(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)\n"
    )
    found = audit(f"{file}:build")
    assert found.kind == "factory"
    assert {r["site"] for r in found.records} == {"layers.0.self_attn", "layers.1.self_attn"}
    with pytest.raises(CheckpointError, match="only the weights of a factory"):
        audit(f"{file}:build", text=file)
