"""From frames, waits and names to a phase in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackline.diagnosis.doing import Around, Doing, describe, describe_wait, imported_package, outermost
from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack
from jackline.diagnosis.user_code import came_with_pip, is_user_file
from jackline.diagnosis.waiting import effective_wait
from jackline.machine.readings import UNTIL_A_SIGNAL, Wait, WaitKind

SITE = "/v/lib/python3.11/site-packages"
STD = "/usr/lib/python3.11"
IMPORT = Frame("_find_and_load", "<frozen importlib._bootstrap>", 1176)
RUNNING = Wait("running")


def user(source: str = "", function: str = "<module>", file: str = "/me/train.py", line: int = 7) -> Frame:
    return Frame(function, file, line, source, is_user=True)


def stack(*frames: Frame) -> ProcessStack:
    return ProcessStack(1, "python train.py", (ThreadStack(1, "MainThread", frames, is_main=True),))


def what(*frames: Frame, wait: Wait = RUNNING, around: Around | None = None) -> str:
    return describe(stack(*frames), wait, "python", around).what


WITH_GPU = Around(has_gpu=True)


def test_an_import_is_named_by_the_persons_own_line() -> None:
    own = user("import torch.nn as nn")
    inner = (Frame("<module>", f"{STD}/dataclasses.py", 3), IMPORT, Frame("<module>", f"{SITE}/torch/__init__.py", 9))
    assert describe(stack(*inner, IMPORT, own), RUNNING, "python") == Doing("importing torch", own)


def test_the_innermost_own_module_says_what_is_imported() -> None:
    model = user("from flash_attn import flash", file="/me/model.py")
    frames = (Frame("<module>", f"{SITE}/flash_attn/__init__.py", 1), IMPORT, model, IMPORT, user("import model"))
    assert what(*frames) == "importing flash_attn"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (f"{SITE}/transformers/models/auto.py", "transformers"),
        (f"{SITE}/six.py", "six"),
        ("/opt/tree/pack/__init__.py", "pack"),
        ("/opt/tree/single.py", "single"),
    ],
)
def test_an_import_whose_line_does_not_tell_is_named_by_the_file_being_run(file: str, name: str) -> None:
    assert what(Frame("<module>", file, 1), IMPORT, user("importlib.import_module(name)")) == f"importing {name}"


def test_of_several_imports_in_a_line_the_one_under_way_is_named() -> None:
    inner = Frame("<module>", f"{SITE}/torch/__init__.py", 1)
    assert what(inner, IMPORT, user("import time, torch")) == "importing torch"


def test_work_at_import_in_the_persons_own_module_is_not_an_import() -> None:
    assert what(user("tokens = [1]", file="/me/data.py"), IMPORT, user("import data")) == "running data.py"


def test_a_package_run_as_a_module_says_what_it_imports() -> None:
    frames = (
        Frame("<module>", f"{SITE}/torch/__init__.py", 1),
        IMPORT,
        Frame("<module>", f"{SITE}/tool/__main__.py", 2, "import torch"),
        Frame("_run_code", f"{STD}/runpy.py", 80),
    )
    assert imported_package(stack(*frames).threads[0]) == "torch"


@pytest.mark.parametrize(
    ("file", "function", "phase"),
    [
        (f"{SITE}/torch/_inductor/compile_fx.py", "compile_fx", "compiling"),
        (f"{SITE}/torch/_dynamo/convert_frame.py", "_compile", "compiling"),
        (f"{SITE}/triton/compiler/compiler.py", "compile", "compiling"),
        (f"{SITE}/torch/serialization.py", "_save", "saving a checkpoint"),
        (f"{SITE}/safetensors/torch.py", "save_file", "saving a checkpoint"),
        (f"{SITE}/torch/serialization.py", "_load", "loading a checkpoint"),
        (f"{SITE}/safetensors/torch.py", "load_file", "loading a checkpoint"),
        (f"{SITE}/huggingface_hub/file_download.py", "http_get", "downloading"),
        (f"{STD}/urllib/request.py", "urlopen", "downloading"),
        (f"{SITE}/transformers/tokenization_utils_base.py", "__call__", "tokenising"),
        (f"{SITE}/torch/utils/data/dataloader.py", "_next_data", "loading data"),
        (f"{SITE}/datasets/arrow_dataset.py", "_map_single", "loading data"),
        (f"{SITE}/torch/autograd/graph.py", "_engine_run_backward", "in the backward pass"),
        (f"{SITE}/torch/optim/adamw.py", "step", "in the optimizer step"),
        (f"{SITE}/torch/nn/modules/linear.py", "forward", "in the forward pass"),
        (f"{SITE}/torch/cuda/__init__.py", "synchronize", "waiting for the GPU"),
        (f"{SITE}/torch/distributed/distributed_c10d.py", "all_reduce", "waiting for other ranks"),
        (f"{STD}/subprocess.py", "Popen.wait", "waiting for a child process"),
    ],
)
def test_a_library_in_the_stack_names_the_phase(file: str, function: str, phase: str) -> None:
    assert what(Frame(function, file, 1), user("x = f()"), around=WITH_GPU) == phase


def test_the_closure_of_an_optimizer_is_not_its_step() -> None:
    """Lightning runs training_step inside of the optimizer's step."""
    step = Frame("step", f"{SITE}/torch/optim/sgd.py", 100)
    own = user("time.sleep(0.1)", "training_step")
    assert what(own, step, user("trainer.fit(model)")) == "training"
    assert what(step, user("trainer.fit(model)")) == "in the optimizer step"


