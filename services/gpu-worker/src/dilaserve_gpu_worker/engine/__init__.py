"""The denoising engine: plan → forward → unmask. Knows no bus, no store and no tokenizer."""
