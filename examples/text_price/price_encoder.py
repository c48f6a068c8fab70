"""Text and figures in, log price out: a transformer encoder, the mean over its tokens, a small network behind it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.errors import TargetError
from word_pieces import PADDING_ID

EncoderKind = Literal["own", "huggingface"]

FIGURES_WIDTH = 64


@dataclass(frozen=True)
class EncoderShape:
    """How large a text encoder is.

    Attributes:
        vocabulary: pieces it knows.
        limit: most tokens of a text.
        layers: transformer blocks.
        width: of a token's vector.
        heads: of the attention; they divide the width.
    """

    vocabulary: int
    limit: int
    layers: int
    width: int
    heads: int


class PriceModel(nn.Module):
    """A text encoder and the figures beside it.

    Attributes:
        encoder: token_ids `[batch, length]`, is_token `[batch, length]` -> `[batch, length, width]`.
        width: of a token's vector.
    """

    def __init__(self, encoder: TextEncoder | HuggingFaceEncoder, *, features: int, typical_log_price: float) -> None:
        """Put the network behind an encoder.

        Args:
            encoder: of the texts.
            features: figures of a listing; 0 for none.
            typical_log_price: what is predicted before anything is learned.
        """
        super().__init__()
        width = encoder.width
        self.encoder = encoder
        self.figures = nn.Sequential(nn.Linear(features, FIGURES_WIDTH), nn.GELU()) if features else None
        self.mix = nn.Linear(width + (FIGURES_WIDTH if features else 0), width)
        self.price = nn.Linear(width, 1)
        nn.init.constant_(self.price.bias, typical_log_price)

    def forward(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """Return the log prices, `[batch]`.

        Args:
            token_ids: int64 `[batch, length]`, padded with zeros.
            features: `[batch, features]`.
        """
        is_token = token_ids != PADDING_ID
        tokens = self.encoder(token_ids, is_token)
        weight = is_token.unsqueeze(2).to(tokens.dtype)
        pooled = (tokens * weight).sum(1) / weight.sum(1)
        known = pooled if self.figures is None else torch.cat([pooled, self.figures(features)], 1)
        log_prices: Tensor = self.price(F.gelu(self.mix(known))).squeeze(1)
        return log_prices

    def gradient_checkpointing_enable(self) -> None:
        """Recompute the encoder's blocks in the backward pass."""
        self.encoder.gradient_checkpointing_enable()


class TextEncoder(nn.Module):
    """A transformer encoder with normalisation before each part (Xiong et al. 2020) and learned positions.

    Without dropout, as ModernBERT (Warner et al. 2024): then padding changes nothing but rounding.
    """

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.width = shape.width
        self.words = nn.Embedding(shape.vocabulary, shape.width, padding_idx=PADDING_ID)
        self.positions = nn.Embedding(shape.limit, shape.width)
        self.blocks = nn.ModuleList(EncoderBlock(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.checkpoints_blocks = False
        self.apply(partial(_initialise, std=shape.width**-0.5))

    def forward(self, token_ids: Tensor, is_token: Tensor) -> Tensor:
        """Return a vector for each token, `[batch, length, width]`."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        hidden = self.words(token_ids) + self.positions(positions)
        attended = is_token[:, None, None, :]
        for block in self.blocks:
            if self.checkpoints_blocks and self.training and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, attended, use_reentrant=False)
            else:
                hidden = block(hidden, attended)
        encoded: Tensor = self.norm(hidden)
        return encoded

    def gradient_checkpointing_enable(self) -> None:
        """Recompute the blocks in the backward pass."""
        self.checkpoints_blocks = True


class EncoderBlock(nn.Module):
    """Self-attention and a feed-forward part: `[batch, length, width]` -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.gather = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the next vectors; `attended` `[batch, 1, 1, length]` tells which tokens are real."""
        batch, length, width = hidden.shape
        parts = self.query_key_value(self.norm1(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=attended)
        hidden = hidden + self.gather(seen.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.narrow(F.gelu(self.widen(self.norm2(hidden))))
        return hidden + added


class HuggingFaceEncoder(nn.Module):
    """A randomly initialised BERT of the `transformers` library; nothing is downloaded."""

    def __init__(self, shape: EncoderShape) -> None:
        """Build it.

        Raises:
            TargetError: `transformers` is not installed.
        """
        super().__init__()
        if not has_transformers():
            raise TargetError(
                "EXAMPLE_ENCODER=huggingface needs transformers, which is not installed",
                hint="pip install transformers, or EXAMPLE_ENCODER=own",
            )
        # Here, not above: importing an encoder of it takes seconds.
        from transformers import BertConfig, BertModel

        self.width = shape.width
        config = BertConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=4 * shape.width,
            max_position_embeddings=shape.limit,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=PADDING_ID,
            use_cache=False,
        )
        self.model: Any = BertModel(config, add_pooling_layer=False)

    def forward(self, token_ids: Tensor, is_token: Tensor) -> Tensor:
        """Return a vector for each token, `[batch, length, width]`."""
        encoded: Tensor = self.model(input_ids=token_ids, attention_mask=is_token.long()).last_hidden_state
        return encoded

    def gradient_checkpointing_enable(self) -> None:
        """Recompute the layers in the backward pass."""
        if hasattr(self.model, "activation_checkpointing_enable"):  # its name in transformers 5, which warns of the old
            self.model.activation_checkpointing_enable()
        else:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def build_encoder(kind: EncoderKind, shape: EncoderShape) -> TextEncoder | HuggingFaceEncoder:
    """Return an encoder with random weights.

    Raises:
        TargetError: `transformers` is asked for and not installed.
    """
    return TextEncoder(shape) if kind == "own" else HuggingFaceEncoder(shape)


def has_transformers() -> bool:
    """Return whether the `transformers` library is installed."""
    return importlib.util.find_spec("transformers") is not None


def _initialise(module: nn.Module, *, std: float) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()
