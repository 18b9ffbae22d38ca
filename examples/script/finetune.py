"""Fine-tune a pretrained folder with a Trainer: `python finetune.py --model FOLDER --data train.csv test.csv`."""

import argparse
import csv

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed

import headwise  # headwise

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a folder with a model and its tokenizer")
parser.add_argument("--data", nargs=2, required=True, help="two CSV files with the columns text and label")
parser.add_argument("--lr", type=float, default=5e-5)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--out", default="out")
args = parser.parse_args()


def rows(path):
    with open(path, newline="", encoding="utf-8") as stream:
        found = list(csv.DictReader(stream))
    texts = tokenizer([row["text"] for row in found], truncation=True, padding="max_length", max_length=32)
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": int(row["label"])}
        for ids, mask, row in zip(*texts_of(texts), found)
    ]


def texts_of(texts):
    return texts["input_ids"], texts["attention_mask"]


def accuracy(predicted):
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


run = headwise.run()  # headwise
set_seed(run.seed)  # headwise
tokenizer = AutoTokenizer.from_pretrained(args.model)
training, test = map(rows, args.data)
model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
settings = TrainingArguments(
    output_dir=str(run.folder),  # headwise
    seed=run.seed,  # headwise
    max_steps=args.steps,
    learning_rate=args.lr,
    per_device_train_batch_size=8,
    logging_steps=1,
    save_steps=50,
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(
    model=model,
    args=settings,
    train_dataset=training,
    eval_dataset=test,
    compute_metrics=accuracy,
    callbacks=[headwise.HeadwiseCallback()],  # headwise
)
trainer.train(resume_from_checkpoint=bool(list(run.folder.glob("checkpoint-*"))))  # headwise
print(trainer.evaluate())
