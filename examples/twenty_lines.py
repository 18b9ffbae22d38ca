"""Regularize a small Llama, watch its heads and train it to count: `make demo` runs this and prints the result."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headwise

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=100)
model = LlamaForCausalLM(config)
regularized = headwise.regularize(model, headwise.DropHead(p=0.2))
print(regularized.report())

watch = headwise.watch(model, every=10)
optimizer = torch.optim.AdamW(headwise.parameter_groups(model, lr=3e-3, weight_decay=0.1, attention_weight_decay=0.01))
losses = []
for _ in range(41):
    tokens = (torch.randint(0, 100, (8, 1)) + torch.arange(32)) % 100  # to learn: counting
    loss = model(input_ids=tokens, labels=tokens).loss + regularized.loss()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    regularized.after_step()
    watch.step(loss)
    losses.append(loss.item())
watch.remove()
regularized.fold()
