"""How an operation is declared: its axes, dtypes, samples, tolerance, and its torch.library registration."""
