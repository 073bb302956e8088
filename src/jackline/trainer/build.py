"""From a config to the task that the loop trains: device, data, model, optimizer, micro-batch, compiled or not.

Owns the order of these for a language model and what a person is told about each. Which precision, optimizer or
micro-batch is right is decided in modules of their own; what a step is stands in language.py, training is loop.py.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from jackline import accelerator
from jackline.checkpoint.format.catalogue import list_names
from jackline.errors import UsageError
from jackline.models.gpt import GPT
from jackline.models.nsa.model import NSAModel
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.records.memory import read_memory
from jackline.session.saving.exactness import make_exact
from jackline.trainer.config import TrainConfig, identity
from jackline.trainer.corpus import Corpus, count_steps, open_corpus
from jackline.trainer.language import LanguageTask, NoAdditions
from jackline.trainer.network import CAST, Network, Shape, describe_shape, make_model, shape_of, use_kernels
from jackline.trainer.optim.learner import make_learner
from jackline.trainer.optim.schedule import describe_schedule, schedule_of
from jackline.trainer.planning.plan import Chosen, choose_micro_batch
from jackline.trainer.report.console import Console
from jackline.trainer.report.flops import peak_flops
from jackline.trainer.startup import compiling, process, shared_code
from jackline.trainer.startup.device import choose_device, device_name
from jackline.trainer.startup.parallel import divide, precision_of_ranks, world_size
from jackline.trainer.startup.precision import choose_attention, choose_precision, settle_precision
from jackline.trainer.task import Ending, Task, check_patience
from jackline.trainer.trained.begin import begin_with, freeze
from jackline.units import count_of

_EAGER_MFU = 0.3  # of the peak, to guess a step's time before there was one


def build(config: TrainConfig, console: Console, folder: Path) -> Task:
    """`folder` is the run's: compiled code is kept there. What is no language model builds its own task."""
    return config.make_task(console, folder) or build_language(config, console, folder)


def build_language(config: TrainConfig, console: Console, folder: Path) -> LanguageTask:
    with contextlib.ExitStack() as opened:
        task = _build(config, console, folder, opened)
        opened.pop_all()  # the loop closes them
    return task


def _build(config: TrainConfig, console: Console, folder: Path, opened: contextlib.ExitStack) -> LanguageTask:
    """`opened` closes what is open when something is refused: by then a process tokenises."""
    device = choose_device(config)
    if config.exact:
        make_exact()
    console.say(f"device {device_name(device)}, torch {torch.__version__}", "start")
    precision = precision_of_ranks(config, settle_precision(config, choose_precision(config.precision, device)))
    attention = choose_attention(config.attention, device)
    gpu = process.open_gpu(device)
    if _may_compile(config, device):
        kernels = process.own_cache("kernels") if config.compile_cache == "shared" else None
        compiling.use_cache(compiling.cache_folder(folder, attention), kernels)
        _load_compiler(device, console)
    corpus = open_corpus(config, console)
    opened.callback(corpus.close)
    loader = corpus.train.make_loader(config, device)
    opened.callback(loader.close)
    if config.patience:
        check_patience(has_validation=(corpus.validation or corpus.held) is not None)
        loader = Ending(loader)
    _check_vocabulary(config, corpus)
    _keep_tokenizer(corpus, RunDir(folder))
    process.wait_for(gpu)  # before the seed: one that is set while a GPU opens may miss the GPU's generator
    shape = config.settle_shape(shape_of(config, corpus.train.vocab_size), (precision, device, folder), console)
    with console.phase("model", describe_shape(config.model, shape)):
        network = make_network(config, shape, device)
        _prepare(network, config, corpus, console)
        additions = config.make_additions(network) or NoAdditions()  # may change weights before masters are taken
        divide(network, config, additions)
        learner = make_learner(network, config, precision, device)
        console.now("comparing our kernels with plain torch on this device")
        if words := use_kernels(network, precision):
            console.say(words)
        if isinstance(learner.average, NSAModel):
            learner.average.use_kernels(CAST.get(learner.judged().precision))
    total_steps = count_steps(config, corpus.train, loader, console)
    schedule = schedule_of(config, total_steps)
    with console.phase("plan", "choosing a micro-batch"):
        # What an earlier attempt's rehearsal measured, so that this one need not plan twice.
        correction = read_memory(RunDir(folder)).usable_correction
        chosen = choose_micro_batch(
            config, shape, precision, is_on_gpu=accelerator.is_gpu(device), correction=correction
        )
        console.say(plan_text(config, chosen, precision, total_steps))
        console.say(describe_schedule(schedule))
    task = LanguageTask(
        config=config,
        learner=learner,
        corpus=corpus,
        loader=loader,
        shape=shape,
        attention=attention,
        chosen=chosen,
        schedule=schedule,
        total_steps=total_steps,
        additions=additions,
    )
    additions.bind(task)
    compile_if_it_pays(task, console, folder)
    return task


