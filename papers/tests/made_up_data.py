"""Tiny data sets in the official formats, for the tests of tasks on speech, sentences and images."""

import numpy as np

WORDS = ("ONE", "TWO", "YES", "NO", "A B", "B A C")


def write_an4(folder, transcripts=None, frames=40, split=None, seed=0):
    """Write AN4's file: each letter has a pattern of its own, held for as many frames as there are to each."""
    said = list(transcripts or WORDS * 3)
    generator = np.random.default_rng(seed)
    patterns = np.random.default_rng(7).normal(size=(256, 13))
    counts = frames if isinstance(frames, list) else [frames + len(text) for text in said]
    features = [
        patterns[[ord(text[at * len(text) // count]) if text else 0 for at in range(count)]]
        for text, count in zip(said, counts, strict=True)
    ]
    features = np.concatenate(features) + 0.1 * generator.normal(size=(sum(counts), 13))
    splits = split or ["test" if at >= len(said) * 2 // 3 else "train" for at in range(len(said))]
    (folder / "an4").mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / "an4" / "an4_mfcc_f16.npz",
        features=features.astype(np.float16),
        lengths=np.array(counts, np.int32),
        names=np.array([f"utterance-{at}" for at in range(len(said))]),
        transcripts=np.array(said),
        split=np.array(splits),
        licence=np.array(""),
    )
    return folder


def write_multi30k(folder, count=40, seed=0):
    """Write Multi30k's six files: German numbers one to nine and their English names."""
    german = ("eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun")
    english = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    generator = np.random.default_rng(seed)
    (folder / "multi30k").mkdir(parents=True, exist_ok=True)
    for name in ("train", "val", "test_2016_flickr"):
        drawn = [generator.integers(9, size=generator.integers(2, 6)) for _ in range(count)]
        for language, words in (("de", german), ("en", english)):
            lines = "".join(" ".join(words[at] for at in one) + "\n" for one in drawn)
            (folder / "multi30k" / f"{name}.{language}").write_text(lines, encoding="utf-8")
    return folder
