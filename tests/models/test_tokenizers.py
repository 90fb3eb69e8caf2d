"""Tokenizers: round trips, special tokens, templates, errors."""

import json

import pytest
import tokenizers as hf_tokenizers
import transformers

from models.tokenizers import (
    CharTokenizer,
    HFTokenizer,
    SentencePieceTokenizer,
    train_sentencepiece,
)

TEXTS = [f"{a} + {b} = {a + b}" for a in range(30) for b in range(30)]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def hf_directory(path, *, template=None, bos=False, stops=None):
    """Writes a byte-level BPE tokenizer of one merge, as a Hugging Face directory."""
    alphabet = sorted(hf_tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate(["<bos>", "<end>", "<pad>", "<stop>", *alphabet, "ab"])}
    backend = hf_tokenizers.Tokenizer(hf_tokenizers.models.BPE(vocab, [("a", "b")]))
    backend.pre_tokenizer = hf_tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf_tokenizers.decoders.ByteLevel()
    if bos:
        backend.post_processor = hf_tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<end>", pad_token="<pad>"
    )
    hf.chat_template = template
    hf.save_pretrained(path)
    if stops is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return HFTokenizer(path)


def test_characters():
    tokenizer = CharTokenizer("210+=0")
    assert tokenizer.vocab_size == 3 + 5
    ids = tokenizer.encode("1+2=")
    assert ids == [3 + "+012=".index(c) for c in "1+2="]
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == "1+2="
    assert tokenizer.decode([99]) == ""
    assert {tokenizer.pad_id, tokenizer.bos_id, *tokenizer.stop_ids} == {0, 1, 2}
    messages = [{"role": "user", "content": "1+"}, {"role": "assistant", "content": "2"}]
    assert tokenizer.render("1+1=", system="Add.") == "1+1="
    assert tokenizer.render(messages) == "1+2"


def test_character_errors_name_the_character():
    with pytest.raises(ValueError, match=r"'B' at 1 of 'aB' .* 'abc'; did you mean 'b'\?"):
        CharTokenizer("abc").encode("aB")
    with pytest.raises(ValueError, match="at least one character"):
        CharTokenizer("")


def test_sentencepiece_round_trips_every_text(tmp_path):
    path = tmp_path / "new" / "sums.model"
    tokenizer = train_sentencepiece(TEXTS, 300, path)
    assert 261 < tokenizer.vocab_size <= 300
    for text in (*TEXTS[:5], "", " two  spaces ", "line\nbreak\t", "unseen é 漢 🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("12 + 7 = 19")
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == (
        "12 + 7 = 19"
    )
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.stop_ids) == (0, 1, (2,))
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""
    assert SentencePieceTokenizer(path).encode("12 + 7") == tokenizer.encode("12 + 7")
    first = path.read_bytes()
    train_sentencepiece(TEXTS, 300, path)
    assert path.read_bytes() == first


def test_sentencepiece_errors(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=50 for 900 texts.*vocab_size >= 273"):
        train_sentencepiece(TEXTS, 50, tmp_path / "small.model")
    assert train_sentencepiece(TEXTS, 273, tmp_path / "least.model").vocab_size == 273
    with pytest.raises(FileNotFoundError, match="no SentencePiece model at"):
        SentencePieceTokenizer(tmp_path / "none.model")


def test_hugging_face_with_a_template(tmp_path):
    tokenizer = hf_directory(tmp_path, template=TEMPLATE, stops=[3, 1])
    assert tokenizer.render("hi", system="Be kind.") == (
        "<|system|>Be kind.<end><|user|>hi<end><|assistant|>"
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.render(turns) == "<|user|>a<end><|assistant|>b<end><|assistant|>"
    ids = tokenizer.encode("abé <end>")
    assert ids[-1] == tokenizer.eos_id == 1
    assert len(ids) == 1 + 2 + 1 + 1  # "ab" is one token, "é" two bytes.
    assert tokenizer.decode(ids) == "abé "
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.stop_ids) == (2, 0, (1, 3))
    assert tokenizer.vocab_size == 4 + 256 + 1


def test_hugging_face_without_a_template_puts_the_first_token_itself(tmp_path):
    tokenizer = hf_directory(tmp_path, bos=True)
    assert tokenizer.render("ab") == "<bos>ab"
    assert tokenizer.render("ab", system="c") == "<bos>c\n\nab"
    assert tokenizer.encode(tokenizer.render("ab")) == [0, 4 + 256]
    assert tokenizer.stop_ids == (1,)


def test_hugging_face_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Hugging Face directory at"):
        HFTokenizer(tmp_path / "none")
