"""Tiny files in the layouts of the publishers, for the tests of the readers."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

CIFAR10_BATCHES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def cifar10_images(batch: int, n: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(batch)
    return rng.integers(0, 256, (n, 3072)).astype(np.uint8), rng.integers(0, 10, n)


def cifar10_binary() -> dict[str, bytes]:
    files = {"batches.meta.txt": b"\n".join(b"class%d" % i for i in range(10)) + b"\n\n"}
    for i, name in enumerate(CIFAR10_BATCHES):
        x, y = cifar10_images(i)
        files[f"{name}.bin"] = np.concatenate([y.astype(np.uint8)[:, None], x], axis=1).tobytes()
    return files


def cifar10_pickle(protocol: int = 2) -> dict[str, bytes]:
    meta = {"label_names": [f"class{i}" for i in range(10)], "num_vis": 3072}
    files = {"batches.meta": pickle.dumps(meta, protocol)}
    for i, name in enumerate(CIFAR10_BATCHES):
        x, y = cifar10_images(i)
        content = {
            b"data": x,
            b"labels": y.tolist(),
            b"batch_label": b"a batch",
            b"filenames": [b"a.png", b"b.png"],
        }
        files[name] = pickle.dumps(content, protocol)
    return files


def cifar100_images(part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(len(part))
    return (
        rng.integers(0, 256, (4, 3072)).astype(np.uint8),
        rng.integers(0, 100, 4),
        rng.integers(0, 20, 4),
    )


def cifar100_binary() -> dict[str, bytes]:
    files = {}
    for part in ("train", "test"):
        x, fine, coarse = cifar100_images(part)
        files[f"{part}.bin"] = np.concatenate(
            [np.stack([coarse, fine], 1).astype(np.uint8), x], axis=1
        ).tobytes()
    return files


def cifar100_pickle() -> dict[str, bytes]:
    files = {}
    for part in ("train", "test"):
        x, fine, coarse = cifar100_images(part)
        content = {"data": x, "fine_labels": fine.tolist(), "coarse_labels": coarse.tolist()}
        files[part] = pickle.dumps(content, 2)
    return files


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def tar(path: Path, files: dict[str, bytes], root: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{root}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def zipped(path: Path, files: dict[str, bytes], root: str = "") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(root + name, data)
    return path


def idx(array: np.ndarray) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def mnist(compress: bool = True, side: int = 28) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    files = {}
    for stem, n in (("train", 6), ("t10k", 4)):
        files[f"{stem}-images-idx3-ubyte"] = idx(
            rng.integers(0, 256, (n, side, side)).astype(np.uint8)
        )
        files[f"{stem}-labels-idx1-ubyte"] = idx((np.arange(n) % 10).astype(np.uint8))
    return {f"{n}.gz": gzip.compress(d) for n, d in files.items()} if compress else files


def image(
    width: int = 6, height: int = 6, mode: str = "RGB", form: str = "PNG", seed: int = 0
) -> bytes:
    rng = np.random.default_rng(seed)
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, shape).astype(np.uint8)).convert(mode).save(out, form)
    return out.getvalue()


def tiny_imagenet() -> dict[str, bytes]:
    """Return two classes of two training images, one grey, and two validation images."""
    files = {
        "wnids.txt": b"n02\nn01\n",
        "words.txt": b"n01\tgoldfish, Carassius auratus\nn02\tfrog\nn99\tthing\n",
        "val/val_annotations.txt": (
            b"val_0.JPEG\tn02\t0\t0\t63\t63\nval_1.JPEG\tn01\t0\t0\t63\t63\n"
        ),
    }
    for k, wnid in enumerate(("n01", "n02")):
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b"boxes"
        for i in range(2):
            mode = "L" if (k, i) == (0, 0) else "RGB"
            files[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = image(64, 64, mode, "JPEG", 10 * k + i)
        files[f"val/images/val_{k}.JPEG"] = image(64, 64, "RGB", "JPEG", 50 + k)
    return files


def glue(task: str) -> dict[str, bytes]:
    if task == "sst2":
        rows = 'sentence\tlabel\n"quoted at the start\t1\nplain \t0\nu2028\u2028inside " here\t1\n'
        return {"SST-2/train.tsv": rows.encode(), "SST-2/dev.tsv": b"sentence\tlabel\ngood\t1\n"}
    if task == "qqp":
        head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        rows = (
            head + "0\t1\t2\tIs it?\tIt is?\t1\n1\t3\t4\tBroken\nhere?\tNo\t0\n2\t5\t6\tWhy?\t\t0\n"
        )
        return {
            "QQP/train.tsv": rows.encode(),
            "QQP/dev.tsv": (head + "0\t1\t2\ta\tb\t0\n").encode(),
        }
    if task == "mnli":
        early = "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2\tlabel1"
        train = f"{early}\tgold_label\n0\tp\tq\tg\tA man.\tA person.\tneutral\tentailment\n"
        more = "\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label\n"
        dev = (
            early
            + more
            + "0\tp\tq\tg\tNo.\tYes.\tneutral\tneutral\tneutral\tneutral\tneutral\tcontradiction\n"
        )
        return {"MNLI/train.tsv": train.encode(), "MNLI/dev_matched.tsv": dev.encode()}
    folder, one, two = {
        "qnli": ("QNLI", "question", "sentence"),
        "rte": ("RTE", "sentence1", "sentence2"),
    }[task]
    rows = f"index\t{one}\t{two}\tlabel\n0\tWho?\tHe.\tentailment\n1\tWhat?\tShe.\tnot_entailment\n"
    return {f"{folder}/train.tsv": rows.encode(), f"{folder}/dev.tsv": rows.encode()}


def image_folder() -> dict[str, bytes]:
    return {
        f"{part}/{name}/{i}.png": image(6, 6, seed=hash((part, name, i)) % 1000)
        for part in ("train", "test")
        for name in ("cat", "dog")
        for i in range(2)
    }
