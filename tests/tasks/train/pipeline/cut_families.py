"""Families of models as users write them, each with inputs for a number of samples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trainwright.estimator.trace.cuts.model_cuts import CutModel, cut


class Residual(nn.Module):
    """Convolutions with batch norms, in-place activations and a projected skip."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(one, two, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(two)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(two, two, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(two)
        self.downsample = nn.Sequential(nn.Conv2d(one, two, 1, bias=False), nn.BatchNorm2d(two))

    def forward(self, x):
        identity = self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True))
        self.layer1 = nn.Sequential(Residual(4, 6), Residual(6, 6))
        self.pool = nn.MaxPool2d(2)
        self.layer2 = nn.Sequential(Residual(6, 8))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.layer2(self.pool(self.layer1(self.stem(x))))
        x = torch.flatten(nn.AdaptiveAvgPool2d(1)(x), 1)
        return self.fc(x)


class DoubleConv(nn.Sequential):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(
            nn.Conv2d(one, two, 3, padding=1),
            nn.GroupNorm(2, two),
            nn.ReLU(inplace=True),
            nn.Conv2d(two, two, 3, padding=1),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Skips from each resolution, kept in a list."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 6, 8)
        self.downs = nn.ModuleList(
            DoubleConv(one, two) for one, two in zip((3, 4, 6), widths, strict=True)
        )
        self.bottom = DoubleConv(8, 8)
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(one, two, 2, stride=2) for one, two in ((8, 8), (8, 6), (6, 4))
        )
        self.joins = nn.ModuleList(DoubleConv(2 * one, one) for one in reversed(widths))
        self.drop = nn.Dropout2d(0.2)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.drop(self.bottom(x))
        for up, join in zip(self.ups, self.joins, strict=True):
            x = up(x)
            skip = skips.pop()
            if x.shape[-2:] != skip.shape[-2:]:
                x = functional.interpolate(x, size=skip.shape[-2:])
            x = join(torch.cat([skip, x], dim=1))
        return self.head(x)


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(4 + 3 * n), nn.ReLU(), nn.Conv2d(4 + 3 * n, 3, 3, padding=1)
            )
            for n in range(3)
        )
        self.out = nn.Linear(13, 5)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.out(torch.cat(features, 1).mean([2, 3]))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.act = nn.Linear(width, 4 * width), nn.GELU()
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width))
        self.rate = rate

    def forward(self, x):
        skip = x
        x = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        x = self.gamma * self.pwconv2(self.act(self.pwconv1(x)))
        x = x.permute(0, 3, 1, 2)
        if self.rate > 0 and self.training:  # stochastic depth
            keep = 1 - self.rate
            mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
            x = x * mask / keep
        return skip + x


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        self.downsample_layers = nn.ModuleList()
        rates = torch.linspace(0, 0.3, 4).tolist()
        for n, (one, two) in enumerate(((3, 6), (6, 8))):
            self.downsample_layers.append(nn.Conv2d(one, two, 2, stride=2))
            self.stages.append(
                nn.Sequential(*(ConvNeXtBlock(two, rate) for rate in rates[2 * n : 2 * n + 2]))
            )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward_features(self, x):
        for n in range(len(self.stages)):
            x = self.stages[n](self.downsample_layers[n](x))
        return self.norm(x.mean([-2, -1]))

    def forward(self, x):
        return self.head(self.forward_features(x))


class LSTMAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.score = nn.Linear(10, 1)
        self.drop, self.out = nn.Dropout(0.3), nn.Linear(20, 4)

    def forward(self, tokens):
        padding = tokens == 0
        states, (last, _) = self.lstm(self.embed(tokens))
        scores = self.score(torch.tanh(states)).squeeze(-1).masked_fill(padding, -1e9)
        weights = functional.softmax(scores, dim=-1)
        context = torch.bmm(weights.unsqueeze(1), states).squeeze(1)
        last = torch.cat([last[-2], last[-1]], dim=-1)
        return self.out(self.drop(torch.cat([context, last], dim=-1)))


