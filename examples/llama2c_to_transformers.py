"""Convert a llama2.c model into a transformers folder.

    python examples/llama2c_to_transformers.py stories260K.bin tok512.bin stories260K-transformers

llama2.c has one file of numbers (version 0: seven integers, then fp32 weights) and one of the tokenizer. Its
rotary positions rotate neighbouring rows of queries and keys, those of transformers rotate halves, so the rows are
reordered.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import torch
from torch import Tensor


def read_model(path: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return the settings and weights of a llama2.c file."""
    content = path.read_bytes()
    if len(content) < 28:
        raise ValueError(f"{path} has {len(content)} bytes: it is not a llama2.c model")
    names = ("width", "inner", "layers", "heads", "groups", "vocabulary", "length")
    settings = dict(zip(names, struct.unpack("7i", content[:28]), strict=True))
    tied = settings["vocabulary"] > 0
    settings["vocabulary"] = abs(settings["vocabulary"])
    if not 0 < settings["width"] < 1 << 20 or settings["width"] % max(settings["heads"], 1):
        raise ValueError(f"{path} begins with {settings}: it is not a llama2.c model of version 0")
    numbers = torch.frombuffer(bytearray(content[28:]), dtype=torch.float32)
    weights, at = {}, 0
    for name, shape in _shapes(settings, tied).items():
        count = torch.Size(shape).numel()
        if at + count > numbers.numel():
            raise ValueError(f"{path} ends within {name}: it is truncated")
        weights[name] = numbers[at : at + count].view(shape)
        at += count
    return settings, weights


def _shapes(settings: dict[str, int], tied: bool) -> dict[str, tuple[int, ...]]:
    width, inner, layers, vocabulary = (settings[k] for k in ("width", "inner", "layers", "vocabulary"))
    size = width // settings["heads"]
    kv = settings["groups"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (vocabulary, width),
        "attention_norm": (layers, width),
        "q": (layers, width, width),
        "k": (layers, kv, width),
        "v": (layers, kv, width),
        "o": (layers, width, width),
        "mlp_norm": (layers, width),
        "gate": (layers, inner, width),
        "down": (layers, width, inner),
        "up": (layers, inner, width),
        "norm": (width,),
        "cosines and sines, computed again": (2, settings["length"], size // 2),
    }
    return shapes if tied else {**shapes, "head": (vocabulary, width)}


def halves(rows: Tensor, heads: int) -> Tensor:
    """Return a weight with the rows of each head reordered from pairs (0 1)(2 3)... to halves (0 2 ...)(1 3 ...)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def model_of(settings: dict[str, int], weights: dict[str, Tensor]):
    """Return the transformers model with the weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=settings["width"],
        intermediate_size=settings["inner"],
        num_hidden_layers=settings["layers"],
        num_attention_heads=settings["heads"],
        num_key_value_heads=settings["groups"],
        vocab_size=settings["vocabulary"],
        max_position_embeddings=settings["length"],
        rms_norm_eps=1e-5,
        tie_word_embeddings="head" not in weights,
    )
    state = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["norm"]}
    state["lm_head.weight"] = weights.get("head", weights["embedding"])
    places = {
        "attention_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "down": "mlp.down_proj",
        "up": "mlp.up_proj",
    }
    for layer in range(settings["layers"]):
        for name, place in places.items():
            value = weights[name][layer]
            if name in "qk":
                value = halves(value, settings["heads" if name == "q" else "groups"])
            state[f"model.layers.{layer}.{place}.weight"] = value.contiguous()
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


def tokenizer_of(path: Path, vocabulary: int):
    """Return the tokenizer: byte pairs merged in the order of their scores, bytes for unknown characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    content, at, pieces = path.read_bytes(), 4, []
    for _ in range(vocabulary):
        score, length = struct.unpack_from("fi", content, at)
        pieces.append((content[at + 8 : at + 8 + length].decode("utf-8", "replace").replace(" ", "▁"), score))
        at += 8 + length
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = {piece: i for i, piece in enumerate([*names, *(piece for piece, _ in pieces[len(names) :])])}
    merges = []
    for piece, score in pieces[len(names) :]:
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [(score, pair) for pair in pairs if pair[0] in words and pair[1] in words]
    merges.sort(key=lambda merge: -merge[0])
    made = Tokenizer(
        models.BPE(words, [pair for _, pair in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def convert(model: Path, tokenizer: Path | None, folder: Path) -> Path:
    """Write the transformers folder."""
    settings, weights = read_model(model)
    model_of(settings, weights).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer_of(tokenizer, settings["vocabulary"]).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    print(convert(*(Path(argument) for argument in sys.argv[1:])))
