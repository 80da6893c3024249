"""The prompts of the end-to-end exactness tests: chat and completion, 3 to 900 tokens, the same on every run."""

from dataclasses import dataclass

_FACTS = (
    "The river rises in the mountains and runs west for three hundred miles before it meets the sea. ",
    "Every morning the baker opened the shop at five, and by seven the first loaves were gone. ",
    "A compiler turns the text of a program into instructions that a machine can carry out. ",
    "In winter the lake freezes, and people from the village walk across it to the other side. ",
    "Light from the Sun takes about eight minutes to reach the Earth. ",
)


@dataclass(frozen=True)
class Prompt:
    """One prompt: a chat when ``chat``, otherwise plain text to continue."""

    text: str
    chat: bool


def _passage(sentences: int, start: int) -> str:
    return "".join(_FACTS[(start + i) % len(_FACTS)] for i in range(sentences)).strip()


PROMPTS: tuple[Prompt, ...] = (
    Prompt("The capital of", chat=False),
    Prompt("Once upon a time", chat=False),
    Prompt("Give me three facts about the Moon.", chat=True),
    Prompt("Hi!", chat=True),
    Prompt("def fibonacci(n):\n    ", chat=False),
    Prompt("List the planets of the solar system in order.", chat=True),
    Prompt("La lune est", chat=False),
    Prompt("What is 12 times 12? Answer with a number.", chat=True),
    *(Prompt(_passage(sentences, sentences), chat=False) for sentences in (1, 2, 3, 5, 8, 12, 20, 51)),
    *(
        Prompt(f"Sum up this text in one sentence.\n\n{_passage(sentences, sentences)}", chat=True)
        for sentences in (1, 2, 4, 6, 9, 14, 25, 48)
    ),
)
