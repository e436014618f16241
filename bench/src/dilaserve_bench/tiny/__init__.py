"""The bundled tiny diffusion language model: its tasks, tokenizer, training and evaluation."""
