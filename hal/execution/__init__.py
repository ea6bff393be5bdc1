"""The runner, and every way to run a step: eager, captured whole, captured in pieces, compiled by Inductor.

A form runs the steps of some shapes. The runner takes the first that serves a batch, and else the model's own Python.
"""
