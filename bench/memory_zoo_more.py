"""More models of `memory_zoo.py`: convolutions in one and three dimensions, vocoders, recommendation, tagging, super
resolution, several networks at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class TemporalNet(nn.Module):
    """Dilated causal convolutions with weight norm and skips."""

    def __init__(self, width: int = 256, layers: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv1d(64, width, 1)
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 3, dilation=2**layer))
            for layer in range(layers)
        )
        self.last = nn.Conv1d(width, 64, 1)

    def forward(self, value: Tensor, target: Tensor) -> Tensor:
        out = self.first(value)
        for number, layer in enumerate(self.layers):
            padded = functional.pad(out, (2 * 2**number, 0))
            out = out + functional.dropout(functional.relu(layer(padded)), 0.1, self.training)
        return functional.mse_loss(self.last(out), target)


class Vocoder(nn.Module):
    """Transposed convolutions that widen a spectrogram to a waveform, with dilated residual blocks."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, width, 7, padding=3)
        rates = (8, 8, 2, 2)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(width >> number, width >> (number + 1), 2 * rate, rate, padding=rate // 2)
            for number, rate in enumerate(rates)
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Conv1d(width >> (n + 1), width >> (n + 1), 3, padding=d, dilation=d) for d in (1, 3, 5))
            for n in range(len(rates))
        )
        self.last = nn.Conv1d(width >> len(rates), 1, 7, padding=3)

    def forward(self, value: Tensor, target: Tensor) -> Tensor:
        out = self.first(value)
        for up, block in zip(self.ups, self.blocks, strict=True):
            out = up(functional.leaky_relu(out, 0.1))
            for layer in block:  # type: ignore[attr-defined]
                out = out + layer(functional.leaky_relu(out, 0.1))
        return functional.l1_loss(torch.tanh(self.last(out)), target)


class VolumeNet(nn.Module):
    """A small U-Net of volumes, as for medical pictures."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            layers: list[nn.Module] = []
            for one in (before, after):
                layers += [nn.Conv3d(one, after, 3, padding=1), nn.InstanceNorm3d(after, affine=True), nn.LeakyReLU()]
            return nn.Sequential(*layers)

        self.down = nn.ModuleList((block(1, width), block(width, 2 * width), block(2 * width, 4 * width)))
        self.up = nn.ModuleList(nn.ConvTranspose3d(one * width, one * width // 2, 2, stride=2) for one in (4, 2))
        self.merge = nn.ModuleList((block(4 * width, 2 * width), block(2 * width, width)))
        self.last = nn.Conv3d(width, 4, 1)

    def forward(self, value: Tensor, labels: Tensor) -> Tensor:
        kept, out = [], value
        for number, layer in enumerate(self.down):
            out = layer(out if number == 0 else functional.max_pool3d(out, 2))
            kept.append(out)
        for up, merge, skip in zip(self.up, self.merge, kept[1::-1], strict=True):
            out = merge(torch.cat([up(out), skip], 1))
        return functional.cross_entropy(self.last(out), labels)


class Recommender(nn.Module):
    """Bags of embeddings, and their products with dense features."""

    def __init__(self, tables: int = 16, rows: int = 100_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.last = nn.Linear(256, 1)

    def forward(self, dense: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
        low = self.bottom(dense)
        rows = torch.stack([low, *(table(one) for table, one in zip(self.tables, ids.unbind(1), strict=True))], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))
        first, second = torch.tril_indices(rows.shape[1], rows.shape[1], -1)
        out = self.last(self.top(torch.cat([low, products[:, first, second]], -1)))
        return functional.binary_cross_entropy_with_logits(out.squeeze(-1), wanted)


class Tagger(nn.Module):
    """A bidirectional LSTM over characters and words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50_000, 300, padding_idx=0)
        self.layers = nn.LSTM(300, 256, 2, bidirectional=True, batch_first=True, dropout=0.3)
        self.last = nn.Linear(512, 20)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        out, _ = self.layers(functional.dropout(self.words(ids), 0.3, self.training))
        return functional.cross_entropy(self.last(out).transpose(1, 2), labels)


class SuperResolution(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(True), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(blocks)
        )
        self.up = nn.Sequential(nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2))
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, value: Tensor, target: Tensor) -> Tensor:
        out = first = self.first(value)
        for block in self.blocks:
            out = out + 0.1 * block(out)
        return functional.l1_loss(self.last(self.up(out + first)), target)


class Critics(nn.Module):
    """Generator and critic of pictures in one loss, as in a step of each."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        parts: list[nn.Module] = [
            nn.ConvTranspose2d(128, 8 * width, 4, 1, 0),
            nn.BatchNorm2d(8 * width),
            nn.ReLU(True),
        ]
        for one in (8, 4, 2):
            parts += [nn.ConvTranspose2d(one * width, one * width // 2, 4, 2, 1), nn.BatchNorm2d(one * width // 2)]
            parts += [nn.ReLU(True)]
        self.generator = nn.Sequential(*parts, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())
        judge: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, True)]
        for one in (1, 2, 4):
            judge += [nn.utils.parametrizations.spectral_norm(nn.Conv2d(one * width, 2 * one * width, 4, 2, 1))]
            judge += [nn.LeakyReLU(0.2, True)]
        self.critic = nn.Sequential(*judge, nn.Conv2d(8 * width, 1, 4, 1, 0))

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        made = self.generator(noise)
        found: Tensor = (
            functional.softplus(-self.critic(real)).mean() + functional.softplus(self.critic(made.detach())).mean()
        )
        return found + functional.softplus(-self.critic(made)).mean()


def _pairs(*shapes: tuple[int, ...]) -> Callable[[int], Any]:
    return lambda count: tuple(torch.randn(count, *shape) for shape in shapes)


def _volumes(count: int) -> Any:
    return torch.randn(count, 1, 64, 64, 64), torch.zeros(count, 64, 64, 64, dtype=torch.long)


def _clicks(count: int) -> Any:
    return torch.randn(count, 13), torch.randint(0, 100_000, (count, 16, 8)), torch.zeros(count)


def _words(count: int) -> Any:
    return torch.randint(1, 50_000, (count, 128)), torch.zeros(count, 128, dtype=torch.long)


def segment(model: nn.Module, batch: Any) -> Tensor:
    labels = torch.zeros(batch[0].shape[0], *batch[0].shape[2:], dtype=torch.long)
    return functional.cross_entropy(model(batch[0])["out"], labels)


ROWS: tuple[tuple[str, str, Callable[[], nn.Module], Callable[[int], Any], int], ...] = (
    ("tcn", "convolution", TemporalNet, _pairs((64, 4096), (64, 4096)), 16),
    ("vocoder", "speech", Vocoder, _pairs((80, 64), (1, 64 * 256)), 16),
    ("unet3d", "vision", VolumeNet, _volumes, 4),
    ("dlrm", "recommendation", Recommender, _clicks, 2048),
    ("bilstm", "recurrent", Tagger, _words, 64),
    ("edsr", "vision", SuperResolution, _pairs((3, 48, 48), (3, 96, 96)), 16),
    ("dcgan", "gan", Critics, _pairs((3, 64, 64), (128, 1, 1)), 64),
)
