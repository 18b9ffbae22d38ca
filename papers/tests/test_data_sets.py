"""Every data set: downloaded with resume and checked, read as its publisher means it, refused by name where it is
broken."""

import importlib
import pickle
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_data
import torch
from headwise_papers.data import an4, camvid, frost, multi30k, squad, sst2, sts2012, stsb, tinyshakespeare, wikitext2
from headwise_papers.data import download as downloading
from headwise_papers.data.archive import Package, Source
from headwise_papers.data.text_files import read_lines, read_number, read_rows
from local_server import Server

from headwise.study import StudyError
from headwise_verdict.files.ownership import MARKER

# those whose official files are what lies in the folder
PLAIN = ["wikitext2", "tinyshakespeare", "sst2", "stsb", "sts2012", "multi30k", "squad", "frost"]


def silent(text):
    """Say nothing."""


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(downloading, "time", types.SimpleNamespace(sleep=lambda seconds: None))


@pytest.fixture
def tiny(monkeypatch):
    """Put a tiny data set in the place of a real one, its publisher on this machine."""
    servers = []

    def put(name, **settings):
        module = importlib.import_module(f"headwise_papers.data.{name}")
        own, official = getattr(tiny_data, name)()
        server = Server(official, **settings)
        servers.append(server.__enter__())
        place = "OFFICIAL" if name == "squad" else "SOURCE"
        monkeypatch.setattr(module, place, tiny_data.moved(getattr(module, place), own, server))
        return module, own, server

    yield put
    for server in servers:
        server.__exit__()


@pytest.mark.parametrize("name", PLAIN)
def test_a_data_set_is_downloaded_in_spite_of_a_cut_and_lies_as_it_is_shared(tmp_path, tiny, name):
    module, own, server = tiny(name, cut=10)
    said = []
    module.prepare(tmp_path, said.append)
    assert "bytes=10-" in server.asked and any("cut after 10 bytes" in text for text in said)
    (folder,) = (path for path in tmp_path.iterdir() if path.name != MARKER)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == own
    assert sorted(module.files(tmp_path)) == sorted(folder / name for name in own)
    # a second start asks nobody; the folder itself may be named too
    module.prepare(tmp_path, pytest.fail)
    module.prepare(folder, pytest.fail)
    # whatever it is called
    module.prepare(folder.rename(tmp_path / "mine"), pytest.fail)


@pytest.mark.parametrize("name", PLAIN)
def test_every_corrupt_file_is_named_and_downloaded_anew_when_deleted(tmp_path, tiny, name):
    module, own, _ = tiny(name)
    module.prepare(tmp_path, silent)
    paths = module.files(tmp_path)
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(StudyError, match=r"corrupt: .*Delete these files") as caught:
        module.prepare(tmp_path, silent)
    assert all(path.name in str(caught.value) for path in paths)
    paths[0].unlink()
    with pytest.raises(StudyError) if len(paths) > 1 else _nothing():
        module.prepare(tmp_path, silent)
    assert paths[0].read_bytes() == own[paths[0].name]


def _nothing():
    import contextlib

    return contextlib.nullcontext()


