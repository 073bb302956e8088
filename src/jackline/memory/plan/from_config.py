"""A job from the config of a transformers model: no weights, no network.

Owns which class a config means, its example batch, and the order of changes (quantise, adapt, freeze, recompute).
`hub` owns finding the file, `adapt` the changes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from jackline.errors import UsageError
from jackline.memory.imagined.inputs import SEEN, VOCABULARY, batch_of, first_of, has_labels, text_of
from jackline.memory.plan.adapt import adapt
from jackline.memory.plan.gpus import GpuModel, Precision
from jackline.memory.plan.hub import ConfigFile, read_config
from jackline.memory.plan.model_settings import ModelSettings
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.ranks.tensor import divide

_SEQ_LEN = 2048
_BATCH = 8
# Tried in this order for a config that names no architecture with a loss.
_TASKS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES",
    "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
_NO_LOSS = "has a loss that depends on values, or none: the mean of its outputs is differentiated instead"
_PADDED = ("Classification", "ConditionalGeneration", "MaskedLM")


@dataclass
class ConfigModel:
    """Builds the model of one config, once for each set of options: on the meta device it costs no memory."""

    file: ConfigFile
    settings: ModelSettings
    low: torch.dtype
    _built: dict[tuple[bool, str, int], nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config, self._class = _class_of(self.file)
        _name_tokens(self.config, self._class.__name__)

    def build(self, options: StepOptions) -> nn.Module:
        parts = options.num_ranks if options.parallel == "tp" else 1
        key = (options.is_recomputing, options.precision, parts)
        if torch.get_default_device().type != "meta":
            return self._make(options)
        if key not in self._built:
            self._built[key] = self._make(options)
        return self._built[key]

    def _make(self, options: StepOptions) -> nn.Module:
        attention = {"flash": "sdpa"}.get(self.settings.attention, self.settings.attention)
        with quiet():
            model = self._with_attention(attention)
        if options.parallel == "tp" and options.num_ranks > 1:
            divide(model, options.num_ranks)
        adapt(model, self.settings, self.low)
        if options.is_recomputing:
            if not getattr(model, "supports_gradient_checkpointing", False):
                raise UsageError(f"{type(model).__name__} has no gradient checkpointing")
            # transformers 5.23 gave it this name and warns of the old one.
            name = "activation_checkpointing_enable"
            getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
            if self.settings.lora is not None:
                model.enable_input_require_grads()  # type: ignore[operator]
        return model

    def _with_attention(self, attention: str) -> nn.Module:
        """A model without this implementation gets what it has by itself."""
        model: nn.Module
        try:
            try:
                model = self._class._from_config(copy.deepcopy(self.config), attn_implementation=attention)
            except ValueError:
                model = self._class._from_config(copy.deepcopy(self.config), attn_implementation="eager")
        except Exception as error:  # of any kind: each model checks itself
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"{self._class.__name__} cannot be built from this config: {first}",
                hint="is the file complete? Or plan it from Python: jackline plan train.py:make_model",
            ) from error
        return model

    def batch(self, seq_len: int) -> Callable[[int], dict[str, Tensor]]:
        return batch_of(self.config, self._class, seq_len, self.settings.image_size)

    @property
    def note(self) -> str:
        notes = [] if has_labels(self._class) else [f"{self._class.__name__} {_NO_LOSS}"]
        left_out = sorted(SEEN.intersection(inspect.signature(self._class.forward).parameters))
        if left_out and not SEEN.intersection(self.batch(1)(1)):
            notes.append(f"text alone, without {' and '.join(left_out)}: pictures and sounds need more memory")
        return "; ".join(notes)

    @property
    def seq_len(self) -> int:
        """As asked; otherwise what the model can, at most 2048."""
        most = (
            first_of(text_of(self.config), "max_position_embeddings", "n_positions", "max_target_positions")
            or _SEQ_LEN
        )
        return self.settings.longest or self.settings.seq_len or min(int(most), _SEQ_LEN)


def job_from_config(file: ConfigFile, settings: ModelSettings, gpu: GpuModel) -> tuple[Job, dict[str, object]]:
    """The job, and the settings that a person should see with it."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # caches and token ids: nothing about memory
    precision: Precision = settings.precision or gpu.precision
    low = torch.float16 if precision == "fp16" else torch.bfloat16
    model = ConfigModel(file, settings, low)
    options = StepOptions(
        precision,
        is_recomputing=settings.gradient_checkpointing,
        algorithm=settings.optimizer,
        parallel="fsdp" if settings.offload else settings.parallel,
        is_offloading=settings.offload,
    )
    job = Job(
        name=file.name,
        build=model.build,
        batch=model.batch(model.seq_len),
        loss=_loss,
        global_batch=settings.batch_size or _BATCH,
        options=options,
        can_recompute=True,
        note="; ".join(filter(None, (_note(settings), model.note))),
    )
    shown: dict[str, object] = {"seq_len": model.seq_len, "batch_size": job.global_batch}
    shown["optimizer"] = settings.optimizer
    if settings.steps:
        shown["steps"] = settings.steps
    return job, shown


