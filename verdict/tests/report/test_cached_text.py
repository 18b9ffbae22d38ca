"""Text that takes seconds to make is made once for all processes, and anew where its file is damaged."""

import os

import pytest

from headwise_verdict.files.cached_text import cached_text


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headwise"


def test_it_is_made_once_and_kept_to_the_byte(cache):
    assert cached_text("a.js", lambda: "one\r\ntwo – three") == "one\r\ntwo – three"
    assert cached_text("a.js", pytest.fail) == "one\r\ntwo – three"
    assert cached_text("b.js", lambda: "other") == "other"
    assert sorted(path.name for path in cache.iterdir()) == ["a.js", "b.js"]


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"", lambda content: b"x" + content])
def test_a_damaged_file_is_made_again(cache, damage):
    cached_text("a.js", lambda: "first")
    (cache / "a.js").write_bytes(damage((cache / "a.js").read_bytes()))
    assert cached_text("a.js", lambda: "second") == "second"
    assert cached_text("a.js", pytest.fail) == "second"


def test_where_nothing_can_be_written_nothing_is_kept(cache, monkeypatch):
    cache.write_text("a file in the place of the folder")
    assert cached_text("a.js", lambda: "text") == "text"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cached_text("a.js", lambda: "text") == "text"
