"""Train a timm model on several processes: `torchrun --nproc-per-node 2 images.py --images train.pt test.pt`."""

import argparse

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import headwise  # headwise

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--images", nargs=2, required=True, help="two files of torch.save((images, labels))")
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

run = headwise.run()  # headwise
torch.manual_seed(run.seed)  # headwise
distributed.init_process_group("gloo")
training, test = (TensorDataset(*torch.load(path)) for path in args.images)
images, labels = training.tensors
model = timm.models.VisionTransformer(
    img_size=images.shape[-1],
    patch_size=4,
    in_chans=images.shape[1],
    num_classes=int(labels.max()) + 1,
    embed_dim=args.width,
    depth=args.depth,
    num_heads=4,
)
handle = run.regularize(model)  # headwise
wrapped = DistributedDataParallel(model)
optimizer = create_optimizer_v2(model, opt="adamw", lr=args.lr, weight_decay=0.05)
sampler = DistributedSampler(training, seed=run.seed)  # headwise
loader = DataLoader(training, batch_size=8, sampler=sampler)
criterion, step = LabelSmoothingCrossEntropy(0.1), 0

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    losses = AverageMeter()
    wrapped.train()
    for batch, targets in loader:
        run.saw(batch)  # headwise
        loss = criterion(wrapped(batch), targets)
        loss = loss + handle.loss()  # headwise
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        handle.after_step()  # headwise
        losses.update(loss.item(), len(batch))
        step += 1
        run.log(step=step, loss=loss.item())  # headwise
model.eval()
images, labels = test.tensors
with torch.no_grad():
    right = (model(images).argmax(-1) == labels).float().mean().item()
print(f"accuracy {right:.3f}")
run.record(accuracy=right)  # headwise
distributed.destroy_process_group()