def count_weights(job: Job) -> tuple[int, int]:
    """(all, trained) weights; a quantised weight counts too."""
    with torch.device("meta"):
        model = job.build(job.options)
    packed = sum(2 * buffer.numel() for name, buffer in model.named_buffers() if name.endswith("packed"))
    sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    return sum(size for size, _ in sizes) + packed, sum(size for size, is_trained in sizes if is_trained)


def _note(settings: ModelSettings) -> str:
    parts = []
    if settings.quantize:
        parts.append(f"{settings.quantize} weights as bitsandbytes keeps them; all others in float32")
    if settings.attention == "flash":
        parts.append("flash attention without padding: it keeps what PyTorch's own keeps")
    if settings.optimizer == "paged-adamw8bit":
        parts.append("paged optimizer state is in memory that the driver moves, and not counted")
    return "; ".join(parts)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    found = model(**batch)
    loss: Tensor | None = getattr(found, "loss", None)
    if loss is not None:
        return loss
    outputs = found.values() if isinstance(found, Mapping) else found
    is_trained = torch.is_grad_enabled()
    tensors = [one for one in outputs if isinstance(one, Tensor) and (one.requires_grad or not is_trained)]
    if not tensors:
        raise ValueError(f"{type(model).__name__} returns neither a loss nor anything to differentiate")
    return torch.stack([one.float().mean() for one in tensors]).sum()


def _name_tokens(config: Any, name: str) -> None:
    """Special tokens that a config may leave out and a training step needs."""
    text = text_of(config)
    is_twofold = bool(getattr(config, "is_encoder_decoder", False)) or "EncoderDecoder" in name
    if getattr(text, "vocab_size", 0) is None:
        text.vocab_size = VOCABULARY
    for key, is_needed in (
        ("pad_token_id", is_twofold or any(word in name for word in _PADDED)),
        ("decoder_start_token_id", is_twofold),
    ):
        for one in (config, text):
            if is_needed and getattr(one, key, None) is None:
                setattr(one, key, 0)


# Which class.


def _class_of(file: ConfigFile) -> tuple[Any, Any]:
    given = read_config(file)
    try:
        import transformers
    except ImportError:
        raise UsageError("planning from a config needs transformers", hint="pip install transformers") from None
    if given["model_type"] not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"transformers {transformers.__version__} does not know the model type '{given['model_type']}'",
            hint="a newer transformers may; or plan it from Python: jackline plan train.py:make_model",
        )
    # Without the dtype of the stored weights: `precision` decides in which they are trained.
    plain = {key: value for key, value in given.items() if key not in ("dtype", "torch_dtype")}
    try:
        with quiet():
            config = transformers.CONFIG_MAPPING[given["model_type"]].from_dict(plain)
    except Exception as error:  # of any kind: each config checks itself
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise UsageError(
            f"{file.name} is no config of a '{given['model_type']}': {last}",
            hint="is the file complete, and for the version of transformers that is installed?",
        ) from error
    named = [getattr(transformers, name, None) for name in given.get("architectures") or ()]
    found = next((one for one in named if one is not None and _has_loss(one)), None) or _by_task(config, transformers)
    if found is None:
        raise UsageError(f"{file.name}: no class of transformers trains a '{given['model_type']}'")
    return config, found


def _has_loss(kind: Any) -> bool:
    return "labels" in inspect.signature(kind.forward).parameters or "For" in kind.__name__


def _by_task(config: Any, transformers: Any) -> Any:
    from transformers.models.auto import modeling_auto

    for task in _TASKS:
        name = getattr(modeling_auto, task, {}).get(config.model_type)
        if name:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers talks about generation settings and token ids; nothing of it concerns memory."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
