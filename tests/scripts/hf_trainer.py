import argparse
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class ByteDataset(Dataset):
    """Source code of the standard library in blocks of bytes."""

    def __init__(self, pattern, block_size=64):
        text = b"".join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob(pattern)))
        n = len(text) // block_size * block_size
        self.blocks = torch.frombuffer(bytearray(text[:n]), dtype=torch.uint8).view(-1, block_size)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, i):
        ids = self.blocks[i].long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()

    train_dataset = ByteDataset("[a-s]*.py")
    eval_dataset = torch.utils.data.Subset(ByteDataset("t*.py"), range(256))
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    training_args = TrainingArguments(
        output_dir="out",
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=2e-3,
        warmup_steps=20,
        logging_steps=25,
        eval_strategy="steps",
        eval_steps=100,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(training_args.seed)
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model=model, args=training_args, train_dataset=train_dataset, eval_dataset=eval_dataset)
    trainer.train()
    print(trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    main()
