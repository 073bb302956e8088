"""Checkpoints of a stranger's script, as real files of torch and safetensors."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from jackline.errors import UsageError
from jackline.supervisor.foreign.find import (
    ForeignCheckpoint,
    check_resume_arg,
    is_whole,
    list_checkpoints,
    newest_whole,
    preset,
    resume_argv,
)

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


def names(found: list[ForeignCheckpoint]) -> list[str]:
    return [checkpoint.path.name for checkpoint in found]


def touch(path: Path, at_s: float = 1000.0, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at_s, at_s))
    return path


def only(pattern: str, folder: Path) -> ForeignCheckpoint:
    found = list_checkpoints(pattern, folder)
    assert len(found) == 1
    return found[0]


def save_torch(path: Path, *, is_zip: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.arange(20_000.0)}, path, _use_new_zipfile_serialization=is_zip)
    return path


def save_safetensors(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors_torch.save_file({"w": torch.arange(1000.0), "b": torch.zeros(3)}, path)
    return path


def cut(path: Path, num_bytes: int) -> Path:
    """As a kill or a full disk leaves it."""
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - num_bytes)
    return path


def save_hf(folder: Path, step: int) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    save_safetensors(checkpoint / "model.safetensors")
    save_torch(checkpoint / "optimizer.pt")
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return checkpoint


# -- finding and ordering --------------------------------------------------------------------------------------------


def test_checkpoints_are_ordered_by_the_last_number_in_their_name_not_by_text_or_time(tmp_path: Path) -> None:
    touch(tmp_path / "model_v2_step_900.pt", at_s=3000)
    touch(tmp_path / "model_v2_step_1000.pt", at_s=2000)
    touch(tmp_path / "model_v2_step_80.pt", at_s=4000)
    assert names(list_checkpoints("*.pt", tmp_path)) == [
        "model_v2_step_80.pt",
        "model_v2_step_900.pt",
        "model_v2_step_1000.pt",
    ]


def test_equal_numbers_are_ordered_by_time(tmp_path: Path) -> None:
    touch(tmp_path / "b" / "step-5.pt", at_s=1000)
    touch(tmp_path / "a" / "step-5.pt", at_s=2000)
    assert [checkpoint.path.parent.name for checkpoint in list_checkpoints("*/step-*.pt", tmp_path)] == ["b", "a"]


def test_the_number_of_a_file_type_is_not_a_step(tmp_path: Path) -> None:
    touch(tmp_path / "weights.pt2")
    assert only("*", tmp_path).number is None


def test_a_name_without_a_number_among_others_orders_all_by_time(tmp_path: Path) -> None:
    touch(tmp_path / "epoch=9-step=900.ckpt", at_s=1000)
    touch(tmp_path / "last.ckpt", at_s=3000)
    touch(tmp_path / "epoch=8-step=800.ckpt", at_s=500)
    assert names(list_checkpoints("*.ckpt", tmp_path)) == [
        "epoch=8-step=800.ckpt",
        "epoch=9-step=900.ckpt",
        "last.ckpt",
    ]


def test_patterns_may_be_deep_absolute_or_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "out" / "a" / "checkpoint-5" / "x")
    assert names(list_checkpoints("**/checkpoint-*", tmp_path)) == ["checkpoint-5"]
    assert names(list_checkpoints("out/**/checkpoint-*", tmp_path)) == ["checkpoint-5"]
    assert names(list_checkpoints(f"{tmp_path}/out/*/checkpoint-[0-9]*", Path("/"))) == ["checkpoint-5"]
    assert names(list_checkpoints("o?t/**/[!d]heckpoint-5", tmp_path)) == ["checkpoint-5"]
    assert names(list_checkpoints("**/a/checkpoint-*", tmp_path)) == ["checkpoint-5"]
    assert names(list_checkpoints("**/b/checkpoint-*", tmp_path)) == []
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names(list_checkpoints("~/out/a/checkpoint-*", Path("/"))) == ["checkpoint-5"]


def test_a_working_folder_with_glob_marks_in_its_name_is_only_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "run[1]*"
    touch(folder / "step-1.pt")
    touch(tmp_path / "run1x" / "step-2.pt")
    assert names(list_checkpoints("*.pt", folder)) == ["step-1.pt"]
    assert names(list_checkpoints("**/*.pt", folder)) == ["step-1.pt"]


def test_a_deep_search_stays_out_of_packages_hidden_folders_links_and_found_checkpoints(tmp_path: Path) -> None:
    touch(tmp_path / "lib" / "site-packages" / "p" / "checkpoint-1")
    touch(tmp_path / ".cache" / "checkpoint-2")
    touch(tmp_path / "out" / "checkpoint-3" / "checkpoint-4")
    (tmp_path / "out" / "again").symlink_to(tmp_path)
    assert names(list_checkpoints("**/checkpoint-*", tmp_path)) == ["checkpoint-3"]


def test_a_dangling_link_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-1.pt").symlink_to(tmp_path / "gone")
    assert list_checkpoints("*.pt", tmp_path) == []


def test_nothing_that_matches_is_an_empty_list(tmp_path: Path) -> None:
    assert list_checkpoints("nothing/**/*.pt", tmp_path) == []
    assert list_checkpoints("*.pt", tmp_path / "gone") == []


# -- whole or not ----------------------------------------------------------------------------------------------------


def verdict(pattern: str, folder: Path, open_paths: set[str] | None = None) -> tuple[bool, str]:
    return is_whole(only(pattern, folder), open_paths or set())


@pytest.mark.parametrize("suffix", ["pt", "pth", "ckpt", "bin"])
def test_a_file_of_torch_save_is_whole(tmp_path: Path, suffix: str) -> None:
    save_torch(tmp_path / f"step-1.{suffix}")
    is_good, why = verdict("step-*", tmp_path)
    assert is_good and why.startswith("its zip directory lists ")


@pytest.mark.parametrize("num_bytes", [1, 22, 1000, 79_000])
def test_a_cut_off_file_of_torch_save_is_not_whole(tmp_path: Path, num_bytes: int) -> None:
    path = cut(save_torch(tmp_path / "step-1.pt"), num_bytes)
    size = path.stat().st_size
    assert verdict("*.pt", tmp_path) == (False, f"it ends after {size} bytes without a zip directory: it was cut off")


def test_a_zip_whose_middle_is_missing_is_not_whole(tmp_path: Path) -> None:
    """Parts were lost but the end was written: sizes and places no longer agree."""
    path = save_torch(tmp_path / "step-1.pt")
    data = path.read_bytes()
    path.write_bytes(data[:200] + data[-600:])
    is_good, why = verdict("*.pt", tmp_path)
    assert not is_good, why


def test_an_empty_file_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "step-1.pt").touch()
    assert verdict("*.pt", tmp_path) == (False, "it has 0 bytes")


def test_a_file_of_zeros_is_not_whole(tmp_path: Path) -> None:
    """After a power cut a file may have its size but not its data."""
    (tmp_path / "step-1.pt").write_bytes(bytes(4096))
    assert verdict("*.pt", tmp_path) == (False, "it begins with zeros: its data never reached the disk")


def test_the_old_format_of_torch_can_only_be_checked_for_being_closed(tmp_path: Path) -> None:
    path = save_torch(tmp_path / "step-1.pt", is_zip=False)
    assert verdict("*.pt", tmp_path) == (True, "nobody has it open; this kind of file cannot be checked further")
    assert verdict("*.pt", tmp_path, {str(path)}) == (False, "it is still open for writing")


def test_a_file_that_is_open_for_writing_is_not_whole_even_through_a_link(tmp_path: Path) -> None:
    path = save_torch(tmp_path / "real" / "step-1.pt")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert verdict("link/*.pt", tmp_path, {str(path)}) == (False, "it is still open for writing")


def test_a_file_that_grows_between_two_looks_is_not_whole(tmp_path: Path) -> None:
    path = save_torch(tmp_path / "step-1.pt", is_zip=False)
    seen = only("*.pt", tmp_path)
    with open(path, "ab") as file:
        file.write(b"more")
    assert is_whole(seen, set()) == (
        False,
        f"its size is changing: {seen.size_bytes} bytes, then {seen.size_bytes + 4}",
    )


def test_a_safetensors_file_is_whole_when_header_and_size_agree(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "step-1.safetensors")
    assert verdict("*", tmp_path) == (True, "its header and its size agree on 2 tensors")


def test_a_cut_off_safetensors_file_is_not_whole(tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "step-1.safetensors")
    size = path.stat().st_size
    cut(path, 100)
    assert verdict("*", tmp_path) == (False, f"its header promises {size} bytes, the file has {size - 100}")
    cut(path, size - 120)
    is_good, why = verdict("*", tmp_path)
    assert not is_good and why.endswith("the file has 20: it was cut off")


@pytest.mark.parametrize("data", [b"\x02\0\0\0\0\0\0\0{}garbage", b"\x05\0\0\0\0\0\0\0nojso", b"\xff" * 40, b"abc"])
def test_garbage_named_safetensors_is_not_whole(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "step-1.safetensors").write_bytes(data)
    assert not verdict("*", tmp_path)[0]


def test_a_checkpoint_that_was_deleted_meanwhile_is_not_whole(tmp_path: Path) -> None:
    path = save_torch(tmp_path / "step-1.pt")
    seen = only("*.pt", tmp_path)
    path.unlink()
    assert is_whole(seen, set()) == (False, "it cannot be read: No such file or directory")


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_of_the_trainer_is_whole_when_all_its_files_are(tmp_path: Path) -> None:
    save_hf(tmp_path, 500)
    assert verdict("checkpoint-*", tmp_path) == (True, "all 4 files were checked")


def test_a_folder_of_the_trainer_without_its_last_file_is_not_whole(tmp_path: Path) -> None:
    (save_hf(tmp_path, 500) / "trainer_state.json").unlink()
    assert verdict("checkpoint-*", tmp_path) == (False, "it has no trainer_state.json, which the Trainer writes last")


def test_a_folder_of_the_trainer_with_a_torn_last_file_is_not_whole(tmp_path: Path) -> None:
    (save_hf(tmp_path, 500) / "trainer_state.json").write_text('{"global_step": 5')
    assert verdict("checkpoint-*", tmp_path) == (False, "trainer_state.json is not whole")


def test_a_folder_with_one_cut_off_file_is_not_whole_and_names_it(tmp_path: Path) -> None:
    cut(save_hf(tmp_path, 500) / "optimizer.pt", 100)
    is_good, why = verdict("checkpoint-*", tmp_path)
    assert not is_good and why.startswith("optimizer.pt: it ends after ")


def test_a_folder_with_a_missing_shard_is_not_whole(tmp_path: Path) -> None:
    folder = save_hf(tmp_path, 500)
    for number in (1, 3):
        save_safetensors(folder / f"model-{number:05d}-of-00003.safetensors")
    assert verdict("checkpoint-*", tmp_path) == (False, "model-00002-of-00003.safetensors is missing")


def test_a_folder_whose_index_names_a_missing_file_is_not_whole(tmp_path: Path) -> None:
    folder = save_hf(tmp_path, 500)
    index = {"weight_map": {"a": "model.safetensors", "b": "extra.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert verdict("checkpoint-*", tmp_path) == (False, "extra.safetensors is missing")


def test_a_folder_of_accelerate_has_no_trainer_state_and_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-500"
    save_safetensors(folder / "model.safetensors")
    touch(folder / "random_states_0.pkl")
    assert verdict("checkpoint-*", tmp_path)[0]


def test_a_sharded_folder_of_torch_needs_its_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "step-500"
    touch(folder / "__0_0.distcp")
    assert verdict("step-*", tmp_path) == (False, "it has no .metadata, which torch writes last")
    touch(folder / ".metadata")
    assert verdict("step-*", tmp_path)[0]


def test_a_folder_with_a_file_open_for_writing_is_not_whole(tmp_path: Path) -> None:
    folder = save_hf(tmp_path, 500)
    open_paths = {str(folder / "config.json")}
    assert verdict("checkpoint-*", tmp_path, open_paths) == (False, "config.json: it is still open for writing")


def test_an_empty_folder_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-500").mkdir()
    assert verdict("checkpoint-*", tmp_path) == (False, "the folder is empty")


# -- choosing and resuming -------------------------------------------------------------------------------------------


def test_a_half_written_newest_folder_is_passed_over(tmp_path: Path) -> None:
    save_hf(tmp_path, 500)
    (save_hf(tmp_path, 1000) / "trainer_state.json").unlink()
    chosen = newest_whole(list_checkpoints("checkpoint-*", tmp_path), set())
    assert chosen is not None and chosen.path.name == "checkpoint-500"


def test_of_two_files_written_in_turn_the_later_one_is_the_newest_whatever_its_number(tmp_path: Path) -> None:
    touch(tmp_path / "model_1.bin", at_s=1000)
    touch(tmp_path / "model_0.bin", at_s=2000)
    chosen = newest_whole(list_checkpoints("model_*.bin", tmp_path), set())
    assert chosen is not None and chosen.path.name == "model_0.bin"


def test_without_a_whole_one_nothing_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "step-1.pt").touch()
    assert newest_whole(list_checkpoints("*.pt", tmp_path), set()) is None


def test_the_resume_argument_is_filled_in_word_by_word(tmp_path: Path) -> None:
    path = save_torch(tmp_path / "my run's" / "step 1.pt")
    checkpoint = only("*/*.pt", tmp_path).path
    argv = ["python", "train.py", "--lr", "1"]
    assert resume_argv(argv, "--resume {checkpoint}", checkpoint) == [*argv, "--resume", str(path)]
    assert resume_argv(argv, "'--load={checkpoint}' --go-on", checkpoint) == [*argv, f"--load={path}", "--go-on"]


def test_without_a_checkpoint_the_resume_argument_is_left_out() -> None:
    assert resume_argv(["python", "train.py"], "--resume {checkpoint}", None) == ["python", "train.py"]


def test_presets_know_what_trainers_call_their_checkpoints(tmp_path: Path) -> None:
    save_hf(tmp_path / "out", 500)
    save_torch(tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "epoch=0-step=10.ckpt")
    hf, lightning = preset("hf"), preset("lightning")
    assert names(list_checkpoints(hf.checkpoints, tmp_path)) == ["checkpoint-500"]
    assert names(list_checkpoints(lightning.checkpoints, tmp_path)) == ["epoch=0-step=10.ckpt"]
    assert resume_argv([], hf.resume_arg, only(hf.checkpoints, tmp_path).path)[0] == "--resume_from_checkpoint"
    assert resume_argv([], lightning.resume_arg, only(lightning.checkpoints, tmp_path).path)[0] == "--ckpt_path"


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        preset("lightening")
    assert str(caught.value) == (
        "error: unknown preset 'lightening' for --resume-from: known are hf and lightning\n"
        "hint: did you mean 'lightning'? for others say it yourself: --checkpoints GLOB "
        '--resume-arg "--resume {checkpoint}"'
    )


def test_a_resume_argument_that_cannot_be_meant_fails_at_the_start() -> None:
    check_resume_arg("--resume {checkpoint}")
    check_resume_arg("--resume-latest")
    with pytest.raises(UsageError) as caught:
        check_resume_arg("--resume {ckpt}")
    assert str(caught.value) == (
        "error: --resume-arg knows only {checkpoint}, not {ckpt}\n"
        'hint: for example --resume-arg "--resume {checkpoint}"'
    )
    with pytest.raises(UsageError) as caught:
        check_resume_arg("--resume '{checkpoint}")
    assert str(caught.value) == (
        'error: --resume-arg "--resume \'{checkpoint}" cannot be split into words: No closing quotation\n'
        'hint: write it as on a command line: --resume-arg "--resume {checkpoint}"'
    )


def test_a_whole_folder_survives_being_copied(tmp_path: Path) -> None:
    """Nothing in the check depends on where or when the files were made."""
    save_hf(tmp_path, 500)
    shutil.copytree(tmp_path / "checkpoint-500", tmp_path / "copy" / "checkpoint-500")
    assert verdict("copy/checkpoint-*", tmp_path)[0]


# -- other kinds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2])
def test_a_cut_off_hdf5_file_is_recognised(tmp_path: Path, version: int) -> None:
    """Layout after the HDF5 file format: signature, superblock with the address of the file's end."""
    if version == 0:
        head = bytes([0, 0, 0, 0, 0, 8, 8, 0]) + bytes(8)
    else:
        head = bytes([2, 8, 8, 0])
    ends = b"".join(end.to_bytes(8, "little") for end in (0, 2**64 - 1, 5000, 0))
    path = tmp_path / "weights.h5"
    path.write_bytes((b"\x89HDF\r\n\x1a\n" + head + ends).ljust(5000, b"x"))
    assert is_whole(only("*.h5", tmp_path), set())[0]
    cut(path, 1)
    assert is_whole(only("*.h5", tmp_path), set()) == (
        False,
        "its HDF5 header promises 5000 bytes, the file has 4999: it was cut off",
    )


def test_cut_off_pickle_and_json_files_are_recognised(tmp_path: Path) -> None:
    import pickle

    one = tmp_path / "state.pkl"
    one.write_bytes(pickle.dumps({"step": list(range(1000))}))
    other = touch(tmp_path / "state.json", text=json.dumps({"step": 7}))
    assert [is_whole(only(name, tmp_path), set())[0] for name in ("*.pkl", "*.json")] == [True, True]
    cut(one, 3)
    cut(other, 1)
    assert [is_whole(only(name, tmp_path), set())[0] for name in ("*.pkl", "*.json")] == [False, False]
