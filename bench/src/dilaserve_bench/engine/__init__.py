"""The bare engine, without a stack around it: how fast it is, and where a pass spends its time."""
