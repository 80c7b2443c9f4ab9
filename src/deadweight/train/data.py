"""Text as tokens on disk, mapped into memory, and batches that depend only on the seed and the step."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.source.plain_text import boundary, check_text, read_text
from deadweight.source.printable import printable, reason
from deadweight.train.settings import Data

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 1 << 22  # characters that are tokenized at a time
TokenArray: TypeAlias = NDArray[np.integer]  # token ids, in memory or mapped from a file


@dataclass(frozen=True)
class TokenSplit:
    """Tokens to train on, and tokens to judge by."""

    train: TokenArray
    valid: TokenArray


@dataclass(frozen=True)
class Corpus:
    """Training and validation tokens on disk; `valid_bytes` is the size of the validation text."""

    folder: Path
    vocabulary: int
    valid_bytes: int
    train_bytes: int
    tokenizer: Path | None  # None: one token per byte
    train_sha256: str = ""  # of the training text

    @cached_property
    def train(self) -> TokenArray:
        return self.map_tokens("train")

    @cached_property
    def valid(self) -> TokenArray:
        return self.map_tokens("valid")

    def map_tokens(self, name: str) -> TokenArray:
        return np.memmap(self.folder / f"{name}.bin", dtype=token_dtype(self.vocabulary), mode="r")

    @property
    def bytes_per_token(self) -> float:
        return self.valid_bytes / max(len(self.valid), 1)


def token_dtype(vocabulary: int) -> type[np.unsignedinteger]:
    """The smallest type that holds every token id."""
    return np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.uint32


def prepare(data: Data, cache: Path, *, context: int, progress: Progress = silent) -> Corpus:
    """The corpus, tokenized once: a second run with the same text and tokenizer reads the tokens from disk."""
    text = read_text(data.text, progress)
    check_text(text, data.text)
    valid = read_text(data.valid, progress) if data.valid else None
    if valid is not None:
        check_text(valid, str(data.valid))
    else:
        cut = boundary(text, len(text) - max(1, int(len(text) * data.valid_share)))
        text, valid = text[:cut], text[cut:]
    key = hashlib.sha256(b"\0".join([data.tokenizer.encode(), stamp(data.tokenizer), text, valid])).hexdigest()[:16]
    folder = cache / key
    if not (folder / "corpus.json").is_file():
        try:
            write_whole(folder, data, text, valid, progress)
        except OSError as error:
            raise DeadweightError(f"{printable(folder)} cannot be written ({reason(error)})") from error
    tokenizer = folder / "tokenizer.json"
    corpus = Corpus(
        folder=folder,
        **json.loads((folder / "corpus.json").read_text(encoding="utf-8")),
        valid_bytes=len(valid),
        train_bytes=len(text),
        tokenizer=tokenizer if tokenizer.is_file() else None,
        train_sha256=hashlib.sha256(text).hexdigest(),
    )
    for name, tokens in (("training", corpus.train), ("validation", corpus.valid)):
        if len(tokens) < context + 1:
            raise DeadweightError(
                f"found {len(tokens):,} {name} tokens in {printable(data.text)}; expected at least {context + 1:,} "
                f"for a context of {context:,}: give more text, or a shorter context"
            )
    return corpus


def stamp(tokenizer: str) -> bytes:
    """A hash of the tokenizer's file, if it is one."""
    file = tokenizer_file(tokenizer)
    return b"" if file is None else hashlib.sha256(file.read_bytes()).digest()


def write_whole(folder: Path, data: Data, text: bytes, valid: bytes, progress: Progress) -> None:
    """Write the corpus under another name, then rename it: other runs of a sweep may use the same tokens meanwhile."""
    draft = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        write_corpus(draft, data, text, valid, progress)
        draft.rename(folder)
    except OSError:
        if not (folder / "corpus.json").is_file():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_corpus(folder: Path, data: Data, text: bytes, valid: bytes, progress: Progress) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    encode, vocabulary = tokenizer_for(data.tokenizer, text, folder, progress)
    for name, part in (("train", text), ("valid", valid)):
        with (folder / f"{name}.bin").open("wb") as file:
            for done, ids in encode(part):
                file.write(np.asarray(ids, dtype=token_dtype(vocabulary)).tobytes())
                progress(f"tokenizing {name}: {done / max(len(part), 1):.0%}")
    (folder / "corpus.json").write_text(json.dumps({"vocabulary": vocabulary}), encoding="utf-8")


Encode = Callable[[bytes], Iterator[tuple[int, Iterable[int]]]]


def tokenizer_for(name: str, text: bytes, folder: Path, progress: Progress) -> tuple[Encode, int]:
    if name == "bytes":
        return lambda part: iter([(len(part), np.frombuffer(part, dtype=np.uint8))]), 256
    from tokenizers import Tokenizer

    if name.startswith("bpe:"):
        tokenizer = train_bpe(name, text, progress)
    else:
        file = tokenizer_file(name)
        if file is None:
            raise DeadweightError(
                f"found tokenizer = {printable(name)}; expected bytes, bpe:SIZE, or a tokenizer.json (or its folder)"
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise DeadweightError(f"{printable(file)} is not a tokenizer ({reason(error)})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.save(str(folder / "tokenizer.json"))

    def encode(part: bytes) -> Iterator[tuple[int, list[int]]]:
        words = part.decode("utf-8", errors="replace")
        start = 0
        while start < len(words):
            stop = start + PIECE
            if stop < len(words):
                stop = words.rfind("\n", start, stop) + 1 or stop
            yield int(len(part) * stop / len(words)), tokenizer.encode(words[start:stop], add_special_tokens=False).ids
            start = stop

    return encode, max(tokenizer.get_vocab().values(), default=0) + 1  # ids may have gaps


def tokenizer_file(name: str) -> Path | None:
    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    return path if path.is_file() else None


def train_bpe(name: str, text: bytes, progress: Progress) -> Tokenizer:
    """A byte-level BPE tokenizer of this size, trained on the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    size = name.removeprefix("bpe:")
    if not size.isdigit() or int(size) < 257:
        raise DeadweightError(f"found tokenizer = {printable(name)}; expected bpe:SIZE with a size of 257 or more")
    progress(f"training a tokenizer of {int(size):,} tokens")
    tokenizer = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=int(size), min_frequency=2, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(text.decode("utf-8", errors="replace").splitlines(keepends=True), trainer=trainer)
    return tokenizer


def batch(tokens: TokenArray, step: int, seed: int, size: int, context: int) -> Tensor:
    """`size` windows of context + 1 tokens. They depend only on the seed and the step, so a run that is resumed, or
    distributed over processes, reads the same batches."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - context, size=size)
    return torch.from_numpy(np.stack([tokens[s : s + context + 1] for s in starts]).astype(np.int64))


def windows(tokens: TokenArray, context: int, limit: int | None = None) -> Tensor:
    """The text from its beginning, in windows of context + 1 tokens that share one token: each is predicted once."""
    count = (len(tokens) - 1) // context
    count = min(count, max(1, limit // context)) if limit else count
    return torch.from_numpy(
        np.stack([tokens[i * context : (i + 1) * context + 1] for i in range(count)]).astype(np.int64)
    )