def test_the_rarer_phase_wins() -> None:
    inner = Frame("http_get", f"{SITE}/huggingface_hub/file_download.py", 1)
    outer = Frame("__next__", f"{SITE}/torch/utils/data/dataloader.py", 1)
    assert what(Frame("recv_into", f"{STD}/socket.py", 1), inner, outer, user("for b in loader:")) == "downloading"


@pytest.mark.parametrize(
    ("source", "phase"),
    [
        ("out = tok.encode_batch(docs)", "tokenising"),
        ("ids = tokenizer(text)", "tokenising"),
        ("loss.backward()", "in the backward pass"),
        ("optimizer.step()", "in the optimizer step"),
        ("total += loss.item()", "waiting for the GPU"),
        ("torch.save(model, path)", "saving a checkpoint"),
        ("state = torch.load(path)", "loading a checkpoint"),
        ("model = AutoModel.from_pretrained(name)", "loading a model or data set"),
        ("for batch in train_loader:", "loading data"),
        ("os.fsync(fd)", "waiting for the disk"),
    ],
)
def test_a_call_into_c_or_rust_is_named_by_the_calling_line(source: str, phase: str) -> None:
    assert what(user(source), around=WITH_GPU) == phase


@pytest.mark.parametrize(
    ("function", "phase"),
    [
        ("evaluate", "evaluating"),
        ("run_validation", "evaluating"),
        ("tokenise_shard", "tokenising"),
        ("training_step", "training"),
        ("Corpus.__getitem__", "loading data"),
        ("save_checkpoint", "saving a checkpoint"),
        ("download_shard", "downloading"),
        ("retrieval", "running retrieval"),
    ],
)
def test_the_persons_own_function_names_the_phase_last(function: str, phase: str) -> None:
    assert what(user("x = g(y)", function=function)) == phase


def test_without_a_phase_the_wait_is_told_and_else_the_function() -> None:
    own = user("q.get()", function="consume")
    assert what(own, wait=Wait("lock")) == "waiting for a lock"
    assert what(own, wait=Wait("network", "10.0.0.3:443")) == "waiting for the network (10.0.0.3:443)"
    assert what(own) == "running consume"
    assert what(user("x = 1")) == "running train.py"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("stopped", "paused (SIGSTOP)"),
        ("keyboard", "waiting for keyboard input"),
        ("zombie", "dead, but its parent has not noticed"),
    ],
)
def test_what_cannot_go_on_is_told_before_any_phase(kind: WaitKind, words: str) -> None:
    assert what(user("torch.save(model, path)"), wait=Wait(kind)) == words


@pytest.mark.parametrize(
    ("comm", "words"),
    [
        ("cc1plus", "compiling (cc1plus)"),
        ("ptxas", "compiling (ptxas)"),
        ("git-remote-https", "downloading (git-remote-https)"),
        ("wget", "downloading (wget)"),
        ("pip3", "installing packages (pip3)"),
        ("tar", "packing or unpacking (tar)"),
        ("mytool", "mytool: waiting on a pipe"),
    ],
)
def test_a_program_that_is_not_python_is_told_by_its_name(comm: str, words: str) -> None:
    assert describe(None, Wait("pipe", "pipe:[123]"), comm) == Doing(words)


