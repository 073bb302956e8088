"""ESM-2 and IgT5 as encoders: frozen, in evaluation mode, with the tokenisation their model documentation asks for.

    ESM-2    residues without spaces, one chain at a time; an antibody is the mean over the residues of both chains.
             Its vocabulary knows X, B, U, Z and O; J becomes X.
    T5       (IgT5, ProtT5) residues with spaces between them, heavy and light chain joined by " </s> ".
             U, Z, O, B and J become X.

A vector is the mean over residues only: padding, begin, end and separator do not count. Sequences longer than
`max_residues` are cut at the end. A tokenizer that does not make one known token of each residue is an error, because
a model that is fed unknown tokens gives almost the same vector for every sequence, and nobody notices.

Owns loading, batches and pooling. Does not own where the weights are (weights.py) or the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jackline import accelerator
from jackline.errors import JacklineError, UsageError
from jackline.recipes.agab.data.weights import PIP_LINE, Weights

MAX_RESIDUES = 1022  # ESM-2 was trained on 1,024 tokens, two of them special
SHARD_ROWS = 512
_TOKENS_PER_BATCH = {False: 4096, True: 32768}  # on a GPU or not
_MAX_UNKNOWN_SHARE = 0.5
_TO_X = {"esm": bytes.maketrans(b"J", b"X"), "t5": bytes.maketrans(b"UZOBJ", b"XXXXX")}


class Text(NamedTuple):
    """What one pass of the model reads for a sequence (ESM-2: a chain of it)."""

    sequence: int
    text: str
    num_residues: int


class Model(NamedTuple):
    network: Any
    tokenizer: Any
    special_ids: Any  # a tensor: all that are no residue
    unknown_id: int


class LanguageModelEncoder:
    """A protein language model; the weights are loaded when something is to be encoded."""

    def __init__(self, weights: Weights, device: str) -> None:
        self.name = weights.name
        self.revision = f"{weights.revision}-first-{MAX_RESIDUES}"
        self.dim = weights.width
        self.shard_rows = SHARD_ROWS
        self.max_residues: int | None = MAX_RESIDUES
        self._weights = weights
        self._device = device
        self._model: Model | None = None
        self._tokens_per_batch = _TOKENS_PER_BATCH[accelerator.is_gpu(device)]

    def encode(self, sequences: list[bytes], moved: Callable[[int], None]) -> NDArray[np.float16]:
        """A row for every canonical sequence; work goes from long to short, so that running out comes first."""
        model = self._ready()
        import torch  # after loading, which says what to install when it is not there

        texts = [text for at, sequence in enumerate(sequences) for text in self._texts(at, sequence)]
        texts.sort(key=lambda text: (-text.num_residues, text.sequence))
        sums = np.zeros((len(sequences), self.dim), np.float64)
        counts = np.zeros((len(sequences), 1), np.int64)
        done = 0
        with torch.inference_mode():
            while done < len(texts):
                batch = _first_batch(texts[done:], self._tokens_per_batch)
                try:
                    pooled, num_residues = _pool(model, batch, self.name)
                except torch.OutOfMemoryError as error:
                    if len(batch) == 1:
                        raise _too_large(self._weights.name, self._device, error) from error
                    self._tokens_per_batch //= 2
                    continue
                rows = [text.sequence for text in batch]
                np.add.at(sums, rows, pooled)
                np.add.at(counts, rows, num_residues)
                done += len(batch)
                moved(done * len(sequences) // len(texts))
        return (sums / counts).astype(np.float16)

    def load(self) -> None:
        """The weights, from the hub when they are not on this machine's disk."""
        if self._model is None:
            self._model = load_model(self._weights, self._device)

    def release(self) -> None:
        """A second encoder, and the training after it, need the room."""
        self._model = None
        if accelerator.is_gpu(self._device):
            accelerator.empty_cache()

    def _ready(self) -> Model:
        self.load()
        assert self._model is not None
        return self._model

    def _texts(self, at: int, sequence: bytes) -> Iterator[Text]:
        chains = _cut(sequence.translate(_TO_X[self._weights.kind]).decode().split("|"))
        if self._weights.kind == "t5":
            yield Text(at, " </s> ".join(" ".join(chain) for chain in chains), sum(map(len, chains)))
        else:
            for chain in chains:
                yield Text(at, chain, len(chain))


