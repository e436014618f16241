"""What tests share: fixtures over both adapters (`dilaserve.testing.fixtures`, a pytest plugin),
brokers that go away, factories of records, waiting."""

from dilaserve.testing.brokers import Broker, BrokerInMemory, BrokerOverNats
from dilaserve.testing.factories import (
    N_OUTPUT,
    STATS,
    admitted,
    canvas_of,
    delta_of,
    new_request,
    record_of,
    step_of,
)
from dilaserve.testing.waiting import settled, until

__all__ = [
    "N_OUTPUT",
    "STATS",
    "Broker",
    "BrokerInMemory",
    "BrokerOverNats",
    "admitted",
    "canvas_of",
    "delta_of",
    "new_request",
    "record_of",
    "settled",
    "step_of",
    "until",
]
