"""Recognition of hal's operations in models that are written in plain torch, such as those of transformers.

``torch_calls`` replaces calls of torch that are an operation by themselves. ``decoder_layers``, ``rotations`` and
``experts`` are rewrites from the overloads of ATen that spell an operation out. ``merge_projections`` merges
projections of one input. ``recognition`` lists them in the order in which they are applied: to a graph of Dynamo, and
to the step of a model of hal that computes in plain torch.
"""
