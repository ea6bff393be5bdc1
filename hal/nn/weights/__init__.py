"""Weights: how a parameter is bound to the tensors of a checkpoint, and assembled from them."""
