"""CIFAR: official binary files, and Python batches without unpickling; downloaded with resume, checked, named when
corrupt."""

import ast
import hashlib
import io
import pickle
import tarfile
import types
from dataclasses import replace
from pathlib import Path

import headwise_papers.data.cifar as cifar
import numpy as np
import pytest
import torch
from headwise_papers.data import download as downloading
from headwise_papers.tasks.cifar import Cifar
from local_server import Server
from small_studies import ENVIRONMENT, Silent, all_numbers
from tiny_cifar import write_binary

from headwise.lab.comparing.compare import compare
from headwise.lab.comparing.comparison import Comparison
from headwise.lab.engines.local import HereEngine
from headwise.study import Study, StudyError


class _Py2Pickler(pickle._Pickler):
    """Write bytes as Python 2 did, which is how the official files are written."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_bytes(self, obj):
        self.write(pickle.BINSTRING + len(obj).to_bytes(4, "little") + obj)
        self.memoize(obj)

    dispatch[bytes] = save_bytes


def batch_bytes(images, classes, label=b"labels"):
    stream = io.BytesIO()
    raw = images.reshape(len(images), -1).numpy()
    _Py2Pickler(stream, protocol=2).dump({b"data": raw, label: classes.tolist(), b"batch_label": b"part 1 of 1"})
    # numpy's own module had another name when the files were written
    return stream.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def images(count, seed, classes=10):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return pixels, torch.randint(0, classes, (count,), generator=generator)


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Make small files in the official form, with their own MD5 in the place of the official ones."""
    official = cifar.SOURCES["cifar10"]
    folder = tmp_path / "official" / official.binary.folder
    folder.mkdir(parents=True)
    made = {}
    for seed, name in enumerate(official.binary.files):
        pixels, classes = images(8, seed)
        content = write_binary(folder / name, pixels.reshape(8, -1).numpy(), classes.tolist())
        made[name] = hashlib.md5(content).hexdigest()
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, official.binary.folder)
    test = {"test_batch.bin": made.pop("test_batch.bin")}
    form = replace(official.binary, train=made, test=test)
    small = replace(official, archive_md5=hashlib.md5(archive.read_bytes()).hexdigest(), binary=form)
    monkeypatch.setitem(cifar.SOURCES, "cifar10", small)
    return small


@pytest.fixture(autouse=True)
def waited(monkeypatch):
    """Wait for nothing; give the list of the seconds that would have been waited."""
    seconds = []
    monkeypatch.setattr(downloading, "time", types.SimpleNamespace(sleep=seconds.append))
    return seconds


@pytest.mark.parametrize(("name", "coarse"), [("cifar10", b""), ("cifar100", b"\x13")])
def test_images_and_classes_come_back_as_written(tmp_path, name, coarse):
    found = cifar.SOURCES[name]
    folder = tmp_path / found.binary.folder
    folder.mkdir()
    written = [images(5, seed, found.classes) for seed, _ in enumerate(found.binary.train)]
    for file, (pixels, classes) in zip(found.binary.train, written):
        write_binary(folder / file, pixels.reshape(5, -1).numpy(), classes.tolist(), coarse)
    pixels, classes = cifar.read(found, "train", tmp_path)
    assert torch.equal(pixels, torch.cat([one for one, _ in written]))
    assert torch.equal(classes, torch.cat([one for _, one in written]))
    assert (pixels.dtype, classes.dtype) == (torch.uint8, torch.int64)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_python_batches_of_an_earlier_download_are_read_and_nothing_is_downloaded(tmp_path, monkeypatch, name):
    found = cifar.SOURCES[name]
    folder = tmp_path / found.python.folder
    folder.mkdir()
    # more than pickle appends to a list at once
    written = [images(1005, seed, found.classes) for seed, _ in enumerate(found.python.files)]
    sums = {}
    for file, (pixels, classes) in zip(found.python.files, written):
        content = batch_bytes(pixels, classes, found.python.key.encode())
        (folder / file).write_bytes(content)
        sums[file] = hashlib.md5(content).hexdigest()
    form = replace(
        found.python, train={n: sums[n] for n in found.python.train}, test={n: sums[n] for n in found.python.test}
    )
    found = replace(found, python=form, address="http://127.0.0.1:9/nobody")
    cifar.prepare(found, tmp_path, pytest.fail)
    pixels, classes = cifar.read(found, "test", tmp_path)
    assert torch.equal(pixels, written[-1][0]) and torch.equal(classes, written[-1][1])


