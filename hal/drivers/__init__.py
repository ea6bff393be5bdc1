"""What a vendor implements beside its driver and backend: compilers, and how configurations choose among them."""
