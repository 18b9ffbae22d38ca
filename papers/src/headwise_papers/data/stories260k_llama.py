"""stories260K as a Llama of transformers, and its tokenizer of 512 tokens."""

from __future__ import annotations

import copy
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.files.optional_imports import needing
from headwise.study import StudyError
from headwise_papers.data import stories260k
from headwise_papers.data.text_files import AGAIN

# names of a layer's weights in transformers, in the order of the file
PLACES = {
    "input_layernorm": ("width",),
    "self_attn.q_proj": ("width", "width"),
    "self_attn.k_proj": ("kv", "width"),
    "self_attn.v_proj": ("kv", "width"),
    "self_attn.o_proj": ("width", "width"),
    "post_attention_layernorm": ("width",),
    "mlp.gate_proj": ("inner", "width"),
    "mlp.down_proj": ("width", "inner"),
    "mlp.up_proj": ("inner", "width"),
}
SPECIAL = ("<unk>", "<s>", "</s>")


def llama(folder: Path | None) -> Any:
    """Return the model with its trained weights."""
    return copy.deepcopy(_llama(folder))


@lru_cache(maxsize=2)
def _llama(folder: Path | None) -> Any:
    with needing("A pretrained Llama", "hf"):
        from transformers import LlamaConfig, LlamaForCausalLM
    sizes, weights = _read(folder)
    config = LlamaConfig(
        hidden_size=sizes["width"],
        intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["groups"],
        vocab_size=sizes["vocabulary"],
        max_position_embeddings=sizes["length"],
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model.eval()


@lru_cache(maxsize=2)
def _read(folder: Path | None) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return the sizes, and the weights by their names in transformers; raise StudyError for a broken file."""
    (path,) = stories260k.files(folder)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise StudyError(f"{path} is missing. Name its folder by --data, or leave --data out to have it.") from error
    names = ("width", "inner", "layers", "heads", "groups", "vocabulary", "length")
    if len(content) < stories260k.HEADER.size:
        raise StudyError(f"{path} has {len(content)} bytes: it is not a llama2.c model. {AGAIN}")
    sizes = dict(zip(names, stories260k.HEADER.unpack_from(content), strict=True))
    sizes["kv"] = sizes["width"] // max(sizes["heads"], 1) * sizes["groups"]
    numbers, at = torch.frombuffer(bytearray(content[stories260k.HEADER.size :]), dtype=torch.float32), 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        start, at = at, at + torch.Size(shape).numel()
        if at > numbers.numel():
            raise StudyError(f"{path} ends early: it is not a complete llama2.c model. {AGAIN}")
        return numbers[start:at].view(shape)

    weights = {"model.embed_tokens.weight": take(sizes["vocabulary"], sizes["width"])}
    for place, shape in PLACES.items():
        for layer, value in enumerate(take(sizes["layers"], *(sizes[name] for name in shape))):
            heads = {"self_attn.q_proj": sizes["heads"], "self_attn.k_proj": sizes["groups"]}.get(place)
            weights[f"model.layers.{layer}.{place}.weight"] = value if heads is None else _halves(value, heads)
    weights["model.norm.weight"] = take(sizes["width"])
    return sizes, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of each head, whose rotary pairs are neighbours, in the two halves that transformers rotates."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def tokenizer(folder: Path | None) -> Any:
    """Return the tokenizer: byte pairs merged in the order of their scores, with a fallback to bytes."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers

    sizes, _ = _read(folder)
    (path,) = stories260k.TOKENIZER.paths(folder)
    content, at, pieces = path.read_bytes(), 4, []
    for _ in range(sizes["vocabulary"]):
        score, length = struct.unpack_from("fi", content, at)
        pieces.append((content[at + 8 : at + 8 + length].decode("utf-8", "replace").replace(" ", "▁"), score))
        at += 8 + length
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    words = {piece: i for i, piece in enumerate([*names, *(piece for piece, _ in pieces[len(names) :])])}
    merges = []
    for piece, score in pieces[len(names) :]:
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [(score, pair) for pair in pairs if pair[0] in words and pair[1] in words]
    merges.sort(key=lambda merge: -merge[0])
    ordered = [pair for _, pair in merges]
    tokenizer_ = Tokenizer(models.BPE(words, ordered, unk_token=SPECIAL[0], fuse_unk=True, byte_fallback=True))
    tokenizer_.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer_.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer_