def test_the_cache_of_the_user_is_taken_without_a_folder(tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module, own, _ = tiny("tinyshakespeare")
    module.prepare(None, silent)
    assert module.files(None) == [tmp_path / "headwise" / "tinyshakespeare" / "input.txt"]
    assert module.read(None).encode() == own["input.txt"]


@pytest.mark.parametrize("name", ["wikitext2", "squad"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, tiny, name):
    module = tiny(name)[0]
    (tmp_path / "given").write_text("some text")
    for act in (lambda: module.prepare(tmp_path / "given", silent), lambda: module.files(tmp_path / "given")):
        with pytest.raises(StudyError, match=r"--data names .*given, which is a file: name the folder that contains"):
            act()


def test_a_second_address_is_asked_where_the_first_fails(tmp_path, tiny, monkeypatch):
    module, own, server = tiny("wikitext2")
    (package,) = module.SOURCE.packages
    gone = replace(package, addresses=(server.address_of("gone.zip"), server.address_of("wikitext-2-v1.zip")))
    monkeypatch.setattr(module, "SOURCE", replace(module.SOURCE, packages=(gone,)))
    said = []
    module.prepare(tmp_path, said.append)
    assert (tmp_path / "wikitext-2" / "test.txt").read_bytes() == own["test.txt"]
    assert any("gone.zip answered 404" in text and "Trying the next address" in text for text in said)


def test_a_download_with_the_wrong_checksum_is_deleted(tmp_path, tiny, monkeypatch):
    module, _, _ = tiny("stsb")
    for wrong, kind in (("0" * 32, "MD5"), ("0" * 64, "SHA-256")):
        packages = (replace(module.SOURCE.packages[0], checksum=wrong),)
        monkeypatch.setattr(module, "SOURCE", replace(module.SOURCE, packages=packages))
        with pytest.raises(StudyError, match=rf"what arrived has {kind} \w+, officially it is {wrong}; it was deleted"):
            module.prepare(tmp_path, silent)
        assert not list(tmp_path.glob("*.gz*")) and not list((tmp_path / "stsb").iterdir())


@pytest.mark.parametrize(
    ("ending", "content", "reason"),
    [
        ("x.zip", b"no archive", "not a zip file"),
        ("x.zip", tiny_data.zipped({"other": b"1"}), "'a'"),
        ("x.tar.gz", b"no archive", "not a gzip file"),
        ("x.tar.gz", tiny_data.tarred({"other": b"1"}), "'a' not found"),
        ("x.gz", b"no archive", "[Nn]ot a gzipped file"),
    ],
    # an archive holds the second in which it was made: its bytes would name the test otherwise in each worker
    ids=["no zip", "another zip", "no tar", "another tar", "no gz"],
)
def test_an_archive_that_cannot_be_unpacked_is_named_and_deleted(tmp_path, ending, content, reason):
    with Server({ending: content}) as server:
        source = Source("set", {"a": None}, (Package((server.address_of(ending),), {"a": "a"}),))
        with pytest.raises(StudyError, match=rf"{ending} cannot be unpacked: .*{reason}.*It was deleted"):
            source.prepare(tmp_path, silent)
    assert {path.name for path in tmp_path.rglob("*")} == {MARKER, "set"}


def test_only_what_is_missing_is_fetched(tmp_path, tiny):
    module, own, server = tiny("multi30k")
    module.prepare(tmp_path, silent)
    asked = len(server.asked)
    (tmp_path / "multi30k" / "val.en").unlink()
    module.prepare(tmp_path, silent)
    assert len(server.asked) == asked + 1
    assert (tmp_path / "multi30k" / "val.en").read_bytes() == own["val.en"]


# what the readers give


def test_texts_come_back_whole(tmp_path, tiny):
    module, own, _ = tiny("wikitext2")
    module.prepare(tmp_path, silent)
    assert module.read(tmp_path, "validation").encode() == own["valid.txt"]
    assert "test" in module.read(tmp_path, "test")
    with pytest.raises(ValueError, match="There is no split 'dev'; the splits are train, validation, test"):
        module.read(tmp_path, "dev")


def test_sentences_and_labels(tmp_path, tiny):
    module, _, _ = tiny("sst2")
    module.prepare(tmp_path, silent)
    # the quote is a character like any other, the space that GLUE leaves at the end goes
    assert module.read(tmp_path, "train") == (["fine", "it 's \"bad"], [1, 0])
    assert module.read(tmp_path, "validation") == (["so so"], [0])
    assert module.read(tmp_path, "test") == (["a good/bad film .", "dull"], [1, 0])


def test_pairs_and_scores(tmp_path, tiny):
    module, _, _ = tiny("stsb")
    module.prepare(tmp_path, silent)
    assert module.read(tmp_path, "validation") == (['A "plane.'], ["A plane is."], [2.5])
    assert module.read(tmp_path, "train")[2] == [5.0]
    module, _, _ = tiny("sts2012")
    module.prepare(tmp_path, silent)
    first, second, scores = module.read(tmp_path, "train")
    assert first == ["one of MSRpar.train.tsv", "x", "one of SMTeuroparl.train.tsv", "x"]
    assert second == ["other", "y"] * 2 and scores == [0.5, 4.0] * 2
    assert len(module.read(tmp_path, "test")[0]) == 8
    with pytest.raises(ValueError, match="There is no split 'validation'; the splits are train, test"):
        module.read(tmp_path, "validation")


def test_sentences_of_two_languages_stand_side_by_side(tmp_path, tiny):
    module, _, _ = tiny("multi30k")
    module.prepare(tmp_path, silent)
    # a next-line character ends no line
    assert module.read(tmp_path, "test")[0] == ("test_2016_flickr.de eins", "test_2016_flickr.en eins")
    assert module.read(tmp_path, "validation")[1] == ("zwei\u0085drei", "zwei\u0085drei")


def test_questions_know_their_article_and_answers(tmp_path, tiny, monkeypatch):
    module, _, _ = tiny("squad")
    module.prepare(tmp_path, silent)
    (question,) = module.read(tmp_path)
    assert question == squad.Question("Bowl", "Denver Broncos", "Who?", [("Broncos", 7), ("Denver", 0)])
    # a rebuilt file is taken where the official one is not there
    official = tmp_path / "squad" / "dev-v1.1.json"
    rebuilt = official.rename(official.with_name("dev-v1.1.rebuilt.json"))
    monkeypatch.setattr(
        module, "REBUILT", replace(module.REBUILT, files={rebuilt.name: tiny_data.md5(rebuilt.read_bytes())})
    )
    module.prepare(tmp_path, pytest.fail)
    assert module.files(tmp_path) == [rebuilt] and module.read(tmp_path) == [question]


def test_photographs_of_frost_are_red_green_blue(tmp_path, tiny):
    module, _, _ = tiny("frost")
    module.prepare(tmp_path, silent)
    images = module.read(tmp_path)
    assert [image.shape for image in images] == [(5, 9, 3)] * 6
    assert images[1][2, 3].tolist() == [1, 7, 200] and images[1].dtype == np.uint8


@pytest.fixture
def an4_file(tmp_path, monkeypatch):
    path = tmp_path / "an4" / an4.NAME
    path.parent.mkdir()
    path.write_bytes(tiny_data.an4_npz())
    monkeypatch.setattr(an4, "SOURCE", replace(an4.SOURCE, files={an4.NAME: tiny_data.md5(path.read_bytes())}))
    return path


def test_utterances_are_cut_from_their_frames(tmp_path, an4_file):
    an4.prepare(tmp_path, pytest.fail)
    (first,), (second,) = an4.read(tmp_path, "train"), an4.read(tmp_path, "test")
    assert (first.name, first.transcript, first.features.shape) == ("an1", "YES", (2, 13))
    assert (second.name, second.transcript, second.features.shape) == ("an2", "GO ON", (3, 13))
    assert second.features.dtype == torch.float32 and second.features[0].tolist() == list(range(26, 39))
    with pytest.raises(ValueError, match="There is no split 'validation'"):
        an4.read(tmp_path, "validation")


def test_an4_without_its_features_says_where_they_come_from(tmp_path):
    with pytest.raises(
        StudyError, match=r"an4 lacks an4_mfcc_f16.npz. .*--data FOLDER with an4/an4_mfcc_f16.npz.*data.md"
    ):
        an4.prepare(tmp_path, silent)
    with pytest.raises(StudyError, match=r"an4_mfcc_f16.npz is missing"):
        an4.read(tmp_path, "train")


@pytest.fixture
def camvid_server(monkeypatch):
    with Server({"master.zip": tiny_data.zipped(tiny_data.camvid_members())}, cut=20) as server:
        monkeypatch.setattr(camvid, "PACKAGE", Package((server.address_of("master.zip"),)))
        monkeypatch.setattr(camvid, "COUNTS", {"train": 3, "val": 1, "test": 2})
        yield server
    camvid._read.cache_clear()


def test_pictures_of_twice_the_size_are_halved(tmp_path, camvid_server):
    camvid.prepare(tmp_path, silent)
    assert "bytes=20-" in camvid_server.asked
    camvid.prepare(tmp_path, pytest.fail)
    images, classes = camvid.read(tmp_path, "train")
    assert images.shape == (3, 3, 180, 240) and classes.shape == (3, 180, 240)
    assert images.dtype == classes.dtype == torch.uint8
    # of four pixels one has 100; of the classes, the pixel at an even place
    assert [image.unique().tolist() for image in images] == [[25], [26], [27]] and classes.unique().tolist() == [11]
    assert len(camvid.read(tmp_path, "test")[0]) == 2 and len(camvid.files(tmp_path)) == 12
    assert camvid.find_folder(tmp_path / "camvid") == tmp_path / "camvid"


def test_every_broken_picture_is_named(tmp_path, camvid_server):
    camvid.prepare(tmp_path, silent)
    train, annot = tmp_path / "camvid" / "train", tmp_path / "camvid" / "trainannot"
    torn = (train / "0001TP_0.png").read_bytes()
    (train / "0001TP_0.png").write_bytes(torn[: len(torn) // 2])
    (train / "0001TP_1.png").write_bytes(tiny_data.picture((480, 360), (1, 2, 3)))
    (annot / "0001TP_2.png").write_bytes(tiny_data.picture((240, 180), 12, mode="L"))
    (tmp_path / "camvid" / "testannot" / "0001TP_0.png").write_bytes(tiny_data.picture((240, 180), (1, 2, 3)))
    with pytest.raises(StudyError) as caught:
        camvid.prepare(tmp_path, silent)
    for said in (
        r"train/0001TP_0.png is not a picture",
        r"train/0001TP_1.png is (480, 360) pixels instead of (240, 180)",
        r"trainannot/0001TP_2.png has class 12; the classes are 0 to 10, and 11 for void",
        r"testannot/0001TP_0.png holds colours (RGB)",
    ):
        assert said in str(caught.value)
    with pytest.raises(StudyError, match=r"0001TP_0.png is not a picture"):
        camvid.read(tmp_path, "train")


def test_a_split_without_pictures_is_refused(tmp_path):
    (tmp_path / "camvid" / "trainannot").mkdir(parents=True)
    with pytest.raises(StudyError, match="train contains no pictures"):
        camvid.read(tmp_path, "train")


# what is refused by name


def put(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"sentence\tlabel\nfine\t1\nonly one\n", r"train.tsv, line 3: 1 columns instead of 2"),
        (b"sentence\tlabel\nfine\t1\tx\n", r"line 2: 3 columns"),
        (b"sentence\tlabel\nfine\t2\n", r"line 2: label '2' instead of 0 or 1"),
        (b"sentence\tlabel\nfine\t\n", r"line 2: label ''"),
        (b"text\tlabel\nfine\t1\n", r"line 1: \['text', 'label'\] instead of the header"),
        (b"", r"line 1: it is empty"),
        (b"sentence\tlabel\nfine\t1\n \t0\n\t1\n", r"2 empty sentences, in line 2, 3"),
        (b"sentence\tlabel\n\xff\xfe\t1\n", r"is not a text in UTF-8: byte 15"),
    ],
)
def test_a_broken_table_of_sentences_is_refused_by_line(tmp_path, content, said):
    with pytest.raises(StudyError, match=said):
        sst2.read(put(tmp_path / "sst2", "train.tsv", content), "train")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("g\tf\ty\t1\t5.1\ta\tb\n", r"sts-dev.csv, line 1: '5.1' is not a number from 0 to 5"),
        ("g\tf\ty\t1\tnan\ta\tb\n", r"'nan' is not a number"),
        ("g\tf\ty\t1\tx\ta\tb\n", r"'x' is not a number"),
        ("g\tf\ty\t1\t5\ta\n", r"line 1: 6 columns instead of 7"),
        ("g\tf\ty\t1\t5\ta\t \n", r"1 empty sentences, in line 1"),
    ],
)
def test_a_broken_row_of_scores_is_refused_by_line(tmp_path, row, said):
    with pytest.raises(StudyError, match=said):
        stsb.read(put(tmp_path / "stsb", "sts-dev.csv", row.encode()), "validation")