class _Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("hidden", [lambda path: _Runs(path), lambda path: {b"data": [_Runs(path)]}])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, hidden):
    trap, form = tmp_path / "trap", cifar.SOURCES["cifar100"].python
    folder = tmp_path / form.folder
    folder.mkdir()
    (folder / "train").write_bytes(pickle.dumps(hidden(trap)))
    with pytest.raises(StudyError, match=r"train is not a CIFAR file: it holds 0 classes"):
        cifar.read(cifar.SOURCES["cifar100"], "train", tmp_path)
    assert not trap.exists()


def test_no_loader_of_data_imports_what_unpickles():
    for path in Path(cifar.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [one.name for one in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None)]
            )
            assert "pickle" not in names, path


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", pickle.dumps([1]), pickle.dumps({b"data": 1}), pickle.dumps({b"data": np.zeros(3)})]
)
def test_what_is_no_batch_is_named(content):
    with pytest.raises(ValueError, match=r"not a Python batch|classes and"):
        cifar.python_batch(content, "labels")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"its 0 bytes are not a whole number of images of 3,074 bytes"),
        (bytes(3073), r"its 3,073 bytes are not a whole number"),
        (bytes([0, 100]) + bytes(3072), r"it holds the class 100, of 100 counted from 0"),
    ],
)
def test_what_is_no_binary_file_is_named(tmp_path, content, message):
    found = cifar.SOURCES["cifar100"]
    folder = tmp_path / found.binary.folder
    folder.mkdir()
    (folder / "train.bin").write_bytes(content)
    with pytest.raises(StudyError, match=rf"train\.bin is not a CIFAR file: {message}"):
        cifar.read(found, "train", tmp_path)


def test_missing_files_are_downloaded_in_spite_of_a_cut_and_checked(tmp_path, source, monkeypatch):
    content, said = (tmp_path / "cifar-10-binary.tar.gz").read_bytes(), []
    with Server(content, cut=1000) as server:
        monkeypatch.setitem(cifar.SOURCES, "cifar10", replace(source, address=server.address))
        task = Cifar(name="cifar10").located(tmp_path / "data")
        task.prepare(said.append)
    assert server.asked == [None, "bytes=1000-"]
    assert any("cut after 1,000 bytes" in text for text in said)
    for name in source.binary.files:
        assert (tmp_path / "data" / source.binary.folder / name).read_bytes() == (
            tmp_path / "official" / source.binary.folder / name
        ).read_bytes()
    assert not list((tmp_path / "data").glob("*.gz*"))
    # a second start asks nobody
    task.prepare(pytest.fail)


def test_only_what_is_missing_is_unpacked(tmp_path, source, monkeypatch):
    folder = tmp_path / "official" / source.binary.folder
    (folder / "data_batch_3.bin").unlink()
    kept = (folder / "test_batch.bin").stat().st_mtime_ns
    with Server((tmp_path / "cifar-10-binary.tar.gz").read_bytes()) as server:
        monkeypatch.setitem(cifar.SOURCES, "cifar10", replace(source, address=server.address))
        Cifar(name="cifar10").located(folder).prepare(lambda text: None)
    assert (folder / "data_batch_3.bin").exists() and (folder / "test_batch.bin").stat().st_mtime_ns == kept


def test_a_server_without_ranges_starts_the_file_again(tmp_path):
    content = bytes(range(256)) * 20
    (tmp_path / "x.part").write_bytes(content[:100])
    with Server(content, ranges=False) as server:
        downloading.download(server.address, tmp_path / "x", hashlib.md5(content).hexdigest(), lambda text: None)
    assert (tmp_path / "x").read_bytes() == content and server.asked == ["bytes=100-"]


def test_a_file_that_had_arrived_whole_is_not_fetched_again(tmp_path):
    content = b"all of it"
    (tmp_path / "x.part").write_bytes(content)
    with Server(content) as server:
        downloading.download(server.address, tmp_path / "x", hashlib.md5(content).hexdigest(), lambda text: None)
    assert (tmp_path / "x").read_bytes() == content


