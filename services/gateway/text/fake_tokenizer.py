"""The tokenizer of the fake model, built from its vocabulary: from here on the fake takes the path of a real model."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.gateway.text import tokenizer
from shared import fake_model

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def fake_tokenizer() -> tokenizer.Tokenizer:
    """Encodes any text as its raw bytes (there are no merges) and decodes the made-up words as well."""
    alphabet = tokenizer.byte_level_alphabet()
    specials = set(range(fake_model.FIRST_SPECIAL, fake_model.VOCAB_SIZE))
    vocabulary = {}
    for token_id in range(fake_model.VOCAB_SIZE):
        spelled = fake_model.token_bytes(token_id)
        text = spelled.decode() if token_id in specials else "".join(alphabet[byte] for byte in spelled)
        vocabulary[text] = token_id
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in fake_model.SPECIAL_TOKENS])
    model = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    return tokenizer.Tokenizer(model, fake_model.TOKENIZER_DIGEST)
