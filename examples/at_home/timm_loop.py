"""Train a ViT like timm's own loop, with its optimizer, schedule, loss and scaler: `python timm_loop.py --images
FOLDER`."""

import argparse

import timm
import torch
from timm.data import create_dataset, create_loader
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, NativeScaler

import headwise  # headwise
from headwise import DropKey, NeuTRENO  # headwise

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--images", required=True, help="a folder with one folder of images for each class")
parser.add_argument("--model", default="vit_tiny_patch16_224")
parser.add_argument("--size", type=int, default=224)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dataset = create_dataset("", root=args.images, split="train", is_training=True)
loader = create_loader(
    dataset,
    (3, args.size, args.size),
    batch_size=8,
    is_training=True,
    use_prefetcher=False,
    num_workers=0,
    persistent_workers=False,
    device=device,
)
model = timm.create_model(args.model, num_classes=len(dataset.reader.class_to_idx), img_size=args.size).to(device)
regularized = headwise.regularize(model, NeuTRENO(strength=0.6), DropKey(p=0.1))  # headwise
watch = headwise.watch(model, every=50)  # headwise
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
scheduler, epochs = create_scheduler_v2(optimizer, num_epochs=args.epochs, warmup_epochs=0)
criterion, scaler = LabelSmoothingCrossEntropy(0.1), NativeScaler(device=device.type)

for epoch in range(epochs):
    losses = AverageMeter()
    model.train()
    for images, labels in loader:
        loss = criterion(model(images.to(device)), labels.to(device))
        loss = loss + regularized.loss()  # headwise
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        regularized.after_step()  # headwise
        watch.step(loss)  # headwise
        losses.update(loss.item(), len(images))
    scheduler.step(epoch + 1)
    print(f"epoch {epoch}: loss {losses.avg:.3f}")
print(f"{len(watch.records())} figures of {len(regularized.fitted)} layers were read")  # headwise
