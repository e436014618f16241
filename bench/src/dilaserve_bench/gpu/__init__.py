"""What an engine makes of a GPU, measured with a model of full size whose weights are random."""