def _cut(chains: list[str]) -> list[str]:
    """The first MAX_RESIDUES of all chains together."""
    left, kept = MAX_RESIDUES, []
    for chain in chains:
        kept.append(chain[:left])
        left -= len(kept[-1])
    return [chain for chain in kept if chain]


def _first_batch(texts: list[Text], num_tokens: int) -> list[Text]:
    """The longest ones first, as many as fit when all are padded to the longest."""
    return texts[: max(1, num_tokens // (texts[0].num_residues + 3))]


def _pool(model: Model, batch: list[Text], name: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Sums over the residues of every text, and how many residues that were."""
    import torch

    tokens = model.tokenizer(
        [text.text for text in batch], add_special_tokens=True, padding=True, truncation=False, return_tensors="pt"
    )
    ids, attention = tokens["input_ids"], tokens["attention_mask"]
    is_unknown = (ids == model.unknown_id) & (attention == 1)
    is_residue = (~torch.isin(ids, model.special_ids) | is_unknown) & (attention == 1)
    _check_tokens(batch, is_residue.sum(1).tolist(), int(is_unknown.sum()), name)
    device = next(model.network.parameters()).device
    hidden = _forward(model.network, ids.to(device), attention.to(device))
    weight = is_residue.to(device).unsqueeze(-1)
    sums = torch.where(weight, hidden.double(), 0.0).sum(1)
    return sums.cpu().numpy(), is_residue.sum(1, keepdim=True).numpy()


def _forward(network: Any, ids: Any, attention: Any) -> Any:
    """On a GPU in half precision, as exact as its TF32; once more in full where numbers became too large."""
    import torch

    if accelerator.is_gpu(ids.device):
        with torch.autocast(ids.device.type, torch.float16):
            hidden = network(input_ids=ids, attention_mask=attention).last_hidden_state
        if bool(torch.isfinite(hidden[attention.bool()]).all()):
            return hidden
    return network(input_ids=ids, attention_mask=attention).last_hidden_state


def _check_tokens(batch: list[Text], num_tokens: list[int], num_unknown: int, name: str) -> None:
    total = sum(num_tokens)
    if total and num_unknown / total > _MAX_UNKNOWN_SHARE:
        raise JacklineError(
            f"{100 * num_unknown / total:.0f} % of the residues are unknown to the tokenizer of {name}",
            detail=f"'{batch[0].text[:32]}...' was given to it",
            hint="the tokenizer is not the one the weights were trained with; take both from one place",
        )
    for text, count in zip(batch, num_tokens, strict=True):
        if count != text.num_residues:
            raise JacklineError(
                f"the tokenizer of {name} made {count} tokens of {text.num_residues} residues",
                detail=f"'{text.text[:32]}...' was given to it",
                hint="the tokenizer is not the one the weights were trained with; take both from one place",
            )


def load_model(weights: Weights, device: str) -> Model:
    """Weights in float32, no gradients, no dropout."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UsageError(
            f"the encoder {weights.name} needs the package {error.name}",
            hint=f"{PIP_LINE}; the encoder `embedded` needs neither",
        ) from error
    where = {"revision": weights.commit} if weights.commit else {}
    kind: Any = transformers.T5EncoderModel if weights.kind == "t5" else transformers.EsmModel
    options = {} if weights.kind == "t5" else {"add_pooling_layer": False}
    case = {"do_lower_case": False} if weights.kind == "t5" else {}
    with _quiet(transformers):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(weights.source, **where, **case)
            network = kind.from_pretrained(weights.source, dtype=torch.float32, **where, **options)
        except (OSError, ValueError, ImportError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise JacklineError(
                f"cannot load {weights.name}: {reason}", hint=f"check its files; {PIP_LINE} brings what it needs"
            ) from error
    network.requires_grad_(False)
    try:
        network.eval().to(device)
    except torch.OutOfMemoryError as error:
        raise _too_large(weights.name, device, error) from error
    special = torch.tensor(sorted(tokenizer.all_special_ids))
    return Model(network, tokenizer, special, int(tokenizer.unk_token_id))


def _too_large(name: str, device: str, error: Exception) -> JacklineError:
    return JacklineError(
        f"{name} does not fit into the memory of {device}: {str(error).splitlines()[0]}",
        hint="device=cpu, or a smaller model (esm2-150m, esm2-35m)",
    )


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Unused parts (a decoder, a head) are no news. Bars of a download stay: it may take minutes."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
