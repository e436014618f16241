"""What every DiLaServe process shares: messages, ports, settings, telemetry. Imports no service."""

__version__ = "0.1.0"