def test_a_python_that_could_not_be_read_is_told_by_its_wait() -> None:
    assert describe(ProcessStack(1, "python"), Wait("disk", "/data/x"), "python").what == (
        "python: waiting for the disk (/data/x)"
    )
    assert describe(None, RUNNING, "python").what == "running python: its line is not known yet"


def test_kernel_names_of_pipes_and_sockets_are_not_shown_to_people() -> None:
    assert describe_wait(Wait("pipe", "pipe:[4711]")) == "waiting on a pipe"
    assert describe_wait(Wait("pipe", "output of cat (pid 3)")) == "waiting on a pipe (output of cat (pid 3))"
    assert describe_wait(Wait("unknown")) == ""


RECORDED = json.loads(Path(__file__).with_name("recorded_stacks.json").read_text())


@pytest.mark.parametrize("number", range(len(RECORDED["stacks"])))
def test_a_recorded_stack_of_a_real_program_gets_its_true_phase(number: int) -> None:
    """A plain loop, a compiled and a checkpointed model, transformers.Trainer and Lightning, with torch 2.13."""
    one = RECORDED["stacks"][number]
    frames = [RECORDED["frames"][index] for index in one["frames"]]
    found = what(*(Frame(name, file, line, text, is_user_file(file)) for name, file, line, text in frames))
    assert found.partition(" (")[0] == one["truth"], f"{one['program']}: {frames[0]}"


def test_the_recordings_have_every_phase_of_a_training() -> None:
    phases = {one["truth"] for one in RECORDED["stacks"]}
    assert phases >= {
        "building the model", "in the forward pass", "in the backward pass", "in the optimizer step", "loading data",
        "compiling", "saving a checkpoint", "loading a checkpoint", "evaluating", "importing torch",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "function"),
    [
        ("distributed_c10d.py", "reduce_scatter_tensor"),
        ("distributed_c10d.py", "all_to_all_single"),
        ("distributed_c10d.py", "recv"),
    ],
)
def test_a_rank_that_waits_for_others_says_so_whatever_its_thread_does(file: str, function: str) -> None:
    call = Frame(function, f"{SITE}/torch/distributed/{file}", 199)
    for wait in (Wait("sleep"), Wait("network", "127.0.0.1:29500"), RUNNING):
        assert what(call, user(), wait=wait) == "waiting for other ranks"


def test_an_event_loop_with_nothing_to_do_is_not_a_socket() -> None:
    poll = Frame("EpollSelector.select", f"{STD}/selectors.py", 468)
    once = Frame("BaseEventLoop._run_once", f"{STD}/asyncio/base_events.py", 1884)
    run = user("asyncio.run(main())")
    for wait in (Wait("local_socket", "local socket"), Wait("poll")):
        assert what(poll, once, run, wait=wait) == "waiting in its event loop"
    assert what(poll, once, run, wait=Wait("network", "10.0.0.3:443")) == "waiting for the network (10.0.0.3:443)"
    inside = user("sock.recv(1)", function="read")
    assert what(inside, once, run, wait=Wait("local_socket")) == "waiting on a local socket"
    assert what(poll, run, wait=Wait("poll")) == "waiting for events"


def test_a_folder_that_pip_filled_holds_no_code_of_the_person(tmp_path: Path) -> None:
    site, own = tmp_path / "libs", tmp_path / "libs/train"
    for folder in ("httpcore/_backends", "httpcore-1.0.9.dist-info", "train"):
        (site / folder).mkdir(parents=True)
    (site / "httpcore-1.0.9.dist-info/RECORD").write_text(
        "httpcore/__init__.py,sha256=a,1\nhttpcore/_backends/sync.py,sha256=b,2\nhttpcore-1.0.9.dist-info/RECORD,,\n"
    )
    assert came_with_pip(str(site / "httpcore")) and came_with_pip(str(site / "httpcore/_backends"))
    assert not came_with_pip(str(own)), "the person's own files beside it"
    assert not came_with_pip(str(tmp_path)) and not came_with_pip("") and not came_with_pip("httpcore")


def test_code_that_torch_generated_is_not_the_persons_own() -> None:
    call = Frame("call", "/tmp/torchinductor_me/ab/" + "c" * 52 + ".py", 9, is_user=False)
    assert not is_user_file(call.file)
    assert not is_user_file("/data/cache/ab/" + "c" + "a" * 51 + ".py")
    assert is_user_file("/data/ab/conv.py")


def test_without_a_gpu_nothing_waits_for_one() -> None:
    own = user("total += loss.item()", function="train")
    assert what(own) == "running train"
    assert what(own, around=Around(has_gpu=True)) == "waiting for the GPU"


