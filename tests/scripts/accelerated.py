import argparse

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size):
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    train = DataLoader(TensorDataset(x[:1437], y[:1437]), batch_size=batch_size, shuffle=True)
    return train, DataLoader(TensorDataset(x[1437:], y[1437:]), batch_size=batch_size)


def evaluate(accelerator, model, loader):
    model.eval()
    predictions, references = [], []
    for x, y in loader:
        with torch.no_grad():
            out = model(x)
        prediction, reference = accelerator.gather_for_metrics((out.argmax(dim=-1), y))
        predictions.append(prediction.cpu())
        references.append(reference.cpu())
    return (torch.cat(predictions) == torch.cat(references)).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    set_seed(args.seed)
    train_loader, eval_loader = get_dataloaders(args.batch_size)
    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    total = args.epochs * len(train_loader)
    scheduler = LambdaLR(optimizer, lambda step: max(0.05, 1 - step / total))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        model.train()
        total_loss = 0.0
        for x, y in train_loader:
            with accelerator.accumulate(model):
                loss = criterion(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total_loss += loss.detach().item()
        accelerator.print(f"epoch {epoch}: loss {total_loss / len(train_loader):.5f}")
    accelerator.print(f"accuracy {evaluate(accelerator, model, eval_loader):.4f}")


if __name__ == "__main__":
    main()
