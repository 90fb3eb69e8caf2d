"""Tokenizers: one protocol over characters, SentencePiece models, Hugging Face directories.

Every tokenizer has `vocab_size`, `pad_id`, `bos_id` (None where there is none), `eos_id`,
`stop_ids` (tokens that end a response), `encode(text) -> ids`, `decode(ids) -> text` (special
tokens left out) and `render(prompt, system=None) -> text`, where a prompt is a text or a list of
{"role": ..., "content": ...} messages.
"""

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import sentencepiece
import transformers

Messages = Sequence[dict[str, str]]

PAD_ID, BOS_ID, EOS_ID, UNKNOWN_ID = range(4)
"""Special tokens of the tokenizers that are made here; characters have no unknown token."""


class Tokenizer(Protocol):
    """Text to token ids and back; see the module's docstring."""

    vocab_size: int
    pad_id: int
    bos_id: int | None
    eos_id: int
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def render(self, prompt: str | Messages, system: str | None = None) -> str: ...


def _plain(prompt: str | Messages) -> str:
    """The prompt's text without a template: contents joined, roles dropped."""
    return prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt)


class CharTokenizer:
    """One token per character: id 3 + its place in the sorted alphabet, after pad, bos, eos.

    Args:
      alphabet: the characters, in any order and with any repetitions.

    Raises:
      ValueError: an empty alphabet.
    """

    pad_id, bos_id, eos_id = PAD_ID, BOS_ID, EOS_ID
    stop_ids = (EOS_ID,)

    def __init__(self, alphabet: Iterable[str]):
        self.alphabet = "".join(sorted(set(alphabet)))
        if not self.alphabet:
            raise ValueError(
                "a CharTokenizer needs an alphabet of at least one character, got none"
            )
        self._ids = {char: EOS_ID + 1 + i for i, char in enumerate(self.alphabet)}
        self.vocab_size = EOS_ID + 1 + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text's characters.

        Raises:
          ValueError: a character that is not in the alphabet.
        """
        for place, char in enumerate(text):
            if char not in self._ids:
                other = char.swapcase()
                hint = f"; did you mean {other!r}?" if other in self._ids else ""
                raise ValueError(
                    f"character {char!r} at {place} of {text[:80]!r} is not in the tokenizer's "
                    f"alphabet {self.alphabet!r}{hint}"
                )
        return [self._ids[char] for char in text]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text; ids that are no character (special or unknown) are left out."""
        places = (int(i) - EOS_ID - 1 for i in ids)
        return "".join(self.alphabet[i] for i in places if 0 <= i < len(self.alphabet))

    def render(self, prompt: str | Messages, system: str | None = None) -> str:
        """Returns the prompt's text; there is no template, and a system prompt is not used."""
        return _plain(prompt)


class SentencePieceTokenizer:
    """A SentencePiece model.

    Args:
      path: the .model file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a model without an end-of-sequence token.
    """

    def __init__(self, path):
        if not pathlib.Path(path).is_file():
            raise FileNotFoundError(f"no SentencePiece model at {path}")
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self._model.vocab_size()
        # SentencePiece says -1 of a token that the model was trained without.
        self.eos_id = self._model.eos_id()
        if self.eos_id < 0:
            raise ValueError(f"{path} has no end-of-sequence token, which sampling stops on")
        self.pad_id = self._model.pad_id() if self._model.pad_id() >= 0 else self.eos_id
        self.bos_id = self._model.bos_id() if self._model.bos_id() >= 0 else None
        self.stop_ids = (self.eos_id,)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text's pieces, without special tokens."""
        return self._model.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text; special tokens, and ids past the vocabulary, are left out."""
        return self._model.decode([int(i) for i in ids if int(i) < self.vocab_size])

    def render(self, prompt: str | Messages, system: str | None = None) -> str:
        """Returns the prompt's text; there is no template, and a system prompt is not used."""
        return _plain(prompt)


def train_sentencepiece(texts: Iterable[str], vocab_size: int, path) -> SentencePieceTokenizer:
    """Trains a unigram SentencePiece model and writes it.

    Text is taken as it is (no normalisation, no added spaces) and characters that the texts lack
    fall back to bytes, so decode(encode(text)) == text for every text.

    Args:
      texts: training texts.
      vocab_size: largest number of tokens, among them 4 special ones and 256 bytes; fewer where
        the texts do not yield as many.
      path: the .model file to write.

    Returns:
      The tokenizer.

    Raises:
      ValueError: a vocabulary too small for the texts' characters, or no texts.
    """
    path = pathlib.Path(path)
    texts = [text for text in texts if text]
    # Of the 256 bytes, 4 special tokens and the space, which SentencePiece writes as U+2581.
    least = 261 + len(set("".join(texts)) - {" "})
    if not texts or vocab_size < least:
        raise ValueError(
            f"vocab_size={vocab_size} for {len(texts)} texts: expected at least one text and, for "
            f"their characters, 256 bytes and special tokens, vocab_size >= {least}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            unk_id=UNKNOWN_ID,
            # One thread: with several, the model depends on the machine's scheduling.
            num_threads=1,
            minloglevel=2,
        )
    return SentencePieceTokenizer(path)


class HFTokenizer:
    """The tokenizer of a local Hugging Face directory, with its chat template.

    `stop_ids` are the end-of-sequence token and every `eos_token_id` of generation_config.json.

    Args:
      path: directory.

    Raises:
      FileNotFoundError: no such directory.
      ValueError: a tokenizer without an end-of-sequence token.
    """

    def __init__(self, path):
        path = pathlib.Path(path)
        if not path.is_dir():
            raise FileNotFoundError(f"no Hugging Face directory at {path}")
        self._hf = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.vocab_size = len(self._hf)
        self.bos_id, self.eos_id = self._hf.bos_token_id, self._hf.eos_token_id
        if self.eos_id is None:
            raise ValueError(f"the tokenizer in {path} has no end-of-sequence token")
        self.pad_id = self.eos_id if self._hf.pad_token_id is None else self._hf.pad_token_id
        stops = []
        if (path / "generation_config.json").is_file():
            stops = json.loads((path / "generation_config.json").read_text()).get("eos_token_id")
            stops = stops if isinstance(stops, list) else [stops]
        self.stop_ids = tuple(sorted({self.eos_id, *(s for s in stops if s is not None)}))
        # What the tokenizer itself would put before a text, such as a beginning-of-sequence token.
        self._prefix = self._hf.decode([i for i in self._hf.encode("") if i == self.bos_id])

    def save(self, path):
        """Writes the tokenizer's files and chat template into a directory."""
        self._hf.save_pretrained(path)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a rendered text; special tokens spelt out in it are recognised."""
        return self._hf.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text, special tokens left out."""
        return self._hf.decode([int(i) for i in ids], skip_special_tokens=True)

    def render(self, prompt: str | Messages, system: str | None = None) -> str:
        """Returns the text to encode, up to where the assistant's answer begins.

        Args:
          prompt: the user's turn, or messages.
          system: a system prompt to put before it. A tokenizer without a chat template puts it
            before the text, after a beginning-of-sequence token if it has one.
        """
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system is not None:
            turns = [{"role": "system", "content": system}, *turns]
        if self._hf.chat_template is None:
            return self._prefix + "\n\n".join(turn["content"] for turn in turns)
        return self._hf.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
