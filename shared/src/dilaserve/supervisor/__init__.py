"""The embedded stack: starts NATS, Valkey and the services as children, and keeps them running.

Knows processes, ports and readiness; imports no service and starts them by `python -m`.
"""
