"""The tiny model's tasks: generators of problems and checkers of answers.

Pure functions of a random generator. Each datum has one output token at its own index. Knows
the readable prompt and the aligned data of a problem, but no token id and no tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dilaserve_bench.tiny.layout import ADDEND_TOKENS, NO_PARAMETER

ADDEND_WIDTH = 16
COLOURS = "abcd"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOVES = {"N": (0, 1), "E": (1, 0), "S": (0, -1), "W": (-1, 0)}
ECHO_CHARACTERS = LETTERS * 3 + LETTERS.upper() + "0123456789.,?!'-" + " " * 20

TRAINING_STREAM = 1
HELD_OUT_STREAM = 2

# A habit of the training data, not of the rules: how often the first admissible colour is taken,
# by the colour to the left. It spreads the confidences of equally right answers, as style does.
FIRST_COLOUR_SHARE = {"": 0.97, "a": 0.93, "b": 0.87, "c": 0.78, "d": 0.66}


@dataclass(frozen=True, slots=True)
class Problem:
    """A task instance: readable prompt, aligned parameter and data, one right answer."""

    task: str
    prompt: str
    parameter: str
    data: tuple[str, ...]
    answer: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How serial the problems are: shares of restarts in chains, range of given cells in rows."""

    total_restarts: tuple[float, ...]
    walk_restarts: tuple[float, ...]
    given_cells: tuple[float, float]


LONG_CHAINS = Difficulty((0.0, 0.1, 0.2), (0.0,), (0.2, 0.7))
ASKED = Difficulty((0.0, 0.1, 0.2, 0.35), (0.0, 0.1, 0.2, 0.35), (0.4, 0.85))
SERVED = Difficulty((0.1, 0.2, 0.35), (0.1, 0.2, 0.35), (0.4, 0.85))


@dataclass(frozen=True, slots=True)
class Task:
    """`generate(rng, length, difficulty)` makes a problem of `length` data, `length` a multiple
    of 32 for `add` and even for the others; `check(problem, text)` judges an answer."""

    generate: Callable[[np.random.Generator, int, Difficulty], Problem]
    check: Callable[[Problem, str], bool]


def training_rng(seed: int, step: int, rank: int) -> np.random.Generator:
    """The generator of one training batch."""
    return np.random.default_rng([TRAINING_STREAM, seed, step, rank])


# Running total -----------------------------------------------------------------------------


def generate_total(rng: np.random.Generator, length: int, difficulty: Difficulty) -> Problem:
    """Running totals modulo 10; a bar starts again from zero."""
    digits = rng.integers(0, 10, length)
    bars = rng.random(length) < rng.choice(difficulty.total_restarts)
    data = tuple("|" if bar else str(digit) for bar, digit in zip(bars, digits, strict=True))
    return Problem(
        "total", "Running total of " + " ".join(data), NO_PARAMETER, data, running_total(data)
    )


def running_total(data: tuple[str, ...]) -> tuple[str, ...]:
    """The totals of `data`, bars kept."""
    total, totals = 0, []
    for datum in data:
        total = 0 if datum == "|" else (total + int(datum)) % 10
        totals.append("|" if datum == "|" else str(total))
    return tuple(totals)


# Walk --------------------------------------------------------------------------------------