def test_a_broken_part_of_sts2012_is_refused_by_line(tmp_path):
    put(tmp_path / "sts2012", "MSRpar.train.tsv", b"5\ta\tb\n-1\ta\tb\n")
    with pytest.raises(StudyError, match=r"MSRpar.train.tsv, line 2: '-1' is not a number from 0 to 5"):
        sts2012.read(tmp_path, "train")
    put(tmp_path / "sts2012", "MSRpar.train.tsv", b"5\ta\tb\tc\n")
    with pytest.raises(StudyError, match=r"line 1: 4 columns instead of 3"):
        sts2012.read(tmp_path, "train")


def test_sentences_without_a_partner_are_refused(tmp_path):
    put(tmp_path / "multi30k", "val.de", b"eins\nzwei\n")
    put(tmp_path / "multi30k", "val.en", b"one\n")
    with pytest.raises(StudyError, match=r"val.de has 2 lines, val.en 1: they form no pairs"):
        multi30k.read(tmp_path, "validation")
    put(tmp_path / "multi30k", "val.en", b"one\n\n")
    with pytest.raises(StudyError, match=r"val.en: 1 empty sentences, in line 2"):
        multi30k.read(tmp_path, "validation")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not a SQuAD file: JSONDecodeError"),
        (b"[]", "is not a SQuAD file: TypeError"),
        (b'{"data": [{"title": "x"}]}', "is not a SQuAD file: KeyError: 'paragraphs'"),
        (b'{"data": []}', "0 of 0 questions"),
        (tiny_data.squad_json(answers=[]), r"1 of 1 questions have no answer that is in its passage, first 'Who\?'"),
        (tiny_data.squad_json(answers=[{"text": "Denver", "answer_start": 1}]), "1 of 1 questions"),
        (tiny_data.squad_json(answers=[{"text": "", "answer_start": 1}]), "1 of 1 questions"),
        (tiny_data.squad_json(answers=[{"text": "Denver"}]), "is not a SQuAD file: KeyError: 'answer_start'"),
    ],
)
def test_broken_questions_are_refused(tmp_path, content, said):
    with pytest.raises(StudyError, match=said):
        squad.read(put(tmp_path / "squad", "dev-v1.1.json", content))