HTTP = Frame("http_get", f"{SITE}/huggingface_hub/file_download.py", 1)


@pytest.mark.parametrize(
    ("rate", "wait", "words"),
    [
        (None, RUNNING, "downloading"),
        (5e6, RUNNING, "downloading, 4.8 MiB/s"),
        (0.0, Wait("network", "10.0.0.3:443"), "waiting for the network (10.0.0.3:443): no bytes arrive"),
        (0.0, Wait("poll"), "waiting for the network: no bytes arrive"),
        (3.0, RUNNING, "preparing a download: no bytes arrive"),
    ],
)
def test_a_download_is_one_while_bytes_arrive(rate: float | None, wait: Wait, words: str) -> None:
    assert what(HTTP, user("get()"), wait=wait, around=Around(net_bytes_per_s=rate)) == words


def test_a_compiler_among_its_children_is_compiling() -> None:
    waits = Frame("communicate", f"{STD}/subprocess.py", 1)
    assert what(waits, user("build()"), around=Around(children=("sh", "cc1plus"))) == "compiling (cc1plus)"
    assert what(user("loss.backward()"), around=Around(children=("cc1plus",))) == "in the backward pass"


def test_after_more_output_only_the_outermost_line_is_told() -> None:
    own = user("main()", line=90)
    inner = user("loss.backward()", function="step")
    left = outermost(stack(Frame("f", f"{SITE}/torch/x.py", 1), inner, own))
    assert describe(left, RUNNING, "python") == Doing("running train.py", user("", line=90))
    assert outermost(ProcessStack(1, "python")) is None


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ((("Thread._wait_for_tstate_lock", "threading"), ("Thread.join", "threading")), "the end of a thread"),
        ((("join", "threading"),), "the end of a thread"),
        ((("_shutdown", "threading"),), "the end of its other threads, at exit"),
        ((("Condition.wait", "threading"), ("Event.wait", "threading")), "a signal of another thread"),
        ((("wait", "threading"), ("Queue.get", "queue")), "an item of a queue"),
        ((("wait", "threading"), ("Queue.put", "queue")), "room in a full queue"),
        ((("wait", "threading"), ("Queue.join", "queue")), "the items of a queue to be done"),
        ((("wait", "threading"), ("result", "concurrent/futures/_base")), "the result of a future"),
        (
            (("wait", "threading"), ("result", "concurrent/futures/_base"), ("map", "multiprocessing/pool")),
            "the result of a future",
        ),
        (
            (("wait", "threading"), ("wait", "threading"), ("ApplyResult.get", "multiprocessing/pool")),
            "the results of a pool",
        ),
        ((("__enter__", "threading"),), "a lock"),
    ],
)
def test_a_wait_inside_of_threading_is_told_by_what_is_awaited(
    inner: tuple[tuple[str, str], ...], words: str
) -> None:
    frames = [Frame(function, f"{STD}/{file}.py", 1) for function, file in inner]
    assert what(*frames, user("work()"), wait=Wait("lock")) == f"waiting for {words}"


def test_what_was_read_from_inside_names_the_thread() -> None:
    join = Frame("Thread.join", f"{STD}/threading.py", 1)
    main = ThreadStack(1, "MainThread", (join, user("loader.join()")), True, awaits="the end of thread 'loader'")
    found = ProcessStack(1, "python", (main,))
    assert describe(found, Wait("lock"), "python").what == "waiting for the end of thread 'loader'"
    assert describe(found, RUNNING, "python").what == "running train.py"


def test_a_sleep_inside_of_a_database_call_is_a_locked_database() -> None:
    line = user("db.execute('insert into t values (1)')")
    assert what(line, wait=Wait("sleep")) == "waiting for a database that another connection has locked"
    assert what(Frame("sleep", f"{SITE}/tenacity/nap.py", 3), line, wait=Wait("sleep")) == "sleeping"


def test_a_wait_for_a_signal_is_no_sleep() -> None:
    assert what(user("signal.pause()"), wait=Wait("sleep", UNTIL_A_SIGNAL)) == "waiting for a signal"


def test_a_main_thread_in_grpc_waits_for_the_network() -> None:
    inside = Frame("_next", f"{SITE}/grpc/_channel.py", 9)
    found = effective_wait(stack(inside, user("stub.Predict(x)")), Wait("lock"))
    assert (found.kind, found.is_endless) == ("network", False)
