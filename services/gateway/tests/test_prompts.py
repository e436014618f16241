"""What is asked of the cluster for each kind of body."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dilaserve.errors import InvalidRequestError
from dilaserve.store.records import ServiceLevel
from dilaserve_gateway.ask import SEED_LIMIT, Ask, sibling_seed
from dilaserve_gateway.errors import ApiError
from dilaserve_gateway.model import ServedModel
from dilaserve_gateway.prompts import Prompter, _row
from dilaserve_gateway.schema import ChatBody, CompletionBody, DenoiseBody, LevelHeaders, Message
from dilaserve_gateway.settings import GatewaySettings
from dilaserve_gateway.tiers import tiers_of

NO_HEADERS = LevelHeaders()


TIERS = tiers_of(GatewaySettings(model="tiny"))


def make_prompter(model: ServedModel) -> Prompter:
    return Prompter(model, block_length=32, max_choices=8, tiers=TIERS, draw_seed=lambda: 4242)


@pytest.fixture
def prompter(model: ServedModel) -> Prompter:
    return make_prompter(model)


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def complete(prompter: Prompter, **fields: Any) -> Ask:
    body = CompletionBody.model_validate({"model": "tiny", "prompt": "hey"} | fields)
    return await prompter.completion(body, NO_HEADERS)


async def chat(prompter: Prompter, **fields: Any) -> Ask:
    body = ChatBody.model_validate({"model": "tiny", "messages": user("hey")} | fields)
    return await prompter.chat(body, NO_HEADERS)


async def test_defaults(prompter: Prompter, model: ServedModel) -> None:
    ask = await complete(prompter)
    assert ask == Ask(
        operation="text_completion",
        prompts=(model.tokenizer.encode("hey", add_special_tokens=True),),
        n_output=model.default_output,
        seed=4242,
        block_length=32,
        level=ServiceLevel(slo_ms=30_000),
    )


@pytest.mark.parametrize(
    ("prompt", "n_prompts"),
    [("hey", 1), ([5, 6], 1), (["a", "b"], 2), ([[5, 6], [7]], 2), (["a"], 1), ([[5]], 1)],
)
async def test_forms_of_a_prompt(
    prompter: Prompter, model: ServedModel, prompt: Any, n_prompts: int
) -> None:
    ask = await complete(prompter, prompt=prompt)
    assert len(ask.prompts) == n_prompts
    if prompt == [[5, 6], [7]]:
        assert ask.prompts == ([5, 6], [7])
    if prompt == ["a", "b"]:
        assert [model.tokenizer.decode(p) for p in ask.prompts] == ["a", "b"]


async def test_a_long_prompt_is_tokenized_in_a_thread(prompter: Prompter) -> None:
    with pytest.raises(ApiError, match=r"5000 prompt tokens .* shorten the prompt"):
        await complete(prompter, prompt="a" * 5000)


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []]])
async def test_a_prompt_has_tokens(prompter: Prompter, prompt: Any) -> None:
    with pytest.raises(ApiError, match="prompt is empty") as caught:
        await complete(prompter, prompt=prompt)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize("token", [-1, 128, 10**30])
async def test_ids_are_of_the_vocabulary(prompter: Prompter, token: int) -> None:
    with pytest.raises(ApiError, match="give ids from 0 to 127"):
        await complete(prompter, prompt=[5, token])


async def test_context_length(prompter: Prompter, model: ServedModel) -> None:
    room = model.context_length - 3
    assert (await complete(prompter, max_tokens=room)).n_output == room
    with pytest.raises(ApiError) as caught:
        await complete(prompter, max_tokens=room + 1)
    assert caught.value.code == "context_length_exceeded"
    for number in ("3 prompt tokens", str(room + 1), str(model.context_length), f"at most {room}"):
        assert number in caught.value.message
    with pytest.raises(ApiError, match="max_tokens=an integer of 333 bits"):
        await complete(prompter, max_tokens=10**100)


async def test_an_output_that_nobody_asked_for_is_named_as_the_default(
    prompter: Prompter, model: ServedModel
) -> None:
    default, context = model.default_output, model.context_length
    with pytest.raises(ApiError) as caught:
        await complete(prompter, prompt=[5] * (context - 10))
    assert caught.value.message == (
        f"{context - 10} prompt tokens and the default of {default} output tokens (no max_tokens "
        f"is given) exceed the model's context length of {context}; set max_tokens to at most 10."
    )
    with pytest.raises(ApiError, match=f"and max_tokens={default} exceed"):
        await complete(prompter, prompt=[5] * (context - 10), max_tokens=default)


async def test_other_models_are_not_found(prompter: Prompter) -> None:
    with pytest.raises(ApiError, match="'gpt-4' is not served here; use 'tiny'") as caught:
        await complete(prompter, model="gpt-4")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


async def test_messages_are_rendered(prompter: Prompter, model: ServedModel) -> None:
    assert model.template is not None
    text = model.template.render(user("add 12 + 34"))
    expected = (model.tokenizer.encode(text, add_special_tokens=False),)
    assert (await chat(prompter, messages=user("add 12 + 34"))).prompts == expected
    parts = [{"type": "text", "text": "add 12"}, {"type": "text", "text": " + 34"}]
    assert (await chat(prompter, messages=user(parts))).prompts == expected


async def test_roles_as_templates_know_them() -> None:
    assert _row(Message(role="developer", content="x")) == {"role": "system", "content": "x"}
    named = _row(Message(role="user", content="x", name="ann"))
    assert named == {"role": "user", "content": "x", "name": "ann"}


async def test_max_completion_tokens_goes_before_max_tokens(prompter: Prompter) -> None:
    assert (await chat(prompter, max_tokens=5)).n_output == 5
    assert (await chat(prompter, max_tokens=5, max_completion_tokens=7)).n_output == 7


async def test_a_model_without_template(model: ServedModel) -> None:
    bare = dataclasses.replace(model, template=None)
    with pytest.raises(ApiError, match="has no chat template; use /v1/completions"):
        await chat(make_prompter(bare))


async def test_sampling_and_stops(prompter: Prompter) -> None:
    ask = await complete(
        prompter, temperature=1.5, top_p=0.9, seed=7, stop=["a", "b"], ignore_eos=True, n=3
    )
    assert (ask.temperature, ask.top_p, ask.seed, ask.stops) == (1.5, 0.9, 7, ("a", "b"))
    assert (ask.ignore_eos, ask.n, ask.n_choices) == (True, 3, 3)
    assert (await complete(prompter, stop="x")).stops == ("x",)


async def test_choices_have_seeds_of_their_own(prompter: Prompter) -> None:
    ask = await complete(prompter, prompt=["a", "b"], n=3, seed=7, temperature=1)
    rows = list(ask.choices())
    assert [index for index, _, _ in rows] == list(range(6))
    assert [prompt for _, prompt, _ in rows] == [ask.prompts[0]] * 3 + [ask.prompts[1]] * 3
    seeds = [spec.seed for _, _, spec in rows]
    assert seeds[0] == 7
    assert len(set(seeds)) == 6
    assert all(0 <= seed < SEED_LIMIT for seed in seeds)


async def test_a_negative_seed_is_folded(prompter: Prompter) -> None:
    assert (await complete(prompter, seed=-1)).seed == SEED_LIMIT - 1
    assert sibling_seed(SEED_LIMIT - 1, 63) < SEED_LIMIT


async def test_at_most_so_many_choices(prompter: Prompter) -> None:
    with pytest.raises(ApiError, match="3 prompts with n=3 make 9 choices, and at most 8"):
        await complete(prompter, prompt=["a", "b", "c"], n=3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": 1, "temperature": 1.0}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_completions_that_are_refused(
    prompter: Prompter, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        await complete(prompter, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_log_probabilities(prompter: Prompter) -> None:
    for n_top, top in ((0, False), (1, True)):
        ask = await complete(prompter, logprobs=n_top)
        assert (ask.logprobs, ask.top_logprobs) == (True, top)
        ask = await chat(prompter, logprobs=True, top_logprobs=n_top)
        assert (ask.logprobs, ask.top_logprobs) == (True, top)
    assert not (await chat(prompter, logprobs=False)).logprobs
    with pytest.raises(ApiError, match="`top_logprobs`=5 asks for tokens that were not chosen"):
        await chat(prompter, logprobs=True, top_logprobs=5)
    with pytest.raises(ApiError, match="needs `logprobs`"):
        await chat(prompter, top_logprobs=1)


async def test_the_level_comes_from_body_or_headers(prompter: Prompter) -> None:
    headers = LevelHeaders.model_validate({"x-slo-ms": 900, "x-priority": 3})
    body = CompletionBody.model_validate(
        {
            "model": "tiny",
            "prompt": "a",
            "priority": 5,
            "min_confidence": 0.6,
            "service_tier": "flex",
        }
    )
    ask = await prompter.completion(body, headers)
    assert ask.level == ServiceLevel(
        slo_ms=900, priority=5, service_tier="flex", min_confidence=0.6
    )


@pytest.mark.parametrize(
    ("asked", "used", "priority", "slo_ms"),
    [
        (None, "default", 0, 30_000),
        ("auto", "default", 0, 30_000),
        ("default", "default", 0, 30_000),
        ("scale", "default", 0, 30_000),
        ("flex", "flex", -10, 120_000),
        ("priority", "priority", 10, 15_000),
    ],
)
async def test_a_tier_is_a_priority_and_an_slo(
    prompter: Prompter, asked: str | None, used: str, priority: int, slo_ms: int
) -> None:
    ask = await complete(prompter, service_tier=asked)
    assert ask.level == ServiceLevel(slo_ms=slo_ms, priority=priority, service_tier=used)
    assert ask.service_tier == asked


async def test_a_tier_gives_way_to_what_is_asked_for(prompter: Prompter) -> None:
    level = (await complete(prompter, service_tier="priority", slo_ms=7, priority=0)).level
    assert level == ServiceLevel(slo_ms=7, priority=0, service_tier="priority")
    headers = LevelHeaders.model_validate({"x-service-tier": "flex"})
    body = CompletionBody.model_validate({"model": "tiny", "prompt": "a"})
    assert (await prompter.completion(body, headers)).level.service_tier == "flex"
    body = CompletionBody.model_validate({"model": "tiny", "prompt": "a", "service_tier": "auto"})
    assert (await prompter.completion(body, headers)).level.service_tier == "default"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": user("b")}, "prompt"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": ""}, "prompt"),
    ],
)
async def test_a_raw_stream_has_one_canvas(
    prompter: Prompter, fields: dict[str, Any], param: str
) -> None:
    body = DenoiseBody.model_validate({"model": "tiny"} | fields)
    with pytest.raises((ApiError, InvalidRequestError)) as caught:
        await prompter.denoise(body, NO_HEADERS)
    assert caught.value.param == param


async def test_a_raw_stream_of_text_ids_or_messages(prompter: Prompter) -> None:
    async def prompts(**fields: Any) -> tuple[list[int], ...]:
        body = DenoiseBody.model_validate({"model": "tiny"} | fields)
        return (await prompter.denoise(body, NO_HEADERS)).prompts

    assert await prompts(prompt=[5, 6]) == ([5, 6],)
    assert await prompts(prompt="hey") == (await complete(prompter)).prompts
    assert await prompts(messages=user("hey")) == (await chat(prompter)).prompts
