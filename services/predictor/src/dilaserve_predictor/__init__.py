"""The step predictor: how many denoising steps requests still need, by threshold."""
