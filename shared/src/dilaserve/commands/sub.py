"""`dilaserve sub`: the traffic on the bus, printed as the NATS command line does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Annotated

import typer

from dilaserve.bus import BusMessage
from dilaserve.commands.connect import bus_of_stack
from dilaserve.commands.options import NatsUrl


def sub(
    subject: Annotated[str, typer.Argument(help="Subject; * stands for one word, > for the rest.")],
    limit: Annotated[int, typer.Option("--count", help="End after this many; 0: never.")] = 0,
    nats_url: NatsUrl = None,
) -> None:
    """Print the messages on a subject, such as 'dlm.>'."""
    asyncio.run(_subscribe(nats_url, subject, limit))


async def _subscribe(url: str | None, subject: str, limit: int) -> None:
    done = asyncio.get_running_loop().create_future()
    async with bus_of_stack(url, name="sub") as bus:
        await bus.subscribe(subject, _printer(limit, done))
        typer.echo(f"Subscribing on {subject}", err=True)
        await done


def _printer(limit: int, done: asyncio.Future[None]) -> Callable[[BusMessage], None]:
    numbers = count(1)

    def show(message: BusMessage) -> None:
        if done.done():
            return
        number = next(numbers)
        try:
            typer.echo(_as_text(number, message))
        except BrokenPipeError as error:
            done.set_exception(error)
        else:
            if number == limit:
                done.set_result(None)

    return show


def _as_text(number: int, message: BusMessage) -> str:
    reply = f' with reply "{message.reply}"' if message.reply else ""
    headers = "".join(f"{name}: {value}\n" for name, value in message.headers.items())
    gap = "\n" if headers else ""
    body = message.data.decode(errors="replace")
    return f'[#{number}] Received on "{message.subject}"{reply}\n{headers}{gap}{body}\n'
