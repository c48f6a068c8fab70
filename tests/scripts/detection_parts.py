import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

DATASETS, MODELS, OPTIMIZERS = {}, {}, {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


def register(registry):
    def decorator(cls):
        registry[cls.__name__] = cls
        return cls

    return decorator


def build(registry, cfg, *args, **kwargs):
    cfg = dict(cfg)
    return registry[cfg.pop("type")](*args, **cfg, **kwargs)


@register(DATASETS)
class Shapes(Dataset):
    """One to three bright (label 0) or dark (label 1) rectangles on noise."""

    def __init__(self, size, n, seed):
        self.size, self.n, self.seed = size, n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100_000 + i)
        image = 0.3 * torch.randn(1, self.size, self.size, generator=g)
        boxes, labels = [], []
        for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
            w, h = torch.randint(6, 13, (2,), generator=g).tolist()
            x = int(torch.randint(self.size - w, (1,), generator=g))
            y = int(torch.randint(self.size - h, (1,), generator=g))
            label = int(torch.randint(2, (1,), generator=g))
            image[:, y : y + h, x : x + w] += 1.5 if label == 0 else -1.5
            boxes.append([x, y, x + w, y + h])
            labels.append(label)
        return image, {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}


@register(MODELS)
class GridDetector(nn.Module):
    """In training mode (images, targets) gives a dict of losses; in evaluation images give a list of detections."""

    stride = 4

    def __init__(self, width, num_classes):
        super().__init__()
        self.num_classes = num_classes
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Conv2d(width, 1 + num_classes + 4, 1)

    def forward(self, images, targets=None):
        if self.training and targets is None:
            raise ValueError("In training mode, targets should be passed")
        out = self.head(self.backbone(torch.stack(images))).permute(0, 2, 3, 1)
        score, logits, deltas = out.split([1, self.num_classes, 4], dim=-1)
        return (
            self.losses(score[..., 0], logits, deltas, targets) if self.training else self.decode(score, logits, deltas)
        )

    def losses(self, score, logits, deltas, targets):
        wanted, cells, boxes, labels = torch.zeros_like(score), [], [], []
        for b, t in enumerate(targets):
            centers = ((t["boxes"][:, :2] + t["boxes"][:, 2:]) / 2 / self.stride).long()
            for (x, y), box, label in zip(centers.tolist(), t["boxes"], t["labels"], strict=True):
                wanted[b, y, x] = 1.0
                cells.append((b, y, x))
                boxes.append(box / (self.stride * score.size(1)))
                labels.append(label)
        where = tuple(torch.tensor(cells, device=score.device).t())
        return {
            "loss_objectness": F.binary_cross_entropy_with_logits(
                score, wanted, pos_weight=torch.tensor(10.0, device=score.device)
            ),
            "loss_classifier": F.cross_entropy(logits[where], torch.stack(labels)),
            "loss_box_reg": F.smooth_l1_loss(deltas[where].sigmoid(), torch.stack(boxes)),
        }

    def decode(self, score, logits, deltas):
        out = []
        for s, c, d in zip(score[..., 0].sigmoid(), logits, deltas, strict=True):
            keep = s > 0.5
            boxes = d[keep].sigmoid() * self.stride * s.size(0)
            out.append({"boxes": boxes, "scores": s[keep], "labels": c[keep].argmax(-1)})
        return out