class Translator(nn.Module):
    """An encoder and a decoder with causal and padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(20, 8), nn.Embedding(20, 8)
        self.position = nn.Parameter(0.1 * torch.randn(1, 7, 8))
        self.transformer = nn.Transformer(
            8,
            2,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=12,
            dropout=0.2,
            batch_first=True,
        )
        self.generator = nn.Linear(8, 20)

    def forward(self, inputs):
        source, target = inputs["source"], inputs["target"]
        mask = nn.Transformer.generate_square_subsequent_mask(
            target.size(1), dtype=self.position.dtype
        )
        padding = source == 0
        found = self.transformer(
            self.source(source) * math.sqrt(8) + self.position[:, : source.size(1)],
            self.target(target) * math.sqrt(8) + self.position[:, : target.size(1)],
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.generator(found)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, hidden, attention_mask=None):
        query, key = self.split(self.query(hidden)), self.split(self.key(hidden))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.size(-1))
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = self.dropout(scores.softmax(-1))
        context = (weights @ self.split(self.value(hidden))).transpose(1, 2).contiguous()
        return context.view(*hidden.shape[:2], -1)


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.dense = SelfAttention(8, 2), nn.Linear(8, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, hidden, attention_mask):
        attended = self.dropout(self.dense(self.attention(hidden, attention_mask)))
        hidden = self.norm1(attended + hidden)
        found = self.dropout(self.down(functional.gelu(self.up(hidden))))
        return self.norm2(found + hidden)


class Bert(nn.Module):
    """Dicts in and out; the mask goes to every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(20, 8, padding_idx=0), nn.Embedding(2, 8)
        self.positions = nn.Embedding(12, 8)
        self.register_buffer("position_ids", torch.arange(12).expand((1, -1)))
        self.norm = nn.LayerNorm(8)
        self.layer = nn.ModuleList(BertLayer() for _ in range(3))
        self.pooler, self.classifier = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, batch):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        types = batch.get("token_type_ids")
        if types is None:
            types = torch.zeros_like(ids)
        _, length = ids.shape
        if length > self.positions.num_embeddings:
            raise ValueError(f"{length} tokens")
        places = self.position_ids[:, :length]
        hidden = self.norm(self.words(ids) + self.types(types) + self.positions(places))
        extended = (1.0 - mask[:, None, None, :].to(hidden.dtype)) * -10000.0
        for layer in self.layer:
            hidden = layer(hidden, attention_mask=extended)
        pooled = torch.tanh(self.pooler(hidden[:, 0]))
        return {"logits": self.classifier(pooled), "hidden": hidden}