def generate_walk(rng: np.random.Generator, length: int, difficulty: Difficulty) -> Problem:
    """Positions of a walk on a 10 × 10 torus: every start, and after each move."""
    stops = ["".join(str(value) for value in rng.integers(0, 10, 2))]
    stops += [list(MOVES)[i] for i in rng.integers(0, len(MOVES), length // 2 - 1)]
    share = rng.choice(difficulty.walk_restarts) if len(difficulty.walk_restarts) > 1 else 0.0
    if share:
        restarts = rng.random(len(stops)) < share
        starts = rng.integers(0, 100, len(stops))
        stops[1:] = [
            f"{start:02d}" if restart else stop
            for stop, restart, start in zip(stops, restarts, starts, strict=True)
        ][1:]
    data = tuple(token for stop in stops for token in (stop if stop.isdigit() else stop + ","))
    return Problem("walk", _walk_prompt(stops), NO_PARAMETER, data, walk_positions(stops))


def _walk_prompt(stops: list[str]) -> str:
    legs = [f"from {stop[0]} {stop[1]}" if stop.isdigit() else stop for stop in stops]
    return f"Walk {legs[0]}: " + " ".join(legs[1:])


def walk_positions(stops: list[str]) -> tuple[str, ...]:
    """x and y, as digits, at every start ("34") and after every move ("N")."""
    x, y, positions = 0, 0, []
    for stop in stops:
        if stop.isdigit():
            x, y = int(stop[0]), int(stop[1])
        else:
            dx, dy = MOVES[stop]
            x, y = (x + dx) % 10, (y + dy) % 10
        positions += [str(x), str(y)]
    return tuple(positions)


# Addition ----------------------------------------------------------------------------------


def generate_add(rng: np.random.Generator, length: int, _difficulty: Difficulty) -> Problem:
    """One sum of two numbers of up to 15 digits for every 32 data."""
    pairs = [
        (_random_number(rng), _random_number(rng)) for _ in range(length // (2 * ADDEND_WIDTH))
    ]
    data = tuple(token for a, b in pairs for token in _addition_data(a, b))
    answer = tuple("".join(f"{a + b:016d}" + " " * ADDEND_WIDTH for a, b in pairs))
    prompt = "Add " + "; ".join(f"{a} and {b}" for a, b in pairs)
    return Problem("add", prompt, NO_PARAMETER, data, answer)


def _random_number(rng: np.random.Generator) -> int:
    digits = int(rng.integers(8, 16))
    return int(rng.integers(10 ** (digits - 1), 10**digits))


def _addition_data(a: int, b: int) -> list[str]:
    return [*f"{a:016d}", *(ADDEND_TOKENS[int(digit)] for digit in f"{b:016d}")]


def check_add(problem: Problem, text: str) -> bool:
    """Right if the sums are, whatever the blanks between them."""
    return text.split() == "".join(problem.answer).split()


# Colouring ---------------------------------------------------------------------------------


def generate_fill(rng: np.random.Generator, length: int, difficulty: Difficulty) -> Problem:
    """A row of cells, some coloured; fill the rest so that no neighbours are equal."""
    row = _random_row(rng, length)
    given = rng.random(length) < rng.uniform(*difficulty.given_cells)
    cells = tuple(colour if keep else "?" for colour, keep in zip(row, given, strict=True))
    prompt = "Colour the row: " + " ".join(cells)
    return Problem("fill", prompt, NO_PARAMETER, cells, _fill_row(rng, cells))


def _random_row(rng: np.random.Generator, length: int) -> list[str]:
    row: list[str] = []
    for _ in range(length):
        choices = [colour for colour in COLOURS if not row or colour != row[-1]]
        row.append(choices[rng.integers(len(choices))])
    return row


def _fill_row(rng: np.random.Generator, cells: tuple[str, ...]) -> tuple[str, ...]:
    row: list[str] = []
    for index, cell in enumerate(cells):
        left = row[-1] if row else ""
        right = cells[index + 1] if index + 1 < len(cells) else ""
        row.append(cell if cell != "?" else _choose_colour(rng, left, right))
    return tuple(row)


def _choose_colour(rng: np.random.Generator, left: str, right: str) -> str:
    admissible = [colour for colour in COLOURS if colour not in (left, right)]
    if len(admissible) == 1 or rng.random() < FIRST_COLOUR_SHARE[left]:
        return admissible[0]
    return admissible[rng.integers(1, len(admissible))]


def check_fill(problem: Problem, text: str) -> bool:
    """Right if complete, the given cells are kept and no two neighbours are equal."""
    if len(text) != len(problem.data) or not set(text) <= set(COLOURS):
        return False
    kept = all(cell in ("?", colour) for cell, colour in zip(problem.data, text, strict=True))
    return kept and all(a != b for a, b in pairwise(text))


# Shift and echo ----------------------------------------------------------------------------


def generate_shift(rng: np.random.Generator, length: int, _difficulty: Difficulty) -> Problem:
    """Every letter moved on by a number of places; spaces stay."""
    places = int(rng.integers(1, 10))
    data = _random_text(rng, LETTERS + " " * 5, length)
    prompt = f"Shift by {places}: " + "".join(data)
    answer = tuple(" " if c == " " else LETTERS[(LETTERS.index(c) + places) % 26] for c in data)
    return Problem("shift", prompt, str(places), data, answer)


def generate_echo(rng: np.random.Generator, length: int, _difficulty: Difficulty) -> Problem:
    """Any text, repeated: what the chat template makes of prompts that are no task."""
    data = list(_random_text(rng, ECHO_CHARACTERS, length))
    return Problem("echo", "Repeat: " + "".join(data), NO_PARAMETER, tuple(data), tuple(data))


def _random_text(rng: np.random.Generator, characters: str, length: int) -> tuple[str, ...]:
    text = [characters[i] for i in rng.integers(0, len(characters), length)]
    for edge in (0, -1):
        text[edge] = LETTERS[rng.integers(26)]
    return tuple(text)


def check_exact(problem: Problem, text: str) -> bool:
    """Right if it is the one right answer."""
    return text == "".join(problem.answer)


TASKS: dict[str, Task] = {
    "total": Task(generate_total, check_exact),
    "walk": Task(generate_walk, check_exact),
    "add": Task(generate_add, check_add),
    "fill": Task(generate_fill, check_fill),
    "shift": Task(generate_shift, check_exact),
    "echo": Task(generate_echo, check_exact),
}


def held_out_problem(
    task: str, length: int, seed: int, index: int, difficulty: Difficulty = SERVED
) -> Problem:
    """Problem `index` of the held-out set of `task` with `length` data."""
    rng = np.random.default_rng([HELD_OUT_STREAM, seed, list(TASKS).index(task), length, index])
    return TASKS[task].generate(rng, length, difficulty)
