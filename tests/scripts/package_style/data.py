import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def get_loaders(batch_size):
    digits = load_digits()
    images, target = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, val = TensorDataset(images[:1500], target[:1500]), TensorDataset(images[1500:], target[1500:])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(val, batch_size=batch_size)