def make_network(config: TrainConfig, shape: Shape, device: torch.device) -> Network:
    torch.manual_seed(config.seed)
    # On the CPU first, whatever the device: the same seed gives the same weights everywhere.
    made = make_model(shape, is_recomputing=config.recompute, loss_chunk_rows=config.loss_chunk_rows)
    return made.to(device)


def _prepare(network: Network, config: TrainConfig, corpus: Corpus, console: Console) -> None:
    """What settings say of the model itself: its first weights, what is trained of it, and what its tokens read."""
    network.label_smoothing = config.label_smoothing
    if config.packing == "separate":
        eos_id = corpus.train.eos_id
        if eos_id is None:
            raise UsageError("packing=separate needs a token between documents", hint="packing=joined")
        assert isinstance(network, GPT)
        network.separator = eos_id
    if config.init_from:
        console.say(begin_with(network, config, tokenizer=corpus.train.tokenizer_json()))
    freeze(network, config.frozen)


def _may_compile(config: TrainConfig, device: torch.device) -> bool:
    """Before anything is built; `compile_if_it_pays` may still say no, and then an import was in vain."""
    is_wanted = config.compile == "on" or (config.compile == "auto" and accelerator.is_gpu(device))
    return is_wanted and not _why_not_compiled(config, device)


def _why_not_compiled(config: TrainConfig, device: torch.device) -> str:
    if world_size() > 1 and config.parallel == "fsdp":
        return "its weights are divided between ranks"
    return compiling.why_not(device)


def _load_compiler(device: torch.device, console: Console) -> None:
    what = "opening the GPU and loading" if accelerator.is_gpu(device) else "loading"
    with console.phase("start", f"{what} torch's compiler, usually 2 to 10 s"):
        process.import_compiler()


def _check_vocabulary(config: TrainConfig, corpus: Corpus) -> None:
    if 0 < config.vocab_size < corpus.train.vocab_size:
        raise UsageError(
            f"vocab_size={config.vocab_size} is too small for tokenizer '{config.tokenizer}' with its"
            f" {corpus.train.vocab_size:,} tokens",
            hint="vocab_size=0 takes the tokenizer's own, rounded up",
        )


def _keep_tokenizer(corpus: Corpus, run: RunDir) -> None:
    """A copy in the run's folder: whoever gets the run can use its model. A full disk stops no training."""
    text = corpus.train.tokenizer_json()
    if text is not None and run.path.is_dir():
        with contextlib.suppress(OSError):
            atomic.write_whole(run.tokenizer_file, text.encode())


def plan_text(config: TrainConfig, chosen: Chosen, precision: str, total_steps: int) -> str:
    tokens = config.batch_size * config.seq_len
    return (
        f"batch {config.batch_size} = {chosen.accumulation} x micro-batch {chosen.micro_batch} ({chosen.text}), "
        f"{count_of(config.num_threads, 'loader thread')}, {precision}; "
        + (
            f"{total_steps:,} steps of {tokens:,} tokens, {total_steps * tokens:,} in all"
            if config.has_known_end
            else f"steps of {tokens:,} tokens, until the data ends"
        )
    )


def compile_if_it_pays(task: LanguageTask, console: Console, folder: Path) -> None:
    config, device = task.config, task.learner.device
    cache = compiling.cache_folder(folder, task.attention)
    is_warm = compiling.is_warm(cache)
    if not is_warm and config.compile_cache == "shared" and _may_compile(config, device):
        is_warm = shared_code.take(shared_code.key_of(compiled_facts(task), device, os.environ))
    decision = compiling.decide(
        config.compile,
        has_gpu=accelerator.is_gpu(device),
        can_compile=_why_not_compiled(config, device) if config.compile != "off" else "",
        steps_left=task.total_steps - steps_done(folder),
        eager_step_s=guess_step_s(task),
        is_warm=is_warm,
    )
    console.say(decision.reason, "plan")
    if decision.is_compiled:
        compiling.compile_in_place(task.learner.model)


def compiled_facts(task: LanguageTask) -> dict[str, object]:
    """What decides which code torch's compiler makes of this training, besides the machine."""
    config = task.config
    return {
        "shape": task.shape,
        "precision": task.learner.precision,
        "attention": task.attention,
        "micro_batch": task.chosen.micro_batch,
        "seq_len": config.seq_len,
        "recompute": config.recompute,
        "loss_chunk_rows": config.loss_chunk_rows,
        "exact": config.exact,
        **{name: getattr(config, name) for name in ("packing", "label_smoothing") if name in identity(config)},
    }


def steps_done(folder: Path) -> int:
    """By the newest checkpoint's name; whether it is whole is found out when it is restored."""
    names = list_names(RunDir(folder).checkpoints)
    return names[0].step if names else 0


def guess_step_s(task: Task) -> float:
    """By arithmetic alone; 0 where the device's peak is not known."""
    learner, counting = task.learner, task.counting
    peak = peak_flops(learner.device_name, learner.precision)
    return counting.flops_each * counting.per_step / (peak * _EAGER_MFU) if peak else 0.0
