"""The aligned prompt layout of the tiny model, and its vocabulary.

Every prompt has the same shape, so that each canvas position finds its datum at one constant
distance: `<bos> <task> parameter data*96 <sep>`, then the canvas. Knows no task and no tensor.
"""

from collections.abc import Sequence

BLOCK_LENGTH = 32
DATA_WIDTH = 96
PROMPT_LENGTH = DATA_WIDTH + 4
VOCAB_SIZE = 128

PAD, EOS, BOS, MASK, UNK, SEP = "<pad>", "<eos>", "<bos>", "<mask>", "<unk>", "<sep>"
CONTROL_TOKENS = (PAD, EOS, BOS, MASK, UNK, SEP)
TASK_NAMES = ("total", "walk", "add", "fill", "shift", "echo")
TASK_TOKENS = tuple(f"<{name}>" for name in TASK_NAMES)
ADDEND_TOKENS = tuple(f"<+{digit}>" for digit in range(10))
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))

SPECIAL_TOKENS = (*CONTROL_TOKENS, *TASK_TOKENS, *ADDEND_TOKENS)
NO_PARAMETER = " "


def vocabulary() -> dict[str, int]:
    """Token → id; padded with reserved tokens to `VOCAB_SIZE`, which eight TP ranks divide."""
    tokens = [*SPECIAL_TOKENS, *CHARACTERS]
    reserved = [f"<reserved_{i}>" for i in range(VOCAB_SIZE - len(tokens))]
    return {token: index for index, token in enumerate([*tokens, *reserved])}


def prompt_tokens(task: str, parameter: str, data: Sequence[str]) -> list[str]:
    """The `PROMPT_LENGTH` tokens of a prompt; `data` holds at most `DATA_WIDTH` tokens."""
    if len(data) > DATA_WIDTH:
        raise ValueError(
            f"{len(data)} data tokens do not fit the layout; give at most {DATA_WIDTH}"
        )
    padding = [PAD] * (DATA_WIDTH - len(data))
    return [BOS, f"<{task}>", parameter, *data, *padding, SEP]


def canvas_tokens(answer: Sequence[str], canvas_length: int) -> list[str]:
    """The answer followed by EOS up to `canvas_length`, cut where it is longer."""
    padding = [EOS] * (canvas_length - len(answer))
    return [*answer[:canvas_length], *padding]
