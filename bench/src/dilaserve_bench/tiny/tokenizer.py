"""Builds the tiny model's tokenizer folder: one token per printable character, plus task tokens.

`python -m dilaserve_bench.tiny.tokenizer --out models/tiny` writes tokenizer.json and
tokenizer_config.json (with the chat template). Knows no model.
"""

import argparse
import json
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from dilaserve_bench.tiny.layout import BOS, EOS, MASK, PAD, SPECIAL_TOKENS, UNK, vocabulary

MAX_SEQUENCE_LENGTH = 1024


def build_tokenizer() -> Tokenizer:
    """A character tokenizer; characters outside the vocabulary become `<unk>`."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """tokenizer_config.json, chat template included."""
    template = files(__package__).joinpath("chat_template.jinja").read_text()
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNK,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_SEQUENCE_LENGTH,
        "chat_template": template,
    }


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=1)
    (folder / "tokenizer_config.json").write_text(text + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    write_tokenizer(parser.parse_args().out)


if __name__ == "__main__":
    main()
