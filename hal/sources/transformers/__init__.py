"""Models and processors of transformers: its own code of models, with hal's attention, layers, states and loader.

The source of models ``transformers`` finds the class of a checkpoint, and imports transformers when it is first asked.
"""