class _Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a valid file of features"),
        (b"PK\x03\x04 no archive", "is not a valid file of features"),
        (tiny_data.an4_npz()[:-200], "is not a valid file of features"),
        (tiny_data.an4_npz(transcripts=None), "is not a valid file of features: .*transcripts"),
        (tiny_data.an4_npz(transcripts=np.array(["YES", " "])), "1 utterances have an empty transcript, .*: an2"),
        (tiny_data.an4_npz(split=np.array(["train", "dev"])), "1 utterances have .* no split: an2"),
        (tiny_data.an4_npz(lengths=np.array([5, 0])), "1 utterances have .*no frames.*: an2"),
        (tiny_data.an4_npz(lengths=np.array([2, 2])), r"features \(5, 13\) do not fit 2 lengths of 4 frames"),
        (tiny_data.an4_npz(names=np.array(["an1"])), r"do not fit 2 lengths"),
        (tiny_data.an4_npz(features=np.zeros((5, 12), np.float16)), r"features \(5, 12\) do not fit"),
        (tiny_data.an4_npz(features=np.full((5, 13), np.nan, np.float16)), "not finite"),
    ],
)
def test_a_broken_file_of_features_is_refused(tmp_path, content, said):
    an4._read.cache_clear()
    with pytest.raises(StudyError, match=said):
        an4.read(put(tmp_path / "an4", an4.NAME, content), "train")