class CausalBlock(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1)
        )
        self.heads, self.rate = heads, 0.1

    def attend(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (one.view(B, T, self.heads, C // self.heads).transpose(1, 2) for one in (q, k, v))
        y = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.rate if self.training else 0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(20, 8),
                "wpe": nn.Embedding(10, 8),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(CausalBlock(8, 2, 10) for _ in range(3)),
                "ln_f": nn.LayerNorm(8),
            }
        )
        self.lm_head = nn.Linear(8, 20, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx):
        device = idx.device
        _, t = idx.size()
        assert t <= 10, f"sequence of {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 8))
        layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        cls = self.cls_token.expand(x.shape[0], -1, -1)
        x = torch.cat((cls, x), dim=1) + self.pos_embed
        return self.head(self.norm(self.encoder(x))[:, 0])


class WindowAttention(nn.Module):
    def __init__(self, width: int, window: int, heads: int) -> None:
        super().__init__()
        self.heads, size = heads, window * window
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        steps = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        )
        flat = steps.flatten(1)
        relative = (flat[:, :, None] - flat[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer(
            "relative_position_index", relative[..., 0] * (2 * window - 1) + relative[..., 1]
        )
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.size = size

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = q * (C // self.heads) ** -0.5 @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        attn = attn + bias.view(self.size, self.size, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            windows = mask.shape[0]
            attn = attn.view(B_ // windows, windows, self.heads, N, N) + mask.unsqueeze(
                1
            ).unsqueeze(0)
            attn = attn.view(-1, self.heads, N, N)
        attn = attn.softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))


class SwinBlock(nn.Module):
    def __init__(self, width: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = WindowAttention(width, window, 2)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.side, self.window, self.shift = side, window, shift
        mask = None
        if shift:
            count = (side // window) ** 2
            mask = torch.where(
                torch.rand(count, window * window, window * window) < 0.2, -100.0, 0.0
            )
        self.register_buffer("attn_mask", mask)

    def parted(self, x):
        B, H, W, C = x.shape
        w = self.window
        x = x.view(B, H // w, w, W // w, w, C)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w * w, C)

    def joined(self, windows):
        w, side = self.window, self.side
        B = int(windows.shape[0] / (side * side / w / w))
        x = windows.view(B, side // w, side // w, w, w, -1)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, side, side, -1)

    def forward(self, x):
        B, _, C = x.shape
        shortcut = x
        x = self.norm1(x).view(B, self.side, self.side, C)
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        x = self.joined(self.attn(self.parted(x), mask=self.attn_mask))
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        x = shortcut + x.view(B, self.side * self.side, C)
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, stride=2)
        self.blocks = nn.ModuleList(SwinBlock(8, 4, 2, n % 2) for n in range(3))
        self.merge, self.head = nn.Linear(32, 8, bias=False), nn.Linear(8, 5)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        B, _, C = x.shape
        x = x.view(B, 4, 4, C)
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.head(self.merge(x.view(B, -1, 4 * C)).mean(1))


class EfficientBlock(nn.Module):
    """Attention to a coarser map, and a convolution between the products."""

    def __init__(self, width: int, ratio: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.ratio = ratio
        if ratio > 1:
            self.sr, self.norm = nn.Conv2d(width, width, ratio, ratio), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dwconv = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)

    def attend(self, x, H, W):
        B, N, C = x.shape
        q = self.q(x).reshape(B, N, 2, C // 2).permute(0, 2, 1, 3)
        if self.ratio > 1:
            x = self.sr(x.permute(0, 2, 1).reshape(B, C, H, W)).reshape(B, C, -1).permute(0, 2, 1)
            x = self.norm(x)
        k, v = self.kv(x).reshape(B, -1, 2, 2, C // 2).permute(2, 0, 3, 1, 4)
        return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(B, N, C)

    def forward(self, x, H, W):
        x = x + self.attend(self.norm1(x), H, W)
        y = self.fc1(self.norm2(x))
        B, _, C = y.shape
        y = self.dwconv(y.transpose(1, 2).view(B, C, H, W)).flatten(2).transpose(1, 2)
        return x + self.fc2(functional.gelu(y))


class SegFormer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList([nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 6, 3, 2, 1)])
        self.blocks = nn.ModuleList([EfficientBlock(4, 2), EfficientBlock(6, 1)])
        self.heads = nn.ModuleList([nn.Linear(4, 5), nn.Linear(6, 5)])
        self.fuse = nn.Sequential(nn.Conv2d(10, 5, 1, bias=False), nn.BatchNorm2d(5), nn.ReLU())
        self.drop, self.pred = nn.Dropout2d(0.1), nn.Conv2d(5, 2, 1)

    def forward(self, x):
        B = x.shape[0]
        maps = []
        for embed, block, head in zip(self.embeds, self.blocks, self.heads, strict=True):
            x = embed(x)
            H, W = x.shape[2:]
            x = block(x.flatten(2).transpose(1, 2), H, W)
            maps.append(head(x).permute(0, 2, 1).reshape(B, -1, H, W))
            x = x.reshape(B, H, W, -1).permute(0, 3, 1, 2).contiguous()
        size = maps[0].size()[2:]
        maps = [
            functional.interpolate(one, size=size, mode="bilinear", align_corners=False)
            for one in maps
        ]
        return self.pred(self.drop(self.fuse(torch.cat(maps, dim=1))))


class DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({f"column{n}": nn.Embedding(10 + n, 4) for n in range(4)})
        self.bottom = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.top = nn.Sequential(nn.Linear(4 + 10, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0))

    def forward(self, inputs):
        dense = self.bottom(inputs["numbers"])
        sparse = [table(inputs[name]) for name, table in self.tables.items()]
        every = torch.stack([dense, *sparse], dim=1)
        products = torch.bmm(every, every.transpose(1, 2))
        rows, columns = torch.tril_indices(every.shape[1], every.shape[1], offset=-1)
        return self.top(torch.cat([dense, products[:, rows, columns]], dim=1))


class VAE(nn.Module):
    """A tuple of outputs, and noise of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh())
        self.mean, self.logvar = nn.Linear(8, 3), nn.Linear(8, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 12))

    def reparameterize(self, mean, logvar):
        std = torch.exp(0.5 * logvar)
        return mean + torch.randn_like(std) * std

    def forward(self, x):
        hidden = self.encoder(x)
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        z = self.reparameterize(mean, logvar) if self.training else mean
        return torch.sigmoid(self.decoder(z)), mean, logvar


class TwoInputs(nn.Module):
    """A tuple of inputs, a layer used three times, a frozen part, and products in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(4, 8)
        self.same, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.out = nn.Linear(8, 3)

    def forward(self, pair):
        left, right = pair
        x = self.left(left) * self.right(right)
        x[:, 0] = 1.0
        for _ in range(2):
            x = torch.tanh(self.same(x)) * self.scale
        with torch.no_grad():
            gate = torch.sigmoid(self.frozen(x))
        x.mul_(gate).clamp_(-1, 1)
        return self.out(functional.dropout(x, 0.2, self.training))


class Noisy(nn.Module):
    """Weights by parametrization, a module with hooks, and an own function of autograd."""

    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -0.5 * gradient

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
        self.domain, self.label = nn.Linear(8, 2), nn.Linear(8, 3)
        self.second.register_forward_hook(lambda module, args, out: 2 * out)
        self.third.register_full_backward_hook(lambda module, gi, go: tuple(3 * one for one in gi))

    def forward(self, x):
        x = functional.relu(self.first(x))
        x = functional.relu(self.second(x))
        x = functional.selu(self.third(x))
        return self.label(x), self.domain(self.Reversed.apply(x))


def images(samples: int) -> torch.Tensor:
    return torch.randn(samples, 3, 8, 8)


def tokens(samples: int) -> torch.Tensor:
    return torch.randint(0, 20, (samples, 7)).index_fill_(1, torch.tensor([0]), 3)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "ResNet": (ResNet, images),
    "U-Net": (UNet, images),
    "DenseNet": (DenseNet, images),
    "ConvNeXt": (ConvNeXt, images),
    "LSTM with attention": (LSTMAttention, tokens),
    "encoder and decoder": (
        Translator,
        lambda n: {"source": tokens(n), "target": tokens(n)[:, :6]},
    ),
    "BERT": (
        Bert,
        lambda n: {"input_ids": tokens(n), "attention_mask": (tokens(n) > 4).long()},
    ),
    "GPT with tied embedding": (GPT, tokens),
    "ViT": (ViT, images),
    "Swin": (Swin, images),
    "SegFormer": (SegFormer, images),
    "DLRM": (
        DLRM,
        lambda n: {
            "numbers": torch.randn(n, 6),
            **{f"column{one}": torch.randint(0, 10, (n,)) for one in range(4)},
        },
    ),
    "VAE": (VAE, lambda n: torch.randn(n, 12)),
    "two inputs": (TwoInputs, lambda n: (torch.randn(n, 6), torch.randn(n, 4))),
    "hooks and own functions": (Noisy, lambda n: torch.randn(n, 6)),
}


@functools.cache
def cut_model(family: str) -> tuple[nn.Module, CutModel]:
    """A model of the family, and where it can be cut."""
    build, inputs = FAMILIES[family]
    torch.manual_seed(1)
    return build(), cut(build, inputs)
