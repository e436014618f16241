"""What a client asks for, checked against the model: prompts as ids, and how to decode them.

Plain data; knows no HTTP, no bus and no store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dilaserve.store.records import DecodingSpec, ServiceLevel

SEED_LIMIT = 2**63
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Ask:
    """One call. Choice `i` continues prompt `i // n`."""

    operation: str
    """GenAI semantic conventions: `chat` or `text_completion`."""
    prompts: tuple[list[int], ...]
    n_output: int
    seed: int
    """In [0, 2**63); choice 0 has it, its siblings have others derived from it."""
    block_length: int
    level: ServiceLevel = field(default_factory=ServiceLevel)
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = False
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    """Give the log probability of each token."""
    top_logprobs: bool = False
    """Name the token itself as its only alternative, which it is at temperature 0."""
    service_tier: str | None = None
    """As asked."""
    ignored: tuple[str, ...] = ()
    """Names of fields of the body that are not known."""

    @property
    def n_choices(self) -> int:
        """Records that the call needs."""
        return len(self.prompts) * self.n

    @property
    def n_prompt(self) -> int:
        """Prompt tokens, each prompt counted once."""
        return sum(len(prompt) for prompt in self.prompts)

    def choices(self) -> Iterator[tuple[int, list[int], DecodingSpec]]:
        """(index, prompt ids, spec) of each choice."""
        for index in range(self.n_choices):
            spec = DecodingSpec(
                n_output=self.n_output,
                block_length=self.block_length,
                seed=sibling_seed(self.seed, index),
                temperature=self.temperature,
                top_p=self.top_p,
                ignore_eos=self.ignore_eos,
            )
            yield index, self.prompts[index // self.n], spec


def sibling_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: its own for 0, else one of the splitmix64 sequence from it."""
    if index == 0:
        return seed
    z = (seed + index * _GOLDEN) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) % SEED_LIMIT
