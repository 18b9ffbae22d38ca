"""Train LoRA on a diffusers transformer by flow matching: `python diffusers_lora.py [--model
FOLDER_OF_SD3]`."""

import argparse

import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig

import headwise  # headwise
from headwise import DropHead, EntropyPenalty  # headwise

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a pipeline of Stable Diffusion 3 on disk; without one, a small random model")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()

torch.manual_seed(0)
sizes = {"num_layers": args.layers, "attention_head_dim": args.width // 4, "num_attention_heads": 4, "sample_size": 16}
words = {"joint_attention_dim": 32, "caption_projection_dim": args.width, "pooled_projection_dim": 32}
if args.model:
    model = SD3Transformer2DModel.from_pretrained(args.model, subfolder="transformer")
else:
    model = SD3Transformer2DModel(in_channels=4, out_channels=4, pos_embed_max_size=16, **sizes, **words)
model.requires_grad_(False)
model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj"]))
model.train()
regularized = headwise.regularize(model, DropHead(p=0.1), EntropyPenalty(strength=0.01))  # headwise
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
watch = headwise.watch(model, every=10)  # headwise

# In your own script: latents of the VAE, and embeddings of the captions by the text encoders.
config = model.config
latents = torch.randn(8, config.in_channels, 16, 16)
captions, pooled = torch.randn(8, 7, config.joint_attention_dim), torch.randn(8, config.pooled_projection_dim)
for step in range(args.steps):
    chosen = torch.randint(0, 8, (4,))
    clean, noise, time = latents[chosen], torch.randn(4, *latents.shape[1:]), torch.rand(4)
    noisy = (1 - time[:, None, None, None]) * clean + time[:, None, None, None] * noise
    found = model(noisy, captions[chosen], pooled[chosen], timestep=1000 * time).sample
    loss = torch.nn.functional.mse_loss(found, noise - clean)
    total = loss
    total = total + regularized.loss()  # headwise
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    regularized.after_step()  # headwise
    watch.step(loss)  # headwise
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
