"""Mixtures of experts: the choice of experts for each token, and the experts' projections.

An assignment is a pair of a token and one of its experts. The assignments are sorted by expert, so that each expert
multiplies consecutive rows. The numbers of rows stay on the device, and no shape depends on them.
"""
