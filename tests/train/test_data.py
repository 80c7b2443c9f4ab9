"""Text to tokens and back, and batches that depend on the seed and the step alone."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from deadweight.errors import DeadweightError
from deadweight.source.plain_text import read_text
from deadweight.train import data as package
from deadweight.train.data import batch, prepare, windows
from deadweight.train.settings import Data
from deadweight.train.tokenizer import byte_tokenizer, save_tokenizer

SAMPLE = "Änderungen, naïve 中文 🙂\tand\nlines\x07 " + "".join(map(chr, range(1, 400)))


def test_bytes_come_back_whole(tmp_path: Path, text: str) -> None:
    corpus = prepare(Data(text=text, valid_share=0.2), tmp_path, context=16)
    whole = Path(text).read_bytes()
    assert bytes(corpus.train) + bytes(corpus.valid) == whole
    assert bytes(corpus.valid).decode("utf-8")  # no character is cut
    assert corpus.bytes_per_token == 1 and corpus.vocabulary == 256


@pytest.mark.parametrize("tokenizer", ["bpe:300", "own"])
def test_a_tokenizer_is_trained_or_taken_and_decodes_to_the_text(tmp_path: Path, text: str, tokenizer: str) -> None:
    if tokenizer == "own":
        byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
        tokenizer = str(tmp_path / "tokenizer.json")
    corpus = prepare(Data(text=text, tokenizer=tokenizer), tmp_path / "data", context=16)
    assert corpus.tokenizer is not None
    decoded = Tokenizer.from_file(str(corpus.tokenizer)).decode(list(map(int, corpus.train)))
    assert decoded.encode() == Path(text).read_bytes()[: corpus.train_bytes]
    assert corpus.vocabulary > 256 or corpus.bytes_per_token == 1


def test_ids_with_gaps_have_room(tmp_path: Path, text: str) -> None:
    words = WordLevel({"<unk>": 0, "the": 70_000}, unk_token="<unk>")
    file = tmp_path / "tokenizer.json"
    made = Tokenizer(words)
    made.pre_tokenizer = Whitespace()
    made.save(str(file))
    Path(text).write_text("the cat " * 200, encoding="utf-8")
    corpus = prepare(Data(text=text, tokenizer=str(file)), tmp_path / "data", context=8)
    assert corpus.vocabulary == 70_001 and set(map(int, corpus.train)) == {0, 70_000}


def test_tokens_that_another_run_wrote_meanwhile_stay(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, other = package.write_corpus, []

    def slow(folder: Path, *rest: Any) -> None:
        write(folder, *rest)
        if not other:
            other.append(folder)
            other.append(prepare(Data(text=text), tmp_path, context=16).train)

    monkeypatch.setattr(package, "write_corpus", slow)
    mine = prepare(Data(text=text), tmp_path, context=16)
    assert bytes(mine.train) == bytes(other[1]) and [f.name for f in tmp_path.iterdir() if f.is_dir()] == [
        mine.folder.name
    ]


def test_the_second_time_nothing_is_tokenized(tmp_path: Path, text: str) -> None:
    said: list[str] = []
    for _ in range(2):
        prepare(Data(text=text), tmp_path, context=16, progress=said.append)
    assert len(said) == 2  # once for the training part, once for the other


def test_a_folder_and_a_compressed_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "b.md").write_text("second " * 50)
    (tmp_path / "book" / "a.txt").write_text("first " * 50)
    (tmp_path / "book" / "c.png").write_bytes(b"\0\0")
    corpus = prepare(Data(text=str(tmp_path / "book"), valid_share=0.1), tmp_path / "d", context=16)
    assert bytes(corpus.train).startswith(b"first") and b"second" in bytes(corpus.train)
    packed = tmp_path / "t.txt.xz"
    packed.write_bytes(lzma.compress(b"packed text " * 40))
    assert bytes(prepare(Data(text=str(packed)), tmp_path / "e", context=16).train).startswith(b"packed text")


WRONG = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\t ", "is empty"),
    "zeros": (b"text" + b"\0" * 9 + b"text", "is binary"),
    "latin": ("naïve".encode("latin-1") * 9, "is not UTF-8 text (byte 2)"),
    "short": (b"too short for a window", "expected at least 65"),
}


@pytest.mark.parametrize("name", WRONG)
def test_text_that_cannot_be_trained_on_is_refused(tmp_path: Path, name: str) -> None:
    content, message = WRONG[name]
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(DeadweightError) as error:
        prepare(Data(text=str(tmp_path / "t.txt")), tmp_path / "data", context=64)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(text="/nowhere/at/all.txt"), "does not exist; expected a text file"),
        (Data(text="embedded", tokenizer="bpe:12"), "a size of 257 or more"),
        (Data(text="embedded", tokenizer="nothing.json"), "expected bytes, bpe:SIZE, or a tokenizer.json"),
    ],
)
def test_a_missing_text_is_named(tmp_path: Path, data: Data, message: str) -> None:
    with pytest.raises(DeadweightError) as error:
        prepare(data, tmp_path, context=16)
    assert message in str(error.value)


def test_a_batch_depends_on_the_seed_and_the_step_alone() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    assert torch.equal(batch(tokens, 5, 1, 4, 8), batch(tokens, 5, 1, 4, 8))
    assert not torch.equal(batch(tokens, 5, 1, 4, 8), batch(tokens, 6, 1, 4, 8))
    assert not torch.equal(batch(tokens, 5, 1, 4, 8), batch(tokens, 5, 2, 4, 8))
    drawn = batch(tokens, 0, 0, 500, 8)
    assert drawn.shape == (500, 9) and bool((drawn.diff(dim=1) == 1).all())
    assert int(drawn.min()) < 50 and int(drawn.max()) > 950


def test_windows_predict_every_token_once() -> None:
    tokens = np.arange(50, dtype=np.uint16)
    found = windows(tokens, 8)
    assert found[:, 1:].flatten().tolist() == list(range(1, 49))
    assert len(windows(tokens, 8, limit=16)) == 2


def test_the_byte_tokenizer_gives_bytes(tmp_path: Path, text: str) -> None:
    from transformers import AutoTokenizer

    corpus = prepare(Data(text=text), tmp_path / "data", context=16)
    save_tokenizer(corpus, 16, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(SAMPLE)["input_ids"]
    assert bytes(ids) == SAMPLE.encode()
    assert tokenizer.decode(ids) == SAMPLE


def test_a_dataset_is_read_by_its_column(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = [{"id": i, "text": f"row {i}"} for i in range(3)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_text(f"datasets:{tmp_path}", str) == b"row 0\nrow 1\nrow 2"
    assert read_text(f"datasets:{tmp_path}::id", str) == b"0\n1\n2"
    with pytest.raises(DeadweightError, match="no column words; expected one of id, text"):
        read_text(f"datasets:{tmp_path}::words", str)