@pytest.mark.parametrize("codes", [(503,), (500, 429, 502)])
def test_a_server_that_is_busy_is_asked_again_after_a_while(tmp_path, waited, codes):
    content, said = b"all of it", []
    with Server(content, refuse=codes) as server:
        downloading.download(server.address, tmp_path / "x", hashlib.md5(content).hexdigest(), said.append)
    assert (tmp_path / "x").read_bytes() == content and len(server.asked) == len(codes) + 1
    assert waited == list(downloading.WAITS[: len(codes)]) and str(codes[0]) in said[0]


@pytest.mark.parametrize(("codes", "asked"), [((404,), 1), ((503,) * 9, 4)])
def test_a_server_that_refuses_is_asked_no_more_than_it_is_worth(tmp_path, codes, asked):
    with Server(b"x", refuse=codes) as server, pytest.raises(StudyError, match=str(codes[0])):
        downloading.download(server.address, tmp_path / "x", "abc", lambda text: None)
    assert len(server.asked) == asked


def test_a_cut_that_the_server_does_not_show_is_gone_on_from(tmp_path):
    content = bytes(range(256)) * 20
    with Server(content, cut=1000, length=False) as server:
        downloading.download(server.address, tmp_path / "x", hashlib.md5(content).hexdigest(), lambda text: None)
    assert (tmp_path / "x").read_bytes() == content and server.asked == [None, "bytes=1000-"]


def test_what_arrives_wrong_is_deleted_and_both_sums_are_shown(tmp_path):
    wrong = pytest.raises(StudyError, match=r"what arrived has MD5 \w{32}, officially it is abc; it was deleted")
    with Server(b"not the archive") as server, wrong:
        downloading.download(server.address, tmp_path / "x", "abc", lambda text: None)
    assert not list(tmp_path.iterdir())


def test_a_download_that_cannot_be_is_an_error_with_the_way_by_hand(tmp_path):
    server = Server(b"")
    server.server_close()
    with pytest.raises(
        StudyError, match=r"could not be downloaded: .*Or fetch http.* yourself and unpack it in .*--data"
    ):
        downloading.download(server.address, tmp_path / "x", "abc", lambda text: None)


def test_every_corrupt_file_is_named(tmp_path, source):
    folder = tmp_path / "official" / source.binary.folder
    for name in ("data_batch_2.bin", "test_batch.bin"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-1] + b"!")
    with pytest.raises(
        StudyError, match=r"corrupt: .*data_batch_2.bin \(MD5 .*; .*test_batch.bin \(MD5 .*Delete these files"
    ):
        Cifar(name="cifar10").located(tmp_path / "official").prepare(lambda text: None)


def test_a_study_of_cifar_records_test_curves_and_holds_images_out_for_trials(tmp_path, source):
    task = Cifar(name="cifar10", epochs=2, batch_size=16, depth=1, heads=1, head_dim=8, dim=8, mlp_dim=8, held_out=10)
    study = Study(
        name="small",
        title="small",
        question="?",
        task=task.located(tmp_path / "official"),
        task_place="headwise_papers.tasks.cifar:Cifar",
        methods=(),
        seeds=1,
    )
    listener = Silent()
    comparison = Comparison(
        study, tmp_path / "out", HereEngine(), listener, data=task.folder, trials=1, environment=ENVIRONMENT
    )
    compare(comparison)
    ((lines, result),) = all_numbers(tmp_path / "out").values()
    assert lines[-1]["metrics"]["test/accuracy"] == result["metrics"]["test/accuracy"]
    assert lines[0]["metrics"]["test/loss"] > 0
    assert result["steps"] == 2 * 3 and "validation/loss" not in lines[0]["metrics"]
    trial = next((tmp_path / "out" / "trials").glob("*/result.json")).parent
    first = (trial / "metrics.jsonl").read_text().splitlines()[0]
    assert '"test_' not in first and '"steps": 2' in first


@pytest.mark.parametrize(("name", "chance"), [("cifar10", 0.1), ("cifar100", 0.01)])
def test_a_diverged_run_counts_as_chance(name, chance):
    metrics = {metric.name: metric.failure for metric in Cifar(name=name).all_metrics()}
    assert metrics == {"accuracy": chance, "loss": None}