@pytest.mark.parametrize("whole", [True, False])
def test_a_pickle_in_the_features_place_runs_nothing(tmp_path, whole):
    an4._read.cache_clear()
    trap = tmp_path / "trap"
    hidden = np.array([_Runs(trap)], dtype=object)
    content = pickle.dumps(_Runs(trap)) if whole else tiny_data.an4_npz(names=hidden)
    with pytest.raises(StudyError, match="is not a valid file of features"):
        an4.read(put(tmp_path / "an4", an4.NAME, content), "train")
    assert not trap.exists()


def test_a_flipped_bit_in_the_features_is_found_though_no_checksum_is_asked(tmp_path):
    an4._read.cache_clear()
    content = bytearray(tiny_data.an4_npz())
    place = content.find(np.arange(13, dtype=np.float16).tobytes())
    content[place + 4] ^= 1
    with pytest.raises(StudyError, match="is not a valid file of features: Bad CRC-32"):
        an4.read(put(tmp_path / "an4", an4.NAME, bytes(content)), "train")


def test_a_torn_photograph_is_named(tmp_path):
    put(tmp_path / "cifar_c_frost", "frost1.png", tiny_data.picture((9, 5), (1, 2, 3))[:-30])
    with pytest.raises(StudyError, match=r"frost1.png is not a picture"):
        frost.read(tmp_path)


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: wikitext2.read(folder, "train"),
        lambda folder: tinyshakespeare.read(folder),
        lambda folder: sst2.read(folder, "train"),
        lambda folder: stsb.read(folder, "train"),
        lambda folder: sts2012.read(folder, "train"),
        lambda folder: multi30k.read(folder, "train"),
        lambda folder: squad.read(folder),
        lambda folder: frost.read(folder),
    ],
)
def test_a_missing_file_is_named(tmp_path, read):
    with pytest.raises(StudyError, match=r"is missing"):
        read(tmp_path)


