"""Bytes, or the tokens of a byte-pair encoding learnt from the text itself (``loss-bench[tokens]``)."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from loss_bench import files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE_VOCABULARY = 256
_TEXT_BYTES = 4 << 20


def read_text(path: Path | None) -> bytes:
    """The first 4 MiB of a text; by default of the Python standard library's own sources.

    Raises:
        ValueError: if there is too little of it.
    """
    data = path.read_bytes() if path is not None else _standard_library()
    if len(data) < 4096:
        raise ValueError(f"a text of at least 4096 bytes is needed, got {len(data)}")
    return data[:_TEXT_BYTES]


def _standard_library() -> bytes:
    data = b""
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        data += source.read_bytes()
        if len(data) >= _TEXT_BYTES:
            break
    return data


def digest(text: bytes) -> str:
    """What tells this text from others."""
    return hashlib.sha256(text).hexdigest()[:16]


def encode(text: bytes, vocabulary: int) -> Tensor:
    """The text as numbers below `vocabulary`: its bytes for 256, tokens of a byte-pair encoding for more.

    A text is encoded once for a vocabulary; the tokens are kept in the user's cache folder.

    Raises:
        ValueError: for a vocabulary below 256.
    """
    if vocabulary < BYTE_VOCABULARY:
        raise ValueError(f"a vocabulary holds at least the {BYTE_VOCABULARY} bytes, got {vocabulary}")
    if vocabulary == BYTE_VOCABULARY:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    kept = _cache_folder() / f"{digest(text)}-{vocabulary}.safetensors"
    if not kept.exists():
        words = text.decode("utf-8", errors="replace")
        tokens = torch.tensor(_learn(words, vocabulary).encode(words).ids, dtype=torch.int32)
        try:
            files.write(kept, save({"tokens": tokens}))
        except OSError:
            # A folder that cannot be written costs the next run the time that this one took.
            return tokens
    return load_file(kept)["tokens"]


def _learn(words: str, vocabulary: int) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(words.splitlines(keepends=True), trainer)
    return tokenizer


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loss-bench"
