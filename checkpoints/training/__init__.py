"""Training of the checkpoint that ships as "nano", on the library's own model.

>>> # python -m k3jax.checkpoints.training.run --output run      train, resume where it stopped
>>> # python -m k3jax.checkpoints.training.evaluate --run run    the numbers of the model card
"""
