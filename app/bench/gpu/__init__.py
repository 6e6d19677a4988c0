"""All that has to be proven on a GPU, in one run."""
