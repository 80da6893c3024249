"""Writes what transformers' own ``generate`` gives for each prompt alone, greedily, in float32.

Run as ``python -m tests.e2e.reference MAX_TOKENS FILE``, in a process of its own so that its memory goes with it.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.prompts import PROMPTS
from tools.model import cached


def main(max_tokens: int, path: Path) -> None:
    torch.set_num_threads(1)  # threads that wait for each other are slower than one on a machine that is busy
    folder = cached("default", lambda line: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in PROMPTS:
        if prompt.chat:
            messages = [{"role": "user", "content": prompt.text}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer(prompt.text).input_ids
        with torch.inference_mode():
            whole = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)
        outputs.append(whole[0, len(ids) :].tolist())
    path.write_text(json.dumps(outputs))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
