"""The runner, and the execution forms: eager, graphs of whole steps, graphs of pieces, and Inductor.

A form runs steps of certain shapes. The runner uses the first form that accepts a batch, else the model's Python code.
"""
