"""When the predictor is asked, and about whom."""

from __future__ import annotations

from dilaserve.messages import NOTHING_COMPUTED, PredictSteps, StepsPredicted
from dilaserve_scheduler.core.policy import Inquire
from dilaserve_scheduler.policies.asking import MAX_BATCH, Asking

from .builders import STATS, advance, make_request


def query(inquiries: list[Inquire]) -> PredictSteps:
    (inquiry,) = inquiries
    assert isinstance(inquiry.query, PredictSteps)
    return inquiry.query


def said(refresh_tokens: int | None = None) -> StepsPredicted:
    return StepsPredicted(model_id="m", thresholds=[], answers=[], refresh_tokens=refresh_tokens)


def test_a_request_is_due_after_so_many_tokens() -> None:
    asking, request = Asking((0.5, 0.9), 4), make_request()
    for n_new in (3, 1):
        assert asking.questions(0.0) == []
        advance(request, n_new)
        asking.stepped(request, STATS)
    asked = query(asking.questions(0.0))
    assert asked.thresholds == [0.5, 0.9]
    (question,) = asked.questions
    assert (question.step, question.n_unmasked, question.block) == (2, 4, 0)
    assert (question.n_block_masked, question.confidence) == (4, STATS)
    assert asking.n_unmasked("r") == 4


def test_one_question_is_under_way_at_a_time() -> None:
    asking = Asking((0.9,), 1)
    first, second = make_request("a"), make_request("b")
    for request in (first, second):
        advance(request, 1)
    asking.stepped(first, STATS)
    assert query(asking.questions(0.0))
    asking.stepped(second, STATS)
    assert asking.questions(0.5) == []
    asking.answered(said())
    assert [q.request_id for q in query(asking.questions(0.6)).questions] == ["b"]
    asking.stepped(first, STATS)
    assert asking.questions(0.7) == []


def test_a_question_without_an_answer_is_given_up() -> None:
    asking, request = Asking((0.9,), 1), make_request()
    for _ in range(2):
        advance(request, 1)
        asking.stepped(request, STATS)
        asking.questions(0.0)
    assert asking.questions(0.9) == []
    assert query(asking.questions(1.1))


def test_another_model_has_a_question_of_its_own() -> None:
    asking = Asking((0.9,), 1)
    for name, model_id in (("a", "m"), ("b", "n")):
        request = make_request(name, model_id=model_id)
        advance(request, 1)
        asking.stepped(request, STATS)
        assert query(asking.questions(0.0)).model_id == model_id


def test_a_question_is_bounded_and_the_ended_are_left_out() -> None:
    asking = Asking((0.9,), 1)
    requests = [make_request(f"r{n}") for n in range(MAX_BATCH + 10)]
    for request in requests:
        advance(request, 1)
        asking.stepped(request, STATS)
    assert len(query(asking.questions(0.0)).questions) == MAX_BATCH
    asking.answered(said())
    asking.forget(requests[-1])
    assert len(query(asking.questions(0.0)).questions) == 9


def test_who_has_just_come_is_asked_about_without_confidences() -> None:
    asking, request, gone = Asking((0.9,), 4), make_request(), make_request("gone")
    for each in (request, gone):
        asking.arrived(each)
    asking.forget(gone)
    (question,) = query(asking.questions(0.0)).questions
    assert (question.request_id, question.step, question.n_unmasked) == ("r", 0, 0)
    assert question.confidence == NOTHING_COMPUTED
    assert asking.questions(9.0) == []


def test_the_predictor_may_say_how_often_to_ask() -> None:
    for as_predicted in (False, True):
        asking = Asking((0.9,), 8, as_predicted=as_predicted)
        asking.answered(said(None))
        asking.answered(said(3))
        request, other = make_request(), make_request("other", model_id="n")
        for each in (request, other):
            advance(each, 3)
            asking.stepped(each, STATS)
        asked = [query([inquiry]).model_id for inquiry in asking.questions(0.0)]
        assert asked == (["m"] if as_predicted else [])
