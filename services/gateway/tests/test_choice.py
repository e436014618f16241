"""A choice's text, tokens and end, whatever the steps that brought them."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from dilaserve.messages import FinishReason, TokenDelta
from dilaserve_gateway.choice import Choice, Update
from dilaserve_gateway.model import ServedModel

EOS = 1


def follow(
    model: ServedModel,
    text: str,
    steps: list[list[int]],
    *,
    n_output: int,
    stops: tuple[str, ...] = (),
    ignore_eos: bool = False,
) -> tuple[Choice, list[Update]]:
    """Feed `text` and EOS, unmasked position by position in the order of `steps`."""
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    canvas = [*tokens, *[EOS] * n_output][:n_output]
    eos_ids = frozenset() if ignore_eos else model.eos_ids
    choice = Choice(0, "r", model.tokenizer, n_output=n_output, eos_ids=eos_ids, stops=stops)
    updates = []
    for number, positions in enumerate(steps, start=1):
        last = number == len(steps)
        reason: FinishReason = "stop" if EOS in canvas and not ignore_eos else "length"
        delta = TokenDelta(
            request_id="r",
            epoch=1,
            step=number,
            positions=sorted(positions),
            tokens=[canvas[p] for p in sorted(positions)],
            confidences=[0.5] * len(positions),
            kind="cache",
            threshold=0.9,
            worker="w",
            finish_reason=reason if last else None,
        )
        update = choice.offer(delta)
        assert isinstance(update, Update)
        updates.append(update)
        if choice.finish_reason is not None:
            break
    return choice, updates


@settings(deadline=None)
@given(data=st.data())
def test_text_does_not_depend_on_the_steps(model: ServedModel, data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet="ab\n", max_size=14))
    stops = tuple(data.draw(st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3)))
    order = data.draw(st.permutations(range(12)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 11), max_size=6)))
    bounds = [0, *cuts, 12]
    steps = [list(order[a:b]) for a, b in itertools.pairwise(bounds)]
    one_by_one = [[p] for p in range(12)]
    choice, updates = follow(model, text, steps, n_output=12, stops=stops)
    straight, expected = follow(model, text, one_by_one, n_output=12, stops=stops)
    assert "".join(u.text for u in updates) == "".join(u.text for u in expected)
    assert [t for u in updates for t in u.tokens] == [t for u in expected for t in u.tokens]
    assert (choice.finish_reason, choice.n_tokens) == (straight.finish_reason, straight.n_tokens)
    assert updates[-1].finish_reason == choice.finish_reason is not None


def test_text_ends_before_eos(model: ServedModel) -> None:
    choice, updates = follow(model, "hey", [[3, 0], [1, 2]], n_output=8)
    assert [u.text for u in updates] == ["h", "ey"]
    assert (choice.finish_reason, choice.n_tokens) == ("stop", 3)
    assert not choice.is_cut_short


def test_eos_ignored_is_no_end_and_no_text(model: ServedModel) -> None:
    choice, updates = follow(model, "hey", [[3, 0], [1, 2, 4, 5]], n_output=6, ignore_eos=True)
    assert "".join(u.text for u in updates) == "hey"
    assert (choice.finish_reason, choice.n_tokens) == ("length", 6)


def test_a_full_canvas_ends_by_length(model: ServedModel) -> None:
    choice, updates = follow(model, "abcdef", [[0, 1], [2, 3]], n_output=4)
    assert "".join(u.text for u in updates) == "abcd"
    assert updates[-1].finish_reason == choice.finish_reason == "length"


def test_a_stop_string_across_steps_cuts_the_request_short(model: ServedModel) -> None:
    steps = [[0, 1, 2, 3, 4], [5, 6], [7]]
    choice, updates = follow(model, "one END two", steps, n_output=9, stops=("END",))
    assert [u.text for u in updates] == ["one ", ""]
    assert (choice.finish_reason, choice.n_tokens, choice.is_cut_short) == ("stop", 7, True)


def test_a_beginning_of_a_stop_string_is_text_at_the_end(model: ServedModel) -> None:
    _, updates = follow(model, "one EN", [[0, 1, 2, 3, 4, 5], [6]], n_output=8, stops=("END",))
    assert [u.text for u in updates] == ["one ", "EN"]
    assert updates[-1].finish_reason == "stop"


def test_a_stop_string_in_the_last_step_cancels_nothing(model: ServedModel) -> None:
    choice, _ = follow(model, "a END", [[0, 1, 2, 3, 4, 5]], n_output=6, stops=("END",))
    assert (choice.finish_reason, choice.is_cut_short) == ("stop", False)
