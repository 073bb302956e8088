"""The models of `memory_zoo.py`: public architectures in sizes that people train, with random weights.

A model that a machine cannot build (a package is missing, or too old) is reported and skipped.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from memory_zoo_more import ROWS, segment
from torch import Tensor, nn
from torch.nn import functional

Batch = Callable[[int], Any]


@dataclass(frozen=True)
class Entry:
    """`make()` builds the model on the default device, `batch(n)` a batch there; `size` is the micro-batch."""

    name: str
    family: str
    make: Callable[[], nn.Module]
    batch: Batch
    size: int
    loss: Callable[[nn.Module, Any], Tensor] | None = None


# Batches.


def text(length: int, vocab: int = 30_000, **more: Callable[[int], Tensor]) -> Batch:
    def make(count: int) -> dict[str, Tensor]:
        ids = torch.randint(5, vocab, (count, length))
        return {"input_ids": ids, "labels": ids.clone(), **{key: one(count) for key, one in more.items()}}

    return make


def classes(length: int, vocab: int = 30_000) -> Batch:
    return lambda count: {
        "input_ids": torch.randint(5, vocab, (count, length)),
        "attention_mask": torch.ones(count, length, dtype=torch.long),
        "labels": torch.zeros(count, dtype=torch.long),
    }


def images(side: int, labels: Callable[[int], Tensor] | None = None) -> Batch:
    wanted = labels or (lambda count: torch.zeros(count, dtype=torch.long))
    return lambda count: {"pixel_values": torch.randn(count, 3, side, side), "labels": wanted(count)}


def video(count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 16, 3, 224, 224), "labels": torch.zeros(count, dtype=torch.long)}


def pixels(side: int) -> Batch:
    return lambda count: (torch.randn(count, 3, side, side), torch.zeros(count, dtype=torch.long))


# Models of transformers.


def hf(head: str, kind: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        attention = settings.get("attention")
        given = {key: value for key, value in settings.items() if key not in ("attention", "recompute")}
        config = transformers.AutoConfig.for_model(kind, **given)
        how = {"attn_implementation": attention} if attention else {}
        model: nn.Module = getattr(transformers, head)._from_config(config, **how)
        if settings.get("recompute"):
            is_new = hasattr(model, "activation_checkpointing_enable")  # transformers 5.23; the old name warns
            getattr(model, f"{'activation' if is_new else 'gradient'}_checkpointing_enable")()
        return model

    return make


def decoder(layers: int = 12, width: int = 768, heads: int = 12, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "vocab_size": 32_000,
        **more,
    }


_LLAMA = decoder(16, 1024, 16, intermediate_size=2816, num_key_value_heads=4)


def adapted(make: Callable[[], nn.Module], rank: int = 16) -> Callable[[], nn.Module]:
    """Low-rank adapters as `peft` makes them, without that package: q_proj and v_proj."""

    def build() -> nn.Module:
        model = make()
        for weight in model.parameters():
            weight.requires_grad_(False)
        for module in list(model.modules()):
            for name in ("q_proj", "v_proj"):
                linear = getattr(module, name, None)
                if isinstance(linear, nn.Linear):
                    setattr(module, name, _Adapted(linear, rank))
        return model

    return build


class _Adapted(nn.Module):
    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear, self.dropout = linear, nn.Dropout(0.05)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.linear(value)
        return out + self.up(self.down(self.dropout(value))) * 2.0


class _FourBit(nn.Module):
    """A frozen linear layer of 4-bit weights, as QLoRA keeps them, in plain PyTorch: 64 of them share a scale. The
    weight exists in half precision during each product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        count = linear.weight.numel()
        self.register_buffer("packed", torch.zeros(count // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.ones(count // 64))

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = _FourBitProduct.apply(value, self.packed, self.scales, self.out_features)  # type: ignore[no-untyped-call]
        return out


class _FourBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, packed: Tensor, scales: Tensor, num_outputs: int) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.num_outputs, ctx.dtype = num_outputs, value.dtype
        return functional.linear(value, _unpacked(packed, scales, num_outputs).to(value.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        packed, scales = ctx.saved_tensors
        weight = _unpacked(packed, scales, ctx.num_outputs).to(grad.dtype)
        return (grad @ weight).to(ctx.dtype), None, None, None


def _unpacked(packed: Tensor, scales: Tensor, num_outputs: int) -> Tensor:
    halves = torch.stack([packed & 15, packed >> 4], dim=-1).to(torch.bfloat16)
    return (halves.view(-1, 64) * scales[:, None].to(torch.bfloat16)).view(num_outputs, -1)


def quantized(make: Callable[[], nn.Module], rank: int = 16) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = adapted(make, rank)()
        for module in list(model.modules()):
            for name, linear in list(module.named_children()):
                if isinstance(linear, nn.Linear) and not linear.weight.requires_grad and name != "lm_head":
                    setattr(module, name, _FourBit(linear))
        return model

    return build


# Models of torch itself.


class LstmModel(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20_000, 512)
        self.layers: nn.Module = kind(512, 1024, 2, batch_first=True, dropout=0.1)  # type: ignore[call-arg]
        self.head = nn.Linear(1024, 20_000)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        out, _ = self.layers(self.embedding(input_ids))
        return functional.cross_entropy(self.head(out).flatten(0, 1), labels.flatten())


class EncoderModel(nn.Module):
    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(20_000, 512)
        self.layers = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = nn.Linear(512, 20_000)
        self._is_causal = is_causal

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1]) if self._is_causal else None
        out = self.layers(self.embedding(input_ids), mask=mask, is_causal=self._is_causal)
        return functional.cross_entropy(self.head(out).flatten(0, 1), labels.flatten())


class _Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1))
        self.time = nn.Linear(256, after)
        self.second = nn.Sequential(nn.GroupNorm(32, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1))
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, value: Tensor, time: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(value) + self.time(time)[:, :, None, None]) + self.skip(value)
        return out


