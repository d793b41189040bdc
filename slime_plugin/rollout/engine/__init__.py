"""Where tokens are sampled."""
