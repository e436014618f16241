"""The engine in a process of its own, so that neither its interpreter nor its core is shared with
what talks to NATS and the store (decision 0019). `port` is what the service sees, `loop` what runs
over there, `process` and `__main__` the two ends of the pipes between them."""
