import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

parser = argparse.ArgumentParser(description="mixed precision training")
parser.add_argument("--epochs", default=40, type=int)
parser.add_argument("-b", "--batch-size", default=64, type=int)
parser.add_argument("--lr", default=2e-3, type=float)
parser.add_argument("--clip", default=1.0, type=float)
parser.add_argument("--seed", default=42, type=int)


class Bottleneck(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(out)))


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        Bottleneck(64),
        nn.MaxPool2d(2),
        Bottleneck(64),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.from_numpy(digits.target))
    train_set, val_set = random_split(dataset, [0.8, 0.2])
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, pin_memory=use_cuda, drop_last=True)
    val_loader = DataLoader(val_set, 256, pin_memory=use_cuda)

    model = build_model().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))
    scaler = torch.amp.GradScaler(device.type, enabled=use_cuda)

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for images, target in train_loader:
            images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
            target = target.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            total += loss.item()

        model.eval()
        correct = 0
        with torch.inference_mode(), torch.autocast(device.type, dtype=torch.bfloat16):
            for images, target in val_loader:
                images = images.to(device, memory_format=torch.channels_last)
                correct += (model(images).argmax(1).cpu() == target).sum().item()
        print(f"epoch {epoch + 1:3d}  loss {total / len(train_loader):.5f}  acc@1 {100 * correct / len(val_set):.2f}")


if __name__ == "__main__":
    main()
