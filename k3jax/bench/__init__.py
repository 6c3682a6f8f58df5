"""``k3jax bench``: decode steps of several implementations on the same weights, inputs and machine.

All implementations start from one state and take the same tokens. Before timing, the logits of every
step are compared; then rounds of steps alternate between the implementations, in one process, each
round several steps in flight. What cannot run here is listed with its reasons.

:func:`k3jax.bench.run.bench` runs one, :mod:`k3jax.bench.report` is what it returns.
"""