class UNet(nn.Module):
    """A denoiser as in image diffusion: residual blocks, GroupNorm, skips, no attention."""

    def __init__(self, width: int = 128, depths: tuple[int, ...] = (1, 2, 4)) -> None:
        super().__init__()
        widths = [width * factor for factor in depths]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256))
        befores = [width, *widths[:-1]]
        self.downs = nn.ModuleList(_Residual(a, b) for a, b in zip(befores, widths, strict=True))
        self.pools = nn.ModuleList(nn.Conv2d(b, b, 3, stride=2, padding=1) for b in widths)
        self.middle = _Residual(widths[-1], widths[-1])
        self.ups = nn.ModuleList(_Residual(b * 2, a) for a, b in reversed(list(zip(befores, widths, strict=True))))
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, value: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(-math.log(10_000) * torch.arange(32) / 32)
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        out, kept = self.first(value), []
        for down, pool in zip(self.downs, self.pools, strict=True):
            out = down(out, time)
            kept.append(out)
            out = pool(out)
        out = self.middle(out, time)
        for up in self.ups:
            out = functional.interpolate(out, scale_factor=2.0, mode="nearest")
            out = up(torch.cat([out, kept.pop()], dim=1), time)
        result: Tensor = self.last(out)
        return result


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(32, width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self._heads = heads

    def forward(self, value: Tensor) -> Tensor:
        rows = self.norm(value).flatten(2).transpose(1, 2)
        query, key, got = self.qkv(rows).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, got).transpose(1, 2).flatten(2)
        return value + self.out(mixed).transpose(1, 2).reshape(value.shape)


