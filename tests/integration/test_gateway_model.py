"""The real default model's tokenizer: T1 and T2 on it, and its template against transformers' own."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from services.gateway.text.chat_prompt import encoded, rendered
from services.gateway.text.chat_template import Conversation
from services.gateway.text.detokenizer import detokenizer
from services.gateway.text.stops import StopFinder
from services.gateway.text.tokenizer import Tokenizer
from tools.model import cached

pytestmark = pytest.mark.model

REPOSITORY = Path(__file__).parents[2]
TEXTS = [
    "😀👩‍👩‍👧 漢字 ไทย ď",
    "The capital of France is",
    "  leading, trailing  \n\n\tand inner   spaces ",
    "<|im_start|>user\nspecial tokens as text<|im_end|>",
    "".join(chr(code) for code in range(1, 0x250)),
    "def f(x):\n    return x ** 2 if x > 0 else -x  # ½ ≠ 0.5f",
]


@pytest.fixture(name="folder", scope="module")
def _folder() -> Path:
    return cached("default", lambda line: None)


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def test_ids_equal_those_of_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    """In a process of its own, as its AutoTokenizer imports torch."""
    code = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
texts = json.loads(sys.argv[2])
messages = [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
print(json.dumps([chat, [tokenizer(text).input_ids for text in texts]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), json.dumps(TEXTS)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    chat, plain = json.loads(done.stdout)
    messages = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": TEXTS[1]}]
    text = rendered(tokenizer.chat_template(), Conversation(messages))
    assert encoded(tokenizer, text, add_special_tokens=False, max_tokens=1000).ids == chat
    assert [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS] == plain


def test_pieces_joined_are_the_whole_decode(tokenizer: Tokenizer) -> None:
    source = random.Random(3)
    size = len(tokenizer.token_bytes)
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    rows += [[source.randrange(size) for _ in range(source.randrange(40))] for _ in range(300)]
    for ids in rows:
        for skip in (True, False):
            state = detokenizer(tokenizer, [1], skip_special_tokens=skip)
            pieces = [state.decode(token_id) for token_id in ids]
            assert "".join(pieces) + state.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


def test_every_stop_string_in_a_text_is_found_wherever_tokens_cut_it(tokenizer: Tokenizer) -> None:
    text = TEXTS[5] + TEXTS[0]
    ids = tokenizer.encode(text, add_special_tokens=False)
    for start in range(len(text) - 6):
        stop = text[start : start + 6]
        state, finder = detokenizer(tokenizer, [1], skip_special_tokens=True), StopFinder([stop])
        sent = ""
        for token_id in ids:
            sent += finder.push(state.decode(token_id))
            if finder.stopped:
                break
        assert sent == text[: text.index(stop)]
