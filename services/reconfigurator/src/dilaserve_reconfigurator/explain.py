"""A plan in words: what was seen, what was decided and why, what is predicted."""

from __future__ import annotations

from collections.abc import Iterator

from dilaserve_reconfigurator.outcomes import Observed
from dilaserve_reconfigurator.record import Inputs, Mix, PlanRecord, mix_text
from dilaserve_reconfigurator.solving import Outcome

__all__ = ["explain"]

N_CLASSES = 5
"""Classes that are listed; the rest is summed up."""


def explain(record: PlanRecord) -> str:
    """Several lines."""
    return "\n".join(_lines(record))


def _lines(record: PlanRecord) -> Iterator[str]:
    yield f"{record.plan_id}: {record.verdict}"
    yield from (f"  {reason}" for reason in record.reasons)
    yield f"present  {_mix(record.present)}"
    if record.target != record.present:
        yield f"target   {_mix(record.target)}"
    yield from _what_came_of_it(record)
    if record.payback_s is not None:
        yield f"payback  {record.payback_s:.0f} s"
    if record.transition is not None:
        moves = record.transition
        yield f"keep     {len(moves.keep)} instances"
        yield f"end      {', '.join(moves.terminate) or 'none'}"
        for slot in moves.launch:
            gpus = ", ".join(map(str, slot.gpus))
            yield f"launch   TP-{slot.tp_degree} on node {slot.node}, GPU {gpus}"
    if record.inputs is not None:
        yield from _inputs(record.inputs)
    for name, outcome in (
        ("best mix", record.best),
        ("present mix", record.as_it_is),
        ("moves", record.moves),
    ):
        if outcome is not None:
            yield f"solved   {name}: {_outcome(outcome)}"


def _what_came_of_it(record: PlanRecord) -> Iterator[str]:
    carried = record.carried_out
    if carried is not None:
        how = carried.phase.replace("_", " ")
        yield f"carried  {how} in {carried.seconds:.0f} s{_because(carried.reason)}"
        if carried.pause_s > 0.0:
            wanted = f"{max(carried.floor, 1)} GPUs"
            yield (
                f"pause    {carried.pause_s:.1f} s with less than {wanted} serving (at least "
                f"{carried.lowest}); requests waited"
            )
        else:
            yield f"serving  at least {carried.lowest} GPUs all the time"
    if record.before is not None:
        yield f"before   {_observed(record.before)}"
    if record.after is not None:
        yield f"after    {_observed(record.after)}"


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _observed(seen: Observed) -> str:
    if seen.attainment is None:
        return f"{seen.rate:.3g} requests a second for {seen.seconds:.0f} s, none of which ended"
    text = (
        f"{seen.rate:.3g} requests a second for {seen.seconds:.0f} s, {seen.attainment:.1%} of "
        f"{seen.n_judged} in time"
    )
    if seen.mean_threshold is None or seen.mean_latency_s is None:
        return text
    return f"{text}: mean threshold {seen.mean_threshold:.3f}, latency {seen.mean_latency_s:.2f} s"


def _mix(mix: Mix) -> str:
    if mix.mean_threshold is None or mix.mean_slack is None or mix.mean_latency_s is None:
        return f"{mix_text(mix.counts)} (cannot serve the load within the SLOs, or not evaluated)"
    load = ", ".join(f"TP-{d} {load:.2f}" for d, load in sorted(mix.loads.items()) if load > 1e-6)
    return (
        f"{mix_text(mix.counts)}: mean threshold {mix.mean_threshold:.3f}, latency "
        f"{mix.mean_latency_s:.2f} s, slack {mix.mean_slack:.1%} of the SLO; work: {load}"
    )


def _inputs(inputs: Inputs) -> Iterator[str]:
    total = sum(each.rate for each in inputs.classes)
    yield (
        f"load     {total:.3g} requests a second in {len(inputs.classes)} classes, planned for "
        f"{inputs.rate_factor:g} times as many, on {sum(inputs.nodes)} GPUs"
    )
    for number, each in enumerate(inputs.classes[:N_CLASSES]):
        out_of_reach = " (out of reach)" if number in inputs.unreachable else ""
        yield (
            f"         {each.rate:.3g}/s of {each.n_prompt} + {each.n_output} tokens within "
            f"{each.slo_s:g} s{out_of_reach}"
        )


def _outcome(outcome: Outcome) -> str:
    gaps = ", ".join(
        f"{o.name} {o.value:.4g}" + (f" (gap {o.gap:.2%})" if o.gap is not None else "")
        for o in outcome.objectives
    )
    return f"{outcome.status} by {outcome.solver} in {outcome.seconds:.2f} s; {gaps or 'nothing'}"
