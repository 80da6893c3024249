"""MODEL cases 40 and 41 of bugs.md: what a GGUF file holds arrives, or is named. Files are written as converters do."""

from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from services.gateway.text.tokenizer import Tokenizer as GatewayTokenizer
from tests.fakes import gguf_files, tiny_models
from tests.fakes.paged import Paged, assert_close, reference_logits
from tools import model as model_folders

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB_SIZE = 400
PROMPT = list(range(10, 60))
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def byte_level_tokenizer(pre: str = "smollm") -> Tokenizer:
    """As the models of that pre-tokenizer have it, with merges learned from a licence."""
    tokenizer = Tokenizer(models.BPE())
    if pre == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        regex = {"qwen2": QWEN2, "llama-bpe": LLAMA3}[pre]
        split = [
            pre_tokenizers.Split(Regex(regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


VOCABULARY = gguf_files.byte_level(byte_level_tokenizer(), "smollm", VOCAB_SIZE)
BASE = tiny_models.CONFIGS["llama, grouped heads"].to_dict() | {"vocab_size": VOCAB_SIZE, "rope_parameters": None}
BASE = {key: value for key, value in BASE.items() if key not in ("model_type", "transformers_version", "head_dim")}
LLAMA = LlamaConfig(**BASE)
FAMILIES: dict[str, tuple[str, PreTrainedConfig]] = {
    "llama, tied": ("llama", LlamaConfig(**BASE | {"tie_word_embeddings": True})),
    "llama, output matrix of its own": ("llama", LLAMA),
    "llama, biases": ("llama", LlamaConfig(**BASE | {"attention_bias": True, "mlp_bias": True})),
    "qwen2, biases": ("qwen2", Qwen2Config(**BASE)),
    "gemma3": (
        "gemma3",
        Gemma3TextConfig(
            **BASE
            | {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 6, "sliding_window": 7}
            | {"tie_word_embeddings": True}
        ),
    ),
}


def bfloat16_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Of weights that lose nothing in the folder."""
    model = tiny_models.made(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


def fetched(file: Path) -> tuple[Path, list[str]]:
    """The folder made of ``file``, and what was said meanwhile."""
    said: list[str] = []
    return model_folders.fetch(str(file), file.with_suffix(".d"), said.append), said


def logits_of(folder: Path) -> torch.Tensor:
    return Paged(folder).logits([PROMPT], [1000])[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_model_40_logits_are_those_of_the_model_the_file_came_from(name: str, tmp_path: Path) -> None:
    architecture, config = FAMILIES[name]
    model = bfloat16_model(config)
    folder, said = fetched(gguf_files.write(tmp_path / "tiny.gguf", model, architecture, VOCABULARY))
    assert_close(logits_of(folder), reference_logits(model, PROMPT))
    assert not any("does not use" in line for line in said)


def test_model_40_an_equal_output_matrix_beside_tied_embeddings(tmp_path: Path) -> None:
    model = bfloat16_model(FAMILIES["llama, tied"][1])
    copy = {"output.weight": model.get_input_embeddings().weight.detach().clone()}
    folder, _ = fetched(gguf_files.write(tmp_path / "tiny.gguf", model, "llama", VOCABULARY, extra=copy))
    assert_close(logits_of(folder), reference_logits(model, PROMPT))


def test_model_40_rope_freqs_are_llama3_scaling(tmp_path: Path) -> None:
    """They were left out as something that says nothing new, and every position past the first was wrong."""
    scaling = tiny_models.CONFIGS["llama, llama3 rope"].rope_parameters
    model = bfloat16_model(LlamaConfig(**BASE | {"rope_parameters": scaling}))
    plain = 1.0 / (10000.0 ** (torch.arange(0, 8, 2) / 8))
    factors = plain / model.model.rotary_emb.inv_freq
    assert factors.max() > 1
    file = gguf_files.write(tmp_path / "tiny.gguf", model, "llama", VOCABULARY, extra={"rope_freqs.weight": factors})
    folder, said = fetched(file)
    assert_close(logits_of(folder), reference_logits(model, PROMPT))
    assert not any("does not use" in line for line in said)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_model_40_rotary_scaling_in_the_metadata(kind: str, tmp_path: Path) -> None:
    scaling = tiny_models.CONFIGS[f"llama, {kind} rope"].rope_parameters
    model = bfloat16_model(LlamaConfig(**BASE | {"rope_parameters": scaling}))

    def more(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(32)

    folder, _ = fetched(gguf_files.write(tmp_path / "tiny.gguf", model, "llama", VOCABULARY, more=more))
    assert_close(logits_of(folder), reference_logits(model, PROMPT))


def test_model_40_what_is_missing_unknown_or_cannot_be_told_is_named(tmp_path: Path) -> None:
    model = bfloat16_model(LLAMA)
    missing = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(ValueError, match=missing):
        fetched(gguf_files.write(tmp_path / "missing.gguf", model, "llama", VOCABULARY, without=[missing]))
    surprise = {"blk.0.surprise.weight": torch.ones(4)}
    _, said = fetched(gguf_files.write(tmp_path / "more.gguf", model, "llama", VOCABULARY, extra=surprise))
    assert any("does not use: blk.0.surprise.weight" in line for line in said)

    def helical(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "helical")

    with pytest.raises(ValueError, match="'helical'"):
        fetched(gguf_files.write(tmp_path / "helical.gguf", model, "llama", VOCABULARY, more=helical))


def strings() -> list[str]:
    """200: runs of spaces, tabs, scripts, emoji, numbers, special tokens spelled out, nothing."""
    odd = [
        "",
        " ",
        "  ",
        "   x",
        "\t\tx \t",
        "\n\n\n",
        " \n x",
        "漢字 ไทย 한국어",
        "naïve e\u0301 ﬁ",
        "😀👩‍👩‍👧 ok",
        "\u00a0x",
    ]
    odd += [
        "1234567 12 3",
        "x  12",
        "a1b22c333",
        "don't WE'LL I'm",
        "<|im_end|>",
        "a<|im_start|>user\nb",
        "<|im_end",
        "()[]{}!?",
    ]
    words = TEXT.split(" ")
    return odd + [" ".join(words[i * 7 : i * 7 + 1 + i % 11]) for i in range(200 - len(odd))]


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_model_41_200_strings_have_the_ids_of_the_original_tokenizer(pre: str, tmp_path: Path) -> None:
    original = byte_level_tokenizer(pre)
    vocabulary = gguf_files.byte_level(original, pre, VOCAB_SIZE)
    folder, _ = fetched(gguf_files.write(tmp_path / "tiny.gguf", tiny_models.made(LLAMA), "llama", vocabulary))
    ours = GatewayTokenizer.load(folder)
    texts = strings()
    assert len(texts) == 200
    for text in texts:
        assert ours.encode(text, add_special_tokens=True) == original.encode(text).ids, text


def test_model_41_an_unknown_pre_tokenizer_stops_the_load(tmp_path: Path) -> None:
    vocabulary = gguf_files.byte_level(byte_level_tokenizer(), "never-heard-of", VOCAB_SIZE)
    with pytest.raises(ValueError, match="never-heard-of"):
        fetched(gguf_files.write(tmp_path / "tiny.gguf", tiny_models.made(LLAMA), "llama", vocabulary))


@pytest.mark.parametrize("says", [True, False, None])
def test_model_41_bos_is_added_as_the_file_says(says: bool | None, tmp_path: Path) -> None:
    """A sentencepiece vocabulary that says nothing has one, as converters of such files take for granted."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    flags = {} if says is None else {"add_bos_token": says}
    vocabulary = gguf_files.sentencepiece(tokenizer, VOCAB_SIZE, **flags)
    folder, _ = fetched(gguf_files.write(tmp_path / "tiny.gguf", tiny_models.made(LLAMA), "llama", vocabulary))
    ids = AutoTokenizer.from_pretrained(folder)("the Work")["input_ids"]
    assert (ids[0] == 1) == (says is not False)
    assert GatewayTokenizer.load(folder).encode("the Work", add_special_tokens=True) == ids
    assert ids[-1] != 2
