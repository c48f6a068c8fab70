"""Simulated shop listings: texts of very different length, whose words and figures say what the thing costs.

log price = product + brand + material + condition + 0.8 log(pack) + 0.5 log(relative weight) + 0.1 (rating - 4) + noise
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

COLUMNS = ("text", "price", "weight_grams", "rating", "review_count", "delivery_days")

NOISE_STD = 0.15
"""Of the log price: what no model can know."""
MEDIAN_WORDS, WORDS_LOG_STD, LEAST_WORDS, MOST_WORDS = 46, 0.7, 8, 320
"""Log-normal; a word is 1.2 tokens or so."""

_SEED = 20
_SLOT = re.compile(r"\{(\w+)\}")
_DRAWS_PER_LISTING = 512
# Name, usual price, usual weight in grams.
_PRODUCTS = (
    ("ground coffee", 9, 500), ("green tea", 6, 120), ("olive oil", 12, 900), ("dark chocolate", 4, 100),
    ("trail mix", 8, 400), ("maple syrup", 11, 650), ("basmati rice", 7, 2000), ("tomato sauce", 3, 450),
    ("hand soap", 5, 350), ("face cream", 22, 90), ("shampoo", 8, 420), ("electric toothbrush", 55, 250),
    ("water bottle", 18, 380), ("frying pan", 35, 1600), ("chef knife", 48, 300), ("cutting board", 24, 1200),
    ("desk lamp", 39, 1400), ("phone case", 14, 60), ("usb cable", 9, 70), ("wireless headphones", 95, 280),
    ("mechanical keyboard", 85, 1000), ("running shoes", 79, 650), ("rain jacket", 68, 520), ("wool socks", 12, 90),
    ("yoga mat", 28, 1100), ("camping tent", 150, 3200), ("garden hose", 32, 2400), ("cordless drill", 110, 1900),
    ("paint roller", 10, 300), ("dog food", 26, 3000), ("cat litter", 15, 5000), ("picture frame", 16, 700),
)  # fmt: skip
_BRANDS = (
    "Alderby", "Brontel", "Cavanor", "Dunmere", "Eskilda", "Fernhall", "Gransby", "Hollowick", "Istrand", "Jorvane",
    "Kestrelin", "Lorwood", "Maribeck", "Norrhaven", "Oakendal", "Pellworth", "Quillane", "Rostova", "Silverick",
    "Tamworthy", "Ulverdon", "Vantoll", "Wexmoor", "Yarrowby",
)  # fmt: skip
_MATERIALS = (
    ("", 0.0), ("organic", 0.25), ("handmade", 0.4), ("recycled", -0.1), ("premium", 0.35), ("budget", -0.4),
    ("professional", 0.5), ("classic", 0.0), ("imported", 0.15), ("limited edition", 0.6),
)  # fmt: skip
_CONDITIONS = (("new", 0.0), ("open box", -0.15), ("refurbished", -0.35), ("used, good", -0.6), ("for parts", -1.2))
_CONDITION_SHARES = (0.72, 0.80, 0.88, 0.97, 1.0)
_PACKS = (1, 1, 1, 1, 2, 2, 3, 4, 6, 12)
_SENTENCES = (
    "This {item} is made for {who} who care about {what}.", "Ideal for {place}, {place} and {place}.",
    "Ships in {colour} packaging.", "A {material} {item} in {colour} goes well with any {place}.",
    "Customers praise the {what} of our {item} again and again.", "{brand} tests every {item} for {number} hours.",
    "Keep your {item} away from {thing} and {thing}.", "{brand} stands for {what} you can rely on.",
    "Designed in {number} steps together with {who}, for lasting {what} and easy care.",
    "If you are not happy with your {item}, send it back within {number} days.", "{brand}: no {thing}, no {thing}.",
    "Available in {colour}, {colour} and {colour}; this {item} is {colour}.", "A {material} gift for {who}.",
)  # fmt: skip
_SLOTS = {
    "who": ("families", "students", "craftsmen", "beginners", "travellers", "athletes", "cooks", "gardeners"),
    "what": ("quality", "durability", "comfort", "freshness", "simplicity", "precision", "value", "cleanliness"),
    "place": ("kitchen", "office", "workshop", "garden", "bathroom", "travel", "dormitory", "balcony"),
    "colour": ("black", "white", "navy", "forest green", "terracotta", "slate", "ivory", "crimson"),
    "thing": ("direct sunlight", "moisture", "plastic waste", "strong odours", "sharp edges", "heat", "dust"),
    "number": tuple(str(number) for number in (7, 14, 24, 30, 48, 60, 100, 365)),
}


def write_listings(path: Path, *, count: int) -> None:
    """Write a csv file of listings, the same for the same `count`."""
    generator = torch.Generator().manual_seed(_SEED)
    brand_effects = (0.4 * torch.randn(len(_BRANDS), generator=generator)).tolist()
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for _ in range(count):
            uniform = torch.rand(_DRAWS_PER_LISTING, generator=generator)
            normal = torch.randn(5, generator=generator).tolist()
            writer.writerow(_draw_listing(iter(uniform.tolist()), normal, brand_effects))


def _draw_listing(uniform: Iterator[float], normal: list[float], brand_effects: list[float]) -> tuple[Any, ...]:
    product, usual_price, usual_grams = _pick(_PRODUCTS, uniform)
    brand = _pick(range(len(_BRANDS)), uniform)
    material, material_effect = _pick(_MATERIALS, uniform)
    share = next(uniform)
    condition, condition_effect = next(
        one for one, limit in zip(_CONDITIONS, _CONDITION_SHARES, strict=True) if share < limit
    )
    pack = _pick(_PACKS, uniform)
    relative_weight, rating = math.exp(0.3 * normal[0]), min(5.0, max(1.0, 4.1 + 0.5 * normal[1]))
    log_price = (
        math.log(usual_price) + brand_effects[brand] + material_effect + condition_effect
        + 0.8 * math.log(pack) + 0.5 * math.log(relative_weight) + 0.1 * (rating - 4) + NOISE_STD * normal[2]
    )  # fmt: skip
    grams = usual_grams * pack * relative_weight
    slots = {"item": (product,), "brand": (_BRANDS[brand],), "material": (material or "fine",), **_SLOTS}
    title = f"{_BRANDS[brand]} {material} {product}".replace("  ", " ")
    facts = [f"Pack of {pack}." if pack > 1 else "One piece.", f"Condition: {condition}."]
    words = min(MOST_WORDS, max(LEAST_WORDS, MEDIAN_WORDS * math.exp(WORDS_LOG_STD * normal[3])))
    text = _describe([f"{title}.", *facts], slots, int(words), uniform)
    reviews, delivery_days = round(math.exp(3.5 + 1.2 * normal[4])), 1 + int(9 * next(uniform))
    return text, f"{math.exp(log_price):.2f}", f"{grams:.0f}", f"{rating:.1f}", reviews, delivery_days


def _describe(parts: list[str], slots: dict[str, tuple[str, ...]], words: int, uniform: Iterator[float]) -> str:
    """Return some sentences, continued with drawn ones up to a number of words; the last may be cut."""
    used = sum(len(part.split()) for part in parts)
    while used < words:
        sentence = _SLOT.sub(lambda found: str(_pick(slots[found.group(1)], uniform)), _pick(_SENTENCES, uniform))
        kept = sentence.split()[: words - used]
        used += len(kept)
        parts = [*parts, " ".join(kept)]
    return " ".join(parts)


def _pick(choices: Any, uniform: Iterator[float]) -> Any:
    return choices[int(next(uniform) * len(choices))]
