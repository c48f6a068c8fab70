import argparse
import tomllib
from pathlib import Path

import torch
from detection_parts import DATASETS, MODELS, OPTIMIZERS, build
from torch.utils.data import DataLoader


def train_one_epoch(model, optimizer, loader, device, epoch, log_interval):
    model.train()
    for i, (images, targets) in enumerate(loader):
        images = [image.to(device) for image in images]
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        loss_dict = model(images, targets)
        losses = sum(loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if i % log_interval == 0:
            parts = " ".join(f"{k}: {v.item():.4f}" for k, v in loss_dict.items())
            print(f"Epoch: [{epoch}] [{i}/{len(loader)}] loss: {losses.item():.4f} {parts}")


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    wrong = sum(
        abs(len(found["labels"]) - len(target["labels"]))
        for images, targets in loader
        for found, target in zip(model([image.to(device) for image in images]), targets, strict=True)
    )
    return wrong / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default=Path(__file__).with_name("detection.toml"))
    parser.add_argument("--epochs", type=int)
    args = parser.parse_args()
    cfg = tomllib.loads(Path(args.config).read_text())

    torch.manual_seed(cfg["seed"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = cfg["data"]
    shapes = {"type": data["type"], "size": data["size"]}
    train_set = build(DATASETS, shapes, n=data["train_images"], seed=1)
    val_set = build(DATASETS, shapes, n=data["val_images"], seed=2)
    collate = lambda batch: tuple(zip(*batch))  # noqa: B905, E731
    train_loader = DataLoader(train_set, data["batch_size"], shuffle=True, collate_fn=collate)
    val_loader = DataLoader(val_set, data["batch_size"], collate_fn=collate)
    model = build(MODELS, cfg["model"]).to(device)
    optimizer = build(OPTIMIZERS, cfg["optimizer"], model.parameters())

    work_dir = Path(cfg["work_dir"])
    work_dir.mkdir(parents=True, exist_ok=True)
    for epoch in range(args.epochs or cfg["epochs"]):
        train_one_epoch(model, optimizer, train_loader, device, epoch, cfg["log_interval"])
        print(f"Epoch: [{epoch}] objects missed or invented per image: {evaluate(model, val_loader, device):.3f}")
        torch.save(model.state_dict(), work_dir / "latest.pth")


if __name__ == "__main__":
    main()
