"""What a transformers model is given: an example batch from its config and from the names of what it takes.

Owns the inputs. A batch has no padding, and its labels have shapes only: a loss that matches them by their values is
left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 1000  # where a config has none
_FIRST_ID = 5  # below are the special tokens of most tokenizers
_SAMPLE_RATE_S = 16_000
_POSITIONS = 1500  # of a sound of 30 s
_FEATURES = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
_REGIONS = 36  # of a picture, where a model takes features of regions
# Their losses match boxes or masks of each image by its values.
_MATCHED = ("ObjectDetection", "InstanceSegmentation", "UniversalSegmentation", "ZeroShot", "DepthEstimation")
SEEN = frozenset({"pixel_values", "pixel_values_videos", "input_features", "input_values", "flattened_patches"})


def has_labels(kind: Any) -> bool:
    """Whether its loss can be computed from labels that have only a shape."""
    is_matched = any(word in kind.__name__ for word in _MATCHED)
    taken = inspect.signature(kind.forward).parameters
    return not is_matched and bool({"labels", "start_positions"} & set(taken))


def text_of(config: Any) -> Any:
    """The part that is about text. Of several that of the decoder, which makes the text."""
    if not hasattr(config, "get_text_config"):
        return config
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def batch_of(config: Any, kind: Any, seq_len: int, image_size: int = 0) -> Callable[[int], dict[str, Tensor]]:
    """An example batch without padding, from the names of what the model takes."""
    taken = inspect.signature(kind.forward).parameters

    def make(count: int) -> dict[str, Tensor]:
        inputs = _inputs(config, kind, count, seq_len, image_size)
        given = {**inputs, **_labels(config, kind, inputs, seq_len)}
        if "labels" not in given and "input_ids" in given:
            given["decoder_input_ids"] = given["input_ids"]
        for name, one in taken.items():
            is_needed = one.default is inspect.Parameter.empty and one.kind is one.POSITIONAL_OR_KEYWORD
            if name not in given and name != "self" and (is_needed or name in _BESIDE):
                given |= _beside(name, config, count, seq_len, image_size)
        if "spatial_shapes" in taken:
            given |= _patches(config, count)
        if "visual_bbox" in taken:  # its boxes are shares of a page, not places in a table
            given["bbox"] = torch.rand(count, seq_len, 4)
        return {name: value for name, value in given.items() if name in taken}

    return make


# Not required by the signature, but by the code.
_BESIDE = frozenset({"lang_ids", "visual_feats", "visual_pos", "bbox"})


def _beside(name: str, config: Any, count: int, seq_len: int, image_size: int) -> dict[str, Tensor]:
    """What a model takes besides its main input, by its name."""
    if name.endswith("input_ids"):
        return {name: _ids(text_of(config), count, seq_len)}
    if name.startswith("pixel_values"):
        return {name: _pixels(config, count, image_size, is_video="video" in name)}
    if name == "bbox":
        return {name: torch.zeros(count, seq_len, 4, dtype=torch.long)}
    if name == "lang_ids":
        return {name: torch.zeros(count, dtype=torch.long)}
    if name == "visual_feats":
        return {name: torch.randn(count, _REGIONS, first_of(config, "visual_feat_dim") or 2048)}
    if name == "visual_pos":
        return {name: torch.rand(count, _REGIONS, 4)}
    return {}


def _patches(config: Any, count: int) -> dict[str, Tensor]:
    """Pictures that come as flat patches, with the number of patches along each side."""
    seen = getattr(config, "vision_config", config)
    num_patches, side = first_of(seen, "num_patches") or 256, first_of(seen, "patch_size") or 16
    rows = int(num_patches**0.5)
    return {
        "pixel_values": torch.randn(count, num_patches, (first_of(seen, "num_channels") or 3) * side * side),
        "pixel_attention_mask": torch.ones(count, num_patches, dtype=torch.long),
        "spatial_shapes": torch.tensor([[rows, num_patches // rows]] * count),
    }


def _series(config: Any, count: int) -> dict[str, Tensor]:
    """A time series: the past that a model reads, with its lags, and the future that it learns to foretell."""
    lags = max(getattr(config, "lags_sequence", None) or [0])
    past, future = (first_of(config, "context_length") or 64) + lags, first_of(config, "prediction_length") or 1
    channels = first_of(config, "num_input_channels") or 0
    more = (channels,) if channels else ((config.input_size,) if getattr(config, "input_size", 1) > 1 else ())
    features = getattr(config, "num_time_features", 0)
    made = {
        "past_values": torch.randn(count, past, *more),
        "past_observed_mask": torch.ones(count, past, *more, dtype=torch.bool if channels else torch.float32),
        "future_values": torch.randn(count, future, *more),
        "past_time_features": torch.randn(count, past, features),
        "future_time_features": torch.randn(count, future, features),
    }
    categories = getattr(config, "num_static_categorical_features", 0)
    numbers = getattr(config, "num_static_real_features", 0)
    if categories:
        made["static_categorical_features"] = torch.zeros(count, categories, dtype=torch.long)
    if numbers:
        made["static_real_features"] = torch.randn(count, numbers)
    return made


def _episodes(config: Any, count: int, seq_len: int) -> dict[str, Tensor]:
    """What an agent saw, did and was given."""
    length = min(seq_len, first_of(config, "max_length", "max_ep_len") or seq_len)
    states, actions = config.state_dim, config.act_dim
    return {
        "states": torch.randn(count, length, states),
        "actions": torch.randn(count, length, actions),
        "rewards": torch.randn(count, length, 1),
        "returns_to_go": torch.randn(count, length, 1),
        "timesteps": torch.zeros(count, length, dtype=torch.long),
        "attention_mask": torch.ones(count, length, dtype=torch.long),
    }


def _pixels(config: Any, count: int, image_size: int, *, is_video: bool) -> Tensor:
    side, channels = image_size or _side(config), first_of(config, "num_channels") or 3
    frames = first_of(config, "num_frames", "video_size", "frames_per_clip")
    if is_video and isinstance(frames, int):
        return torch.randn(count, frames, channels, side, side)
    return torch.randn(count, channels, side, side)


def _inputs(config: Any, kind: Any, count: int, seq_len: int, image_size: int) -> dict[str, Tensor]:
    name = getattr(kind, "main_input_name", "input_ids")
    if name == "inputs":  # one of several
        taken = inspect.signature(kind.forward).parameters
        name = next((one for one in ("input_values", "input_features", "pixel_values") if one in taken), "input_ids")
    shape: tuple[int, ...]
    if name == "past_values":
        return _series(config, count)
    if name == "states":
        return _episodes(config, count, seq_len)
    if name.startswith("pixel_values"):
        pixels = {name: _pixels(config, count, image_size, is_video="Video" in kind.__name__)}
        is_told = "ConditionalGeneration" in kind.__name__  # the text that goes with a picture
        return {"input_ids": _ids(text_of(config), count, seq_len), **pixels} if is_told else pixels
    if name == "input_features":
        parts = (config, *(getattr(config, name, None) for name in ("encoder_config", "audio_config")))
        features = next((found for one in parts if (found := first_of(one, *_FEATURES))), 80)
        positions = min(_POSITIONS, first_of(config, "max_source_positions") or _POSITIONS)
        frames, is_ctc = 2 * positions, "CTC" in kind.__name__
        shape = (count, features, frames) if config.model_type == "whisper" else (count, frames, features)
        made = {"input_features": torch.randn(shape)}
        return made | ({"attention_mask": torch.ones(count, frames, dtype=torch.long)} if is_ctc else {})
    if name == "input_values":
        bins, length = first_of(config, "num_mel_bins"), first_of(config, "max_length")
        is_picture = isinstance(bins, int) and isinstance(length, int) and hasattr(config, "patch_size")
        shape = (count, length, bins) if is_picture else (count, 10 * _SAMPLE_RATE_S)
        return {"input_values": torch.randn(shape)}
    ids = _ids(text_of(config), count, seq_len)
    end = getattr(config, "eos_token_id", None)
    if "Classification" in kind.__name__ and isinstance(end, int):
        ids[:, -1] = end  # where some models read their answer
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _labels(config: Any, kind: Any, inputs: dict[str, Tensor], seq_len: int) -> dict[str, Tensor]:
    if not has_labels(kind):
        return {}
    first = next(iter(inputs.values()))
    count, name = len(first), kind.__name__
    one_each = torch.zeros(count, dtype=torch.long)
    if "QuestionAnswering" in name:
        return {"start_positions": one_each, "end_positions": one_each}
    if "input_ids" in inputs:
        if "TokenClassification" in name:
            return {"labels": torch.zeros_like(first)}
        return {"labels": one_each if "Classification" in name else first.clone()}
    if "Segmentation" in name:
        return {"labels": torch.zeros(count, *first.shape[-2:], dtype=torch.long)}
    if "Classification" in name:
        return {"labels": one_each}
    return {"labels": _ids(text_of(config), count, 64 if "CTC" in name else min(seq_len, 256))}


def _ids(config: Any, count: int, seq_len: int) -> Tensor:
    vocabulary = first_of(config, "vocab_size") or VOCABULARY
    return torch.randint(min(_FIRST_ID, vocabulary - 1), vocabulary, (count, seq_len))


def _side(config: Any) -> int:
    parts = (config, *(getattr(config, name, None) for name in ("vision_config", "backbone_config", "encoder")))
    side = next((found for one in parts if (found := first_of(one, "image_size"))), 224)
    return int(side[0] if isinstance(side, list | tuple) else side)


def first_of(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)