class AttentionUNet(nn.Module):
    """A denoiser of latents as in Stable Diffusion: residual blocks with attention at every scale."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 256), nn.SiLU(), nn.Linear(256, 256))
        self.first, self.last = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        widths = (width, 2 * width, 4 * width)
        self.downs = nn.ModuleList(_Residual(a, b) for a, b in zip((width, *widths[:-1]), widths, strict=True))
        self.ups = nn.ModuleList(
            _Residual(2 * b, a) for a, b in reversed(list(zip((width, *widths[:-1]), widths, strict=True)))
        )
        self.mixers = nn.ModuleList(_Attention(one) for one in widths)
        self.pools = nn.ModuleList(nn.Conv2d(one, one, 3, stride=2, padding=1) for one in widths)

    def forward(self, value: Tensor, time: Tensor) -> Tensor:
        time, out, kept = self.time(time[:, None]), self.first(value), []
        for down, mixer, pool in zip(self.downs, self.mixers, self.pools, strict=True):
            out = mixer(down(out, time))
            kept.append(out)
            out = pool(out)
        for up in self.ups:
            out = functional.interpolate(out, scale_factor=2.0, mode="nearest")
            out = up(torch.cat([out, kept.pop()], dim=1), time)
        result: Tensor = self.last(out)
        return result


def denoise(model: nn.Module, batch: Any) -> Tensor:
    noise = torch.randn_like(batch[0])
    return functional.mse_loss(model(batch[0] + noise, batch[1]), noise)


def noisy(side: int, channels: int = 3) -> Batch:
    return lambda count: (torch.randn(count, channels, side, side), torch.rand(count))


class _DiTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self._heads = heads

    def forward(self, value: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(time)[:, None].chunk(6, dim=-1)
        mixed = self.norms[0](value) * (1 + scale) + shift
        query, key, got = self.qkv(mixed).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, got).transpose(1, 2).flatten(2)
        value = value + gate * self.out(mixed)
        return value + gate2 * self.mlp(self.norms[1](value) * (1 + scale2) + shift2)


class DiT(nn.Module):
    def __init__(self, width: int = 768, layers: int = 12, patch: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros(1, 256, width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(_DiTBlock(width, 12) for _ in range(layers))
        self.last = nn.Linear(width, patch * patch * 4)

    def forward(self, value: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(-math.log(10_000) * torch.arange(128) / 128)
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        out = self.patches(value).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            out = block(out, time)
        out = self.last(out).unflatten(-1, (2, 2, 4)).unflatten(1, (16, 16)).permute(0, 5, 1, 3, 2, 4)
        return out.flatten(4, 5).flatten(2, 3)


class GraphAttention(nn.Module):
    """Message passing over an edge list, as graph libraries do it: gather, softmax by index, scatter."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(128, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scores = nn.ModuleList(nn.Linear(2 * width, 1) for _ in range(layers))
        self.last = nn.Linear(width, 40)

    def forward(self, features: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        source, target = edges.reshape(-1, 2).unbind(-1)
        value = self.first(features.flatten(0, 1))
        for layer, score in zip(self.layers, self.scores, strict=True):
            sent = layer(value)
            weight = functional.leaky_relu(score(torch.cat([sent[source], sent[target]], dim=-1))).exp()
            total = torch.zeros(value.shape[0], 1, dtype=weight.dtype).index_add_(0, target, weight)
            message = (sent[source] * weight / (total[target] + 1e-6)).to(value.dtype)
            value = functional.relu(torch.zeros_like(value).index_add_(0, target, message) + value)
        return functional.cross_entropy(self.last(value), labels.flatten())


def graph(count: int) -> tuple[Tensor, ...]:
    nodes = 2048
    edges = torch.randint(0, nodes, (count, nodes * 8, 2)) + nodes * torch.arange(count)[:, None, None]
    return torch.randn(count, nodes, 128), edges, torch.zeros(count, nodes, dtype=torch.long)


def peft_adapted(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import peft

        settings = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
        model: nn.Module = peft.get_peft_model(make(), settings)  # type: ignore[arg-type]
        return model

    return build


def stable_unet() -> nn.Module:
    import diffusers

    widths = (160, 320, 640, 640)
    model: nn.Module = diffusers.UNet2DConditionModel(block_out_channels=widths, cross_attention_dim=768)
    return model


def conditioned(count: int) -> tuple[Tensor, ...]:
    return torch.randn(count, 4, 32, 32), torch.zeros(count, dtype=torch.long), torch.randn(count, 77, 768)


def denoise_conditioned(model: nn.Module, batch: Any) -> Tensor:
    noise = torch.randn_like(batch[0])
    return functional.mse_loss(model(batch[0] + noise, batch[1], batch[2]).sample, noise)


def vision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        settings = {"weights_backbone": None} if "segmentation" in name else {}
        make_one = operator.attrgetter(name)(torchvision.models)
        model: nn.Module = make_one(weights=None, **settings)
        return model

    return make


def tim(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False, **settings)
        return model

    return make


def _labels_per_pixel(side: int) -> Callable[[int], Tensor]:
    return lambda count: torch.zeros(count, side, side, dtype=torch.long)


def classify(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def zoo() -> tuple[Entry, ...]:
    """What is hardest to foresee comes first: a run that is cut has measured it."""
    first = (*_sequences(), *_pictures(), *_others(), *_mixtures_and_states())
    return (*first, *_decoders(), *_encoders(), *_more())


def _more() -> tuple[Entry, ...]:
    videos = lambda count: (torch.randn(count, 3, 16, 112, 112), torch.zeros(count, dtype=torch.long))  # noqa: E731
    return (
        *(Entry(*row) for row in ROWS),
        Entry("llama-peft", "lora", peft_adapted(hf("LlamaForCausalLM", "llama", **_LLAMA)), text(1024), 4),
        Entry("sd-unet", "diffusion", stable_unet, conditioned, 8, denoise_conditioned),
        Entry("resnext50", "vision", vision("resnext50_32x4d"), pixels(224), 32, classify),
        Entry("swin-t", "vision", vision("swin_t"), pixels(224), 32, classify),
        Entry("efficientnet-v2", "vision", vision("efficientnet_v2_s"), pixels(224), 16, classify),
        Entry("vgg16", "vision", vision("vgg16_bn"), pixels(224), 32, classify),
        Entry("shufflenet", "vision", vision("shufflenet_v2_x1_0"), pixels(224), 32, classify),
        Entry("deeplab", "vision", vision("segmentation.deeplabv3_resnet50"), pixels(256), 8, segment),
        Entry("r3d", "vision", vision("video.r3d_18"), videos, 8, classify),
    )


def _decoders() -> tuple[Entry, ...]:
    make = functools.partial(hf, "LlamaForCausalLM", "llama", **_LLAMA)
    small = decoder(12, 768, 12)
    return (
        Entry("llama", "decoder", make(), text(1024), 4),
        Entry("llama-eager", "decoder", make(attention="eager"), text(512), 4),
        Entry("llama-recompute", "decoder", make(recompute=True), text(1024), 8),
        Entry("llama-lora", "lora", adapted(make()), text(1024), 4),
        Entry("llama-qlora", "qlora", quantized(make()), text(1024), 4),
        Entry("qwen2-qlora", "qlora", quantized(hf("Qwen2ForCausalLM", "qwen2", **_LLAMA)), text(512), 8),
        Entry("llama-tied", "decoder", make(tie_word_embeddings=True), text(512), 4),
        Entry("gpt2", "decoder", hf("GPT2LMHeadModel", "gpt2"), text(1024), 4),
        Entry("gpt2-eager", "decoder", hf("GPT2LMHeadModel", "gpt2", attention="eager"), text(512), 4),
        Entry(
            "gpt-neox",
            "decoder",
            hf("GPTNeoXForCausalLM", "gpt_neox", **small, intermediate_size=3072),
            text(1024),
            4,
        ),
        Entry("opt", "decoder", hf("OPTForCausalLM", "opt", **small, ffn_dim=3072), text(1024), 4),
        Entry("qwen2", "decoder", hf("Qwen2ForCausalLM", "qwen2", **_LLAMA), text(1024), 4),
        Entry("qwen2-lora", "lora", adapted(hf("Qwen2ForCausalLM", "qwen2", **_LLAMA)), text(1024), 8),
        Entry("qwen3", "decoder", hf("Qwen3ForCausalLM", "qwen3", **_LLAMA, head_dim=64), text(1024), 4),
        Entry(
            "mistral-window",
            "decoder",
            hf("MistralForCausalLM", "mistral", **_LLAMA, sliding_window=256),
            text(1024),
            4,
        ),
        Entry("gemma2", "decoder", hf("Gemma2ForCausalLM", "gemma2", **{**_LLAMA, "head_dim": 64}), text(512), 4),
        Entry(
            "gemma3", "decoder", hf("Gemma3ForCausalLM", "gemma3_text", **{**_LLAMA, "head_dim": 64}), text(512), 4
        ),
        Entry("phi3", "decoder", hf("Phi3ForCausalLM", "phi3", **_LLAMA, pad_token_id=0), text(1024), 4),
        Entry("falcon", "decoder", hf("FalconForCausalLM", "falcon", **small), text(1024), 4),
        Entry(
            "bloom",
            "decoder",
            hf(
                "BloomForCausalLM",
                "bloom",
                vocab_size=32_000,
                hidden_size=768,
                n_layer=12,
                n_head=12,
                attention="eager",
            ),
            text(512),
            4,
        ),
        Entry("olmo2", "decoder", hf("Olmo2ForCausalLM", "olmo2", **_LLAMA), text(1024), 4),
    )


def _mixtures_and_states() -> tuple[Entry, ...]:
    experts = {**_LLAMA, "num_hidden_layers": 6, "intermediate_size": 1024}
    moe = {**experts, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024, "num_experts": 16}
    return (
        Entry("mixtral", "moe", hf("MixtralForCausalLM", "mixtral", **experts, num_local_experts=8), text(512), 4),
        Entry("qwen2-moe", "moe", hf("Qwen2MoeForCausalLM", "qwen2_moe", **moe, num_experts_per_tok=2), text(512), 4),
        Entry(
            "olmoe",
            "moe",
            hf("OlmoeForCausalLM", "olmoe", **experts, num_experts=16, num_experts_per_tok=4),
            text(512),
            4,
        ),
        Entry(
            "deepseek-v2",
            "moe",
            hf(
                "DeepseekV2ForCausalLM",
                "deepseek_v2",
                **{**moe, "num_key_value_heads": 16},
                n_routed_experts=16,
                n_shared_experts=1,
                num_experts_per_tok=4,
                n_group=1,
                topk_group=1,
                q_lora_rank=384,
                kv_lora_rank=128,
                qk_rope_head_dim=32,
                qk_nope_head_dim=64,
                v_head_dim=64,
            ),
            text(512),
            4,
        ),
        Entry(
            "mamba",
            "state space",
            hf("MambaForCausalLM", "mamba", hidden_size=512, num_hidden_layers=6, vocab_size=32_000),
            text(256),
            2,
        ),
        Entry(
            "mamba2",
            "state space",
            hf(
                "Mamba2ForCausalLM",
                "mamba2",
                hidden_size=512,
                num_hidden_layers=6,
                vocab_size=32_000,
                num_heads=16,
                head_dim=64,
            ),
            text(512),
            2,
        ),
        Entry(
            "rwkv",
            "state space",
            hf(
                "RwkvForCausalLM", "rwkv", hidden_size=512, num_hidden_layers=4, vocab_size=32_000, context_length=256
            ),
            text(128),
            4,
        ),
    )


def _encoders() -> tuple[Entry, ...]:
    return (
        Entry("bert", "encoder", hf("BertForMaskedLM", "bert"), text(512), 8),
        Entry("bert-classes", "encoder", hf("BertForSequenceClassification", "bert"), classes(256), 16),
        Entry("roberta", "encoder", hf("RobertaForMaskedLM", "roberta", max_position_embeddings=514), text(512), 8),
        Entry("distilbert", "encoder", hf("DistilBertForSequenceClassification", "distilbert"), classes(256), 16),
        Entry(
            "deberta-v2",
            "encoder",
            hf(
                "DebertaV2ForSequenceClassification",
                "deberta-v2",
                hidden_size=768,
                num_hidden_layers=12,
                num_attention_heads=12,
                intermediate_size=3072,
                vocab_size=32_000,
                relative_attention=True,
                position_buckets=256,
                pos_att_type=["p2c", "c2p"],
                attention="eager",
            ),
            classes(256),
            8,
        ),
        Entry(
            "albert",
            "encoder",
            hf("AlbertForMaskedLM", "albert", hidden_size=768, num_attention_heads=12, intermediate_size=3072),
            text(512),
            8,
        ),
        Entry(
            "modernbert",
            "encoder",
            hf("ModernBertForMaskedLM", "modernbert", vocab_size=32_000, num_hidden_layers=12, pad_token_id=0),
            text(512),
            8,
        ),
        Entry(
            "electra",
            "encoder",
            hf("ElectraForSequenceClassification", "electra", hidden_size=512, num_attention_heads=8),
            classes(256),
            16,
        ),
        Entry("encoder-causal", "encoder", functools.partial(EncoderModel, is_causal=True), text(512, 20_000), 8),
        Entry("encoder-torch", "encoder", functools.partial(EncoderModel, is_causal=False), text(512, 20_000), 8),
    )


_CTC = {"layerdrop": 0.0, "mask_time_prob": 0.0, "ctc_loss_reduction": "mean"}


def _sequences() -> tuple[Entry, ...]:
    both = {"vocab_size": 32_000, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6}
    features = {
        "num_mel_bins": 80,
        "max_source_positions": 500,
        "max_target_positions": 256,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
    }
    return (
        Entry(
            "t5",
            "encoder-decoder",
            hf(
                "T5ForConditionalGeneration",
                "t5",
                decoder_start_token_id=0,
                d_model=768,
                d_ff=3072,
                num_layers=8,
                num_heads=12,
            ),
            text(512),
            8,
        ),
        Entry("bart", "encoder-decoder", hf("BartForConditionalGeneration", "bart", **both), text(512), 8),
        Entry("pegasus", "encoder-decoder", hf("PegasusForConditionalGeneration", "pegasus", **both), text(256), 8),
        Entry(
            "whisper",
            "speech",
            hf("WhisperForConditionalGeneration", "whisper", **{**both, "vocab_size": 51_865}, **features),
            lambda n: {"input_features": torch.randn(n, 80, 1000), "labels": torch.randint(5, 30_000, (n, 200))},
            8,
        ),
        Entry(
            "wav2vec2",
            "speech",
            hf(
                "Wav2Vec2ForCTC",
                "wav2vec2",
                num_hidden_layers=6,
                vocab_size=64,
                **_CTC,
            ),
            lambda n: {"input_values": torch.randn(n, 64_000), "labels": torch.randint(1, 60, (n, 40))},
            4,
        ),
        Entry(
            "conformer",
            "speech",
            hf("Wav2Vec2ConformerForCTC", "wav2vec2-conformer", num_hidden_layers=4, vocab_size=64, **_CTC),
            lambda n: {"input_values": torch.randn(n, 64_000), "labels": torch.randint(1, 60, (n, 40))},
            4,
        ),
        Entry("lstm", "recurrent", LstmModel, text(256, 20_000), 32),
        Entry("gru", "recurrent", functools.partial(LstmModel, nn.GRU), text(256, 20_000), 32),
    )


def _pictures() -> tuple[Entry, ...]:
    return (
        Entry("vit", "vision", hf("ViTForImageClassification", "vit", num_labels=1000), images(224), 32),
        Entry(
            "swin",
            "vision",
            hf("SwinForImageClassification", "swin", num_labels=1000, attention="eager"),
            images(224),
            16,
        ),
        Entry(
            "convnext", "vision", hf("ConvNextForImageClassification", "convnext", num_labels=1000), images(224), 16
        ),
        Entry("dinov2", "vision", hf("Dinov2ForImageClassification", "dinov2", num_labels=1000), images(224), 16),
        Entry(
            "segformer",
            "vision",
            hf("SegformerForSemanticSegmentation", "segformer", num_labels=150),
            images(256, _labels_per_pixel(256)),
            8,
        ),
        Entry("resnet-hf", "vision", hf("ResNetForImageClassification", "resnet", num_labels=1000), images(224), 32),
        Entry("resnet50", "vision", vision("resnet50"), pixels(224), 32, classify),
        Entry("mobilenet", "vision", vision("mobilenet_v3_large"), pixels(224), 32, classify),
        Entry("efficientnet", "vision", vision("efficientnet_b0"), pixels(224), 16, classify),
        Entry("regnet", "vision", vision("regnet_y_400mf"), pixels(224), 32, classify),
        Entry("videomae", "vision", hf("VideoMAEForVideoClassification", "videomae", num_labels=100), video, 2),
        Entry("densenet", "vision", vision("densenet121"), pixels(224), 16, classify),
        Entry("timm-vit", "vision", tim("vit_small_patch16_224", drop_path_rate=0.1), pixels(224), 32, classify),
        Entry(
            "clip",
            "vision and text",
            hf("CLIPModel", "clip"),
            lambda n: {
                "input_ids": torch.randint(5, 40_000, (n, 77)),
                "pixel_values": torch.randn(n, 3, 224, 224),
                "return_loss": True,
            },
            16,
        ),
    )


def _others() -> tuple[Entry, ...]:
    return (
        Entry("unet", "diffusion", UNet, noisy(64), 16, denoise),
        Entry("dit", "diffusion", DiT, noisy(32, 4), 16, denoise),
        Entry("unet-attention", "diffusion", AttentionUNet, noisy(32, 4), 16, denoise),
        Entry("graph", "graph", GraphAttention, graph, 8),
    )