def test_lines_end_at_line_feeds_alone(tmp_path):
    (tmp_path / "x").write_bytes("a\u2028b\r\nc\x0bd\ne".encode())
    assert read_lines(tmp_path / "x") == ["a\u2028b", "c\x0bd", "e"]
    (tmp_path / "x").write_bytes(b"1\t2\t3\n1\t2\n")
    assert read_rows(tmp_path / "x", 2, more=True) == [["1", "2", "3"], ["1", "2"]]
    assert read_number("4.5", 0, 5, tmp_path, 1) == 4.5


# the shared copies of the real ones


@pytest.mark.grid
def test_the_real_data_sets_are_whole_and_read(real_data):
    for module in (wikitext2, tinyshakespeare, sst2, stsb, sts2012, multi30k, squad, an4, camvid, frost):
        module.prepare(real_data, pytest.fail)
        assert all(path.is_file() for path in module.files(real_data))
    assert [len(wikitext2.read(real_data, split).split()) for split in ("train", "validation", "test")] == [
        2_051_910,
        213_886,
        241_211,
    ]
    assert len(tinyshakespeare.read(real_data)) == 1_115_394
    assert [len(sst2.read(real_data, split)[1]) for split in sst2.SPLITS] == [67_349, 872, 1_821]
    assert sum(sst2.read(real_data, "test")[1]) == 904
    assert [len(stsb.read(real_data, split)[2]) for split in stsb.SPLITS] == [5_749, 1_500, 1_379]
    assert [len(sts2012.read(real_data, split)[2]) for split in ("train", "test")] == [1_484, 2_358]
    assert [len(multi30k.read(real_data, split)) for split in multi30k.SPLITS] == [29_000, 1_014, 1_000]
    questions = squad.read(real_data)
    assert len(questions) == 10_570 and len({question.article for question in questions}) == 48
    utterances = [an4.read(real_data, split) for split in ("train", "test")]
    assert [len(part) for part in utterances] == [948, 130]
    assert sum(len(one.features) for part in utterances for one in part) == 289_252
    sizes = [len(camvid.read(real_data, split)[0]) for split in camvid.SPLITS]
    assert sizes == [367, 101, 233] and camvid.read(real_data, "train")[1].unique().tolist()[-1] == camvid.VOID
    assert [image.shape[0] for image in frost.read(real_data)] == [600, 315, 315, 350, 495, 323]
