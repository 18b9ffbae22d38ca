"""The digits study as a script: plain torch, with the seeds that headwise derives for a task."""

import sys

import torch
from torch.nn import functional as F

import headwise
from headwise.attend.regularizing.parameter_groups import parameter_groups
from headwise.lab.experiments.configuration import derive
from headwise.lab.studies.digits import Digits

epochs, train_size, test_size = map(int, sys.argv[1:4])
run = headwise.run()
torch.set_num_threads(1)
task = Digits()
images, digits = task.data("train")
chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(derive(run.seed, "train_size")))[
    :train_size
]
images, digits = images[chosen], digits[chosen]
torch.manual_seed(derive(run.seed, "weights"))
model = task.model()
handle = run.regularize(model)
optimizer = torch.optim.AdamW(parameter_groups(model, task.learning_rate, task.weight_decay), lr=task.learning_rate)
step = 0
for epoch in range(1, epochs + 1):
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(derive(run.seed, "order", epoch)))
    torch.manual_seed(derive(run.seed, "model", epoch, 0))
    model.train()
    for index in order.split(task.batch_size):
        run.saw(index)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[index]), digits[index])
        (loss + handle.loss()).backward()
        optimizer.step()
        handle.after_step()
        step += 1
        run.log(step=step, loss=loss.item())
model.eval()
images, digits = task.data("test")
chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(derive(0, "test_size")))[:test_size]
images, digits = images[chosen], digits[chosen]
with torch.no_grad():
    right = (model(images).argmax(-1) == digits).double().mean()
run.record(accuracy=right.item())
