"""A stranger's training loop that writes its own checkpoints, in one of the ways people write them.

    python saves_its_own.py KIND [--every 10] [--hold-after 2] [--resume PATH | --init_from=resume]

Standard library only. Every save is told in journal.txt after its last byte is written, as is every start. With
--hold-after N it waits after N saves until somebody ends it. It also waits while a file `wait` is there, fails to
load when there is a file `refuse`, and crashes when there is a file `crash`
or `mistake`.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
import zipfile
from pathlib import Path

CHUNK_BYTES = 4096


def payload(step):
    """Other bytes for each step, the same for the same step."""
    block = hashlib.sha256(str(step).encode()).digest()
    return block * 1024


def write_slowly(path, data, pause_s):
    """In place, as torch.save(path) does: a kill in between leaves a torn file."""
    with open(path, "wb") as file:
        for start in range(0, len(data), CHUNK_BYTES):
            file.write(data[start : start + CHUNK_BYTES])
            file.flush()
            if pause_s:
                time.sleep(pause_s)


def zip_bytes(step):
    import io

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), json.dumps({"step": step}))
        archive.writestr(zipfile.ZipInfo("archive/data/0"), payload(step))
    return buffer.getvalue()


def safetensors_bytes(step):
    data = payload(step)
    header = json.dumps(
        {
            "__metadata__": {"step": str(step)},
            "w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]},
        }
    )
    return len(header).to_bytes(8, "little") + header.encode() + data


def hdf5_bytes(step):
    """The outside of an HDF5 file: signature, superblock 2 with the address of its end, then our own contents."""
    body = json.dumps({"step": step}).encode().ljust(64) + payload(step)
    size = 48 + len(body)
    ends = [0, 2**64 - 1, size, 48]
    return (
        b"\x89HDF\r\n\x1a\n"
        + bytes([2, 8, 8, 0])
        + b"".join(end.to_bytes(8, "little") for end in ends)
        + bytes(4)
        + body
    )


def read_step(path):
    """Load it as a trainer would: anything torn raises."""
    path = Path(path)
    if path.is_dir():
        state = json.loads((path / "trainer_state.json").read_text())["global_step"]
        assert (path / "model.safetensors").read_bytes() == safetensors_bytes(state), "torn weights"
        assert (path / "optimizer.pt").read_bytes() == zip_bytes(state), "torn optimizer"
        return state
    data = path.read_bytes()
    if data.startswith(b"\x89HDF"):
        step = json.loads(data[48:112])["step"]
        assert data == hdf5_bytes(step), "torn"
        return step
    with zipfile.ZipFile(path) as archive:
        step = json.loads(archive.read("archive/data.pkl"))["step"]
    assert data == zip_bytes(step), "torn"
    return step


def save(kind, step, pause_s):
    """Returns the path that was written last."""
    if kind in ("fixed", "nanogpt"):
        path = {"fixed": "last.pt", "nanogpt": "ckpt.pt"}[kind]
        write_slowly(path, zip_bytes(step), pause_s)
    elif kind == "renamed":
        path = "last.pt"
        write_slowly("last.tmp", zip_bytes(step), pause_s)
        os.replace("last.tmp", path)
    elif kind == "numbered":
        path = f"step-{step}.pt"
        write_slowly(path, zip_bytes(step), pause_s)
    elif kind in ("hf", "latest"):
        path = f"checkpoint-{step}"
        write_folder(Path(path), step, pause_s)
        if kind == "latest":
            Path("latest.new").unlink(missing_ok=True)
            Path("latest.new").symlink_to(path)
            os.replace("latest.new", "latest")
        for old in sorted(Path().glob("checkpoint-*"), key=lambda old: int(old.name.split("-")[1]))[:-2]:
            shutil.rmtree(old)
    elif kind == "lightning":
        path = "last.ckpt"
        write_slowly(f"epoch={step // 100}-step={step}.ckpt", zip_bytes(step), pause_s)
        write_slowly(path, zip_bytes(step), pause_s)
    elif kind == "keras":
        path = "weights.h5"
        write_slowly(path, hdf5_bytes(step), pause_s)
    elif kind == "turns":
        path = ("model_0.pt", "model_1.pt")[step // 10 % 2]
        write_slowly(path, zip_bytes(step), pause_s)
    else:
        raise SystemExit(f"no such kind: {kind}")
    return path


def write_folder(folder, step, pause_s):
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").unlink(missing_ok=True)
    write_slowly(folder / "model.safetensors", safetensors_bytes(step), pause_s)
    write_slowly(folder / "optimizer.pt", zip_bytes(step), pause_s)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--hold-after", type=int, default=0)
    parser.add_argument("--pause-ms", type=float, default=0.0, help="between the pieces of a file")
    parser.add_argument("--resume")
    parser.add_argument("--init_from", default="scratch")
    options = parser.parse_args()

    def tell(text):
        with open("journal.txt", "a") as journal:
            journal.write(text + "\n")
        print(text, flush=True)

    if os.path.exists("mistake"):
        raise ValueError("the learning rate must be positive")
    if os.path.exists("refuse"):
        raise RuntimeError("cannot load the checkpoint: its state_dict has other keys")
    origin = "ckpt.pt" if options.init_from == "resume" else options.resume
    step = read_step(origin) if origin else 0
    tell(f"started at {step} from {origin or 'scratch'}")
    while os.path.exists("wait"):
        time.sleep(0.01)
    saves = 0
    while step < 100_000:
        step += 1
        if step % options.every == 0:
            path = save(options.kind, step, options.pause_ms / 1000)
            saves += 1
            tell(f"saved {step} {path}")
        while options.hold_after and saves >= options.hold_after:
            time.sleep(0.01)
        if os.path.exists("crash"):
            os.unlink("crash")
            sys.exit("crashed by itself")


if __name__ == "__main__":
    main()
